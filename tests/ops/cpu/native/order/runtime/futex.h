// In place of ops/cpu/csrc/runtime/futex.h: threads that wait do not spin, and sleep in the machine.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

#include "machine.h"

namespace umbra {

constexpr int kSpins = 1;

inline void pause() {}

template <class T>
void futex_wait(std::atomic<T>& word, uint32_t seen, const timespec* limit = nullptr) {
    machine::futex_wait(&word, seen, limit);
}

template <class T>
void futex_wake(std::atomic<T>& word) {
    machine::futex_wake(&word);
}

}  // namespace umbra

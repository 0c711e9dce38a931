// How threads of this module wait: a short spin, then sleep in the kernel.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

namespace umbra {

constexpr int kSpins = 3000;  // a pause is 10 to 40 ns

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Sleeps while `word` holds `seen`, at most for `limit`; may return earlier.
template <class T>
void futex_wait(std::atomic<T>& word, uint32_t seen, const timespec* limit = nullptr) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, limit, nullptr, 0);
}

template <class T>
void futex_wake(std::atomic<T>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace umbra

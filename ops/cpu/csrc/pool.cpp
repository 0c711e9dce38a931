#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace umbra {
namespace {

constexpr int kSpins = 3000;  // a pause is 10 to 40 ns

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class T>
void futex_wait(std::atomic<T>& word, uint32_t seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

template <class T>
void futex_wake(std::atomic<T>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a refusal costs speed, not correctness
}

}  // namespace

Pool::Pool(int threads, const std::vector<int>& cpus) : threads_(threads) {
    for (int i = 1; i < threads; i++) {
        const int cpu = i < static_cast<int>(cpus.size()) ? cpus[i] : -1;
        workers_.emplace_back([this, i, cpu] {
            if (cpu >= 0) pin(cpu);
            work(i);
        });
    }
}

Pool::~Pool() {
    stop_ = true;
    epoch_.fetch_add(1, std::memory_order_release);
    futex_wake(epoch_);
    for (auto& worker : workers_) worker.join();
}

void Pool::run(int count, Task task, void* context) {
    if (threads_ == 1 || count <= 1) {
        for (int i = 0; i < count; i++) task(context, i, 0);
        return;
    }
    task_ = task, context_ = context, count_ = count;
    next_.store(0, std::memory_order_relaxed);
    running_.store(threads_ - 1, std::memory_order_relaxed);
    // Sequentially consistent with a worker's `sleepers_` increment and its second look at `epoch_`: either that
    // look sees the new epoch, or this load sees the sleeper.
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake(epoch_);
    drain(0);
    for (int spin = 0; running_.load(std::memory_order_acquire) != 0;) {
        if (++spin < kSpins) {
            pause();
            continue;
        }
        caller_asleep_.store(1, std::memory_order_seq_cst);
        if (const int left = running_.load(std::memory_order_seq_cst); left != 0) futex_wait(running_, left);
        caller_asleep_.store(0, std::memory_order_relaxed);
    }
}

void Pool::drain(int thread) {
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) task_(context_, i, thread);
}

void Pool::work(int thread) {
    uint32_t seen = 0;
    for (;;) {
        for (int spin = 0; epoch_.load(std::memory_order_acquire) == seen;) {
            if (++spin < kSpins) {
                pause();
                continue;
            }
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            if (epoch_.load(std::memory_order_seq_cst) == seen) futex_wait(epoch_, seen);
            sleepers_.fetch_sub(1, std::memory_order_relaxed);
        }
        seen++;
        if (stop_) return;
        drain(thread);
        if (running_.fetch_sub(1, std::memory_order_seq_cst) == 1 && caller_asleep_.load(std::memory_order_seq_cst))
            futex_wake(running_);
    }
}

}  // namespace umbra

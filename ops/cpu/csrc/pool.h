// A pool of threads that runs one job at a time: `count` tasks, handed out one by one to whoever is free.
//
// Ordering. The caller writes the job (function, context, count) and then publishes it by a release increment of
// `epoch_`; a worker that sees the new epoch by an acquire load sees the job. Workers report with a release decrement of
// `running_`; the caller returns after an acquire load of zero, so it sees all that the tasks wrote. A worker touches
// the job only between those two, so the next job cannot overwrite one that is still being read.
//
// Waiting. Everyone spins for a few tens of microseconds, as long as the next job of a decode step is usually away, and
// then sleeps in the kernel (futex), so that an idle pool costs nothing and a busy machine gets its core back.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace umbra {

class Pool {
public:
    using Task = void (*)(void* context, int task, int thread);

    // `threads` in all, the caller's included; worker i is pinned to cpus[i] where that is given (-1: not pinned).
    explicit Pool(int threads, const std::vector<int>& cpus = {});
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // Run tasks 0 .. count - 1 and return when all are done. Not reentrant: a task must not call it.
    void run(int count, Task task, void* context);

    template <class F>
    void each(int count, F&& f) {
        run(
            count, [](void* context, int task, int thread) { (*static_cast<F*>(context))(task, thread); }, &f);
    }

private:
    void work(int thread);
    void drain(int thread);

    const int threads_;
    Task task_ = nullptr;
    void* context_ = nullptr;
    int count_ = 0;
    bool stop_ = false;
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> running_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<uint32_t> caller_asleep_{0};
    std::vector<std::thread> workers_;
};

}  // namespace umbra

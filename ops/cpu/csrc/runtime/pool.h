// A pool of threads that runs one job at a time. Threads belong to NUMA nodes and so do tasks: a job has a range of
// tasks for each node, handed out in chunks to whichever thread of that node is free. No thread takes another node's
// task, which would read that node's weights over the interconnect.
//
// Chunks. Of what is left, half is dealt out in one chunk to each thread, then half of the rest, down to single tasks:
// neighbouring tasks read neighbouring memory, and long streams run at the speed of memory where short ones do not, while
// the small chunks at the end make up for threads that fell behind.
//
// Ordering. The caller writes the job (function, context, counts) and then publishes it by a release increment of
// `epoch_`; a worker that sees the new epoch by an acquire load sees the job. Workers report with a release decrement
// of `running_`; the caller returns after an acquire load of zero, so it sees all that the tasks wrote. A worker touches
// the job only between those two, so the next job cannot overwrite one that is still being read.
//
// Waiting. Everyone spins for a few tens of microseconds, as long as the next job of a decode step is usually away, and
// then sleeps in the kernel (futex), so that an idle pool costs nothing and a busy machine gets its core back.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "runtime/topology.h"

namespace umbra {

// Keeps this thread on `cpus`; a refusal costs speed, not correctness.
void pin(const std::vector<int>& cpus);

class Pool {
public:
    using Task = void (*)(void* context, int node, int begin, int end, int thread);

    // The calling thread is thread 0, in the first team. It is the one that must call the functions below and, where
    // that team names CPUs, it stays on them as long as the pool lives.
    explicit Pool(const std::vector<Team>& teams);
    explicit Pool(int threads) : Pool(std::vector<Team>{{-1, threads, {}}}) {}
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    int nodes() const { return static_cast<int>(nodes_.size()); }

    // The first of the things of node `node` when `count` are split over the nodes in proportion to threads. Rounded
    // up, so that a single thing is for node 0, where the caller does it without waking anyone.
    int first(int count, int node) const {
        const int64_t before = node < nodes() ? nodes_[node].threads_before : threads_;
        return static_cast<int>((count * before + threads_ - 1) / threads_);
    }

    // f(node, begin, end, thread) for chunks of tasks that together are 0 .. count(node) - 1, of every node; returns when
    // all are done. Not reentrant.
    template <class Count, class F>
    void on_nodes(Count&& count, F&& f) {
        for (int n = 0; n < nodes(); n++) nodes_[n].count = count(n);
        run([](void* context, int node, int begin, int end,
               int thread) { (*static_cast<F*>(context))(node, begin, end, thread); },
            &f);
    }

    // f(task, thread) for tasks 0 .. count - 1, wherever their memory is.
    template <class F>
    void each(int count, F&& f) {
        on_nodes([&](int n) { return first(count, n + 1) - first(count, n); },
                 [&](int n, int begin, int end, int thread) {
                     for (int i = begin; i < end; i++) f(first(count, n) + i, thread);
                 });
    }

private:
    struct alignas(64) NodeTasks {
        std::atomic<int> next{0};
        int count = 0;
        int threads = 0;
        int threads_before = 0;  // of the nodes before this one
    };

    void run(Task task, void* context);
    void work(int node, int thread);
    void drain(int node, int thread);
    void end_workers();

    int threads_ = 0;
    Task task_ = nullptr;
    void* context_ = nullptr;
    bool stop_ = false;
    bool caller_pinned_ = false;
    cpu_set_t caller_cpus_;  // as they were before
    std::vector<NodeTasks> nodes_;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> running_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<uint32_t> caller_asleep_{0};
    std::vector<std::thread> workers_;
};

}  // namespace umbra

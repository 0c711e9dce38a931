// A pool of threads that runs one job at a time. Threads belong to NUMA nodes and so do tasks: a job has a range of
// tasks for each node, handed out in chunks to whichever thread of that node is free. No thread takes another node's
// task, which would read that node's weights over the interconnect.
//
// Chunks. Half of the remaining tasks are dealt out, one chunk to each thread, then half of the rest, down to single
// tasks. Neighbouring tasks read neighbouring memory, and only long streams run at the full speed of memory; the small
// chunks at the end balance threads that fell behind.
//
// Ordering. The caller writes the job (function, context, counts) and then publishes it by a release increment of
// `epoch_`; a worker that sees the new epoch by an acquire load sees the job. Workers report with a release decrement
// of `running_`; the caller returns after an acquire load of zero, so it sees all that the tasks wrote. A worker
// touches the job only between those two, so the next job cannot overwrite one that is still being read.
//
// Waiting. Threads spin for a few tens of microseconds, which usually covers the time to the next job of a decode step,
// and then sleep in the kernel (futex), so that an idle pool costs nothing and a busy machine gets its cores back.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "runtime/topology.h"

namespace umbra {

// Pins this thread to `cpus`; if the system refuses, only speed suffers.
void pin(const std::vector<int>& cpus);

class Pool {
public:
    using Task = void (*)(void* context, int node, int begin, int end, int thread);

    // The calling thread becomes thread 0, in the first team. Only it may call the functions below. If its team names
    // CPUs, it stays pinned to them as long as the pool lives.
    explicit Pool(const std::vector<Team>& teams);
    explicit Pool(int threads) : Pool(std::vector<Team>{{-1, threads, {}}}) {}
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    int nodes() const { return static_cast<int>(nodes_.size()); }

    // The first of node `node`'s items when `count` items are split over the nodes in proportion to threads. Rounded
    // up, so that a single item belongs to node 0, where the caller handles it without waking other threads.
    int first(int count, int node) const {
        const int64_t before = node < nodes() ? nodes_[node].threads_before : threads_;
        return static_cast<int>((count * before + threads_ - 1) / threads_);
    }

    // Calls f(node, begin, end, thread) for chunks of tasks 0 .. count(node) - 1 of every node; returns when all are
    // done. Not reentrant.
    template <class Count, class F>
    void on_nodes(Count&& count, F&& f) {
        for (int n = 0; n < nodes(); n++) nodes_[n].count = count(n);
        run([](void* context, int node, int begin, int end,
               int thread) { (*static_cast<F*>(context))(node, begin, end, thread); },
            &f);
    }

    // Calls f(task, thread) for tasks 0 .. count - 1, regardless of where their memory lies.
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
        int threads_before = 0;  // total of the nodes before this one
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
    cpu_set_t caller_cpus_;  // before it was pinned
    std::vector<NodeTasks> nodes_;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> running_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<uint32_t> caller_asleep_{0};
    std::vector<std::thread> workers_;
};

}  // namespace umbra

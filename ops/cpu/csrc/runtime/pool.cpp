#include "runtime/pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

#include "runtime/futex.h"

namespace umbra {

void pin(const std::vector<int>& cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

Pool::Pool(const std::vector<Team>& teams) : nodes_(teams.size()) {
    for (size_t n = 0; n < teams.size(); n++) {
        nodes_[n].threads_before = threads_;
        nodes_[n].threads = teams[n].threads;
        threads_ += teams[n].threads;
    }
    try {
        for (int n = 0, thread = 0; n < nodes(); n++)
            for (int i = 0; i < teams[n].threads; i++, thread++) {
                if (thread == 0) continue;  // the caller
                workers_.emplace_back([this, n, thread, cpus = teams[n].cpus] {
                    if (!cpus.empty()) pin(cpus);
                    work(n, thread);
                });
            }
    } catch (...) {  // the system refused another thread
        end_workers();
        throw;
    }
    caller_pinned_ = !teams[0].cpus.empty() && sched_getaffinity(0, sizeof caller_cpus_, &caller_cpus_) == 0;
    if (caller_pinned_) pin(teams[0].cpus);
}

void Pool::end_workers() {
    stop_ = true;
    epoch_.fetch_add(1, std::memory_order_release);
    futex_wake(epoch_);
    for (auto& worker : workers_) worker.join();
}

Pool::~Pool() {
    end_workers();
    if (caller_pinned_) sched_setaffinity(0, sizeof caller_cpus_, &caller_cpus_);
}

void Pool::run(Task task, void* context) {
    int count = 0;
    for (const NodeTasks& node : nodes_) count += node.count;
    if (threads_ == 1 || (count <= 1 && nodes_[0].count == count)) {
        if (count) task(context, 0, 0, count, 0);
        return;
    }
    task_ = task, context_ = context;
    for (NodeTasks& node : nodes_) node.next.store(0, std::memory_order_relaxed);
    running_.store(threads_ - 1, std::memory_order_relaxed);
    // Sequentially consistent with a worker's increment of `sleepers_` and its second load of `epoch_`: either that
    // load sees the new epoch, or the load of `sleepers_` below sees the worker.
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake(epoch_);
    drain(0, 0);
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

void Pool::drain(int node, int thread) {
    std::atomic<int>& next = nodes_[node].next;
    // Read once: they share a cache line with the counter that every thread of the node increments.
    const int count = nodes_[node].count, threads = nodes_[node].threads;
    int begin = 0, dealt = 0;  // tasks and chunks of the rounds before this one
    for (;;) {
        const int chunk = next.fetch_add(1, std::memory_order_relaxed);
        const auto size = [&] { return threads == 1 ? count : std::max(1, (count - begin) / (2 * threads)); };
        for (; chunk >= dealt + threads; dealt += threads) begin += threads * size();
        const int first = begin + (chunk - dealt) * size();
        if (first >= count) return;
        task_(context_, node, first, std::min(count, first + size()), thread);
    }
}

void Pool::work(int node, int thread) {
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
        drain(node, thread);
        if (running_.fetch_sub(1, std::memory_order_seq_cst) == 1 && caller_asleep_.load(std::memory_order_seq_cst))
            futex_wake(running_);
    }
}

}  // namespace umbra

// A worker for measuring: a job's sums are its x, at once in the caller's thread, or by a thread of its own that polls for
// jobs and computes for a given time. Built by stages/latency.py.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "../../ops/cpu/csrc/shadow/job.h"

using umbra::Job;
using Clock = std::chrono::steady_clock;

namespace {
std::atomic<Job*> next{nullptr};
std::atomic<long> busy_ns{0}, element_bytes{2};
std::atomic<bool> stop{false};
std::thread thread;

void compute(Job* job) {
    const auto end = Clock::now() + std::chrono::nanoseconds(busy_ns);
    memcpy(job->sums, job->x, job->tokens * job->hidden * element_bytes);
    while (Clock::now() < end) {
    }
    job->done(job, 0);
}
}  // namespace

extern "C" {

int umbra_echo_now(void*, Job* job) { return compute(job), 0; }
int umbra_echo_later(void*, Job* job) {
    next.store(job, std::memory_order_release);
    return 0;
}
void umbra_echo_begin(long ns) {
    busy_ns = ns;
    stop = false;
    thread = std::thread([] {
        while (!stop)
            if (Job* job = next.exchange(nullptr, std::memory_order_acquire)) compute(job);
    });
}
void umbra_echo_end() {
    stop = true;
    thread.join();
    busy_ns = 0;
}

}  // extern "C"

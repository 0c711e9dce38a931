// The host's part of a bridge, which takes jobs from a stream of a device to the threads that compute experts on the CPU,
// and their results back. A job (job.h) is a few pointers that are passed to the function `submit`; what it computes is
// not known here. ops/ascend/csrc/bridge.cpp and ops/cuda/csrc/bridge.cpp are the devices' parts: they call `run` for a
// payload once the job's inputs are in host memory, and let the stream go on when it has returned.
//
// `done` publishes the sums under the bridge's mutex, which `run` holds when it reads the state. `run` must not call the
// device's API.
//
// A worker that is not done in time does not block the stream for ever: the sums are set to NaN (all bits set, in any
// float type), the bridge fails permanently with an error that names the layer and the step, and later calls return at
// once. The host must check for the error after each step, since a late worker may still write over the NaNs. Such a
// worker still uses its payload: a bridge that is closed meanwhile must not be freed.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>

#include "../cpu/csrc/shadow/job.h"

namespace umbra {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

inline thread_local std::string told;  // text of the error in this thread's last call that failed
inline bool fail(const std::string& why) { return told = why, false; }

struct Calls;
struct Payload {
    Job job;  // must be the first member: `done` casts a Job to its Payload
    Calls* calls;
    size_t sum_bytes;
    enum State { kIdle, kRunning, kDone, kFailed, kLate };
    std::atomic<State> state{kIdle};  // written under the mutex
    int64_t seen = -1;                // the last step whose call has returned
};

// The first base of a device's bridge.
struct Calls {
    SubmitJob submit = nullptr;
    void* context = nullptr;
    milliseconds limit{};  // most time that a job may take
    microseconds spin{};   // for which a call polls its job before it sleeps

    std::mutex guard;
    std::condition_variable moved;
    std::string error;  // the first error; empty while there is none
    std::string aside;  // what an error text adds about the device
    bool closing = false;
    int64_t step = 0, events = 0;
    int inside = 0, running = 0;  // number of calls that run; number of jobs that are not done
};

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Sets the sums to NaN, so that they cannot be taken for a result, and records the error. The stream continues. The
// caller holds the mutex.
inline void poison(Calls& b, Payload& p, const std::string& why) {
    if (b.error.empty())
        b.error = "layer " + std::to_string(p.job.layer) + ", step " + std::to_string(p.job.step) + ": " + why;
    memset(p.job.sums, 0xFF, p.sum_bytes);
}

inline void work(Calls& b, Payload& p, std::unique_lock<std::mutex>& lock) {
    if (!b.error.empty() || b.closing || p.state == Payload::kLate)
        return poison(b, p, "the bridge was closed before the callback came");
    p.state = Payload::kRunning;
    ++b.running;
    const auto begun = Clock::now(), deadline = begun + b.limit;
    lock.unlock();
    const int refused = b.submit(b.context, &p.job);
    if (!refused && b.spin.count())
        while (p.state == Payload::kRunning && Clock::now() < begun + b.spin) relax();
    lock.lock();
    if (refused) {
        p.state = Payload::kIdle;
        --b.running;
        return poison(b, p, "the shadow pool refused the job");
    }
    b.moved.wait_until(lock, deadline, [&] { return p.state != Payload::kRunning || b.closing; });
    if (p.state == Payload::kFailed) poison(b, p, "the shadow pool failed");
    if (p.state != Payload::kRunning) {
        p.state = Payload::kIdle;
        return;
    }
    p.state = Payload::kLate;
    poison(b, p,
           b.closing ? "the bridge was closed while the shadow pool computed"
                     : "the shadow pool was not done within " + std::to_string(b.limit.count()) + " ms");
}

// Takes a payload's job to the workers and returns when its sums are written.
inline void run(void* data) {
    Payload& p = *static_cast<Payload*>(data);
    Calls& b = *p.calls;
    std::unique_lock<std::mutex> lock(b.guard);
    const int64_t step = b.step;
    if (p.state != Payload::kLate)  // a late worker still reads its job
        p.job.step = step;
    ++b.events;
    ++b.inside;
    work(b, p, lock);
    p.seen = step;
    ++b.events;
    --b.inside;
    b.moved.notify_all();
}

inline void done(Job* job, int failed) {
    Payload& p = *reinterpret_cast<Payload*>(job);
    Calls& b = *p.calls;
    std::lock_guard<std::mutex> lock(b.guard);
    --b.running;
    b.moved.notify_all();
    p.state = p.state == Payload::kLate ? Payload::kIdle : failed ? Payload::kFailed : Payload::kDone;
}

}  // namespace umbra

extern "C" {

const char* umbra_bridge_told() { return umbra::told.c_str(); }

umbra::Payload* umbra_payload_new(umbra::Calls* b, const umbra::Job* job, size_t sum_bytes) {
    auto* p = new umbra::Payload{*job, b, sum_bytes};
    p->job.done = umbra::done;
    return p;
}
// To be called only after umbra_bridge_close has returned 0.
void umbra_payload_free(umbra::Payload* p) { delete p; }
int64_t umbra_payload_seen(umbra::Payload* p) {
    std::lock_guard<std::mutex> lock(p->calls->guard);
    return p->seen;
}

// Sets the step that later calls name in errors.
void umbra_bridge_begin(umbra::Calls* b, int64_t step) {
    std::lock_guard<std::mutex> lock(b->guard);
    b->step = step;
    b->moved.notify_all();
}

int64_t umbra_bridge_events(umbra::Calls* b) {  // a count that grows by one when a call begins and when it ends
    std::lock_guard<std::mutex> lock(b->guard);
    return b->events;
}

// The text of the first error, or nullptr if there is none. If `otherwise` is given and there is no error yet, it
// becomes the first error.
const char* umbra_bridge_error(umbra::Calls* b, const char* otherwise) {
    std::lock_guard<std::mutex> lock(b->guard);
    if (b->error.empty() && otherwise) b->error = otherwise + b->aside;
    umbra::told = b->error;
    return umbra::told.empty() ? nullptr : umbra::told.c_str();
}

}  // extern "C"

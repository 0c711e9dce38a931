// The bridge under ThreadSanitizer, with a stand-in for AscendCL: a stream that a thread works off, callbacks on the
// report thread, and workers that are on time, late or failing, also while the bridge is closed.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>

#include "ops/ascend/csrc/bridge.cpp"

namespace {

struct Queue {  // of work for one thread
    std::mutex guard;
    std::condition_variable moved;
    std::deque<std::function<void()>> tasks;
    bool busy = false;

    void push(std::function<void()> task) {
        std::lock_guard<std::mutex> lock(guard);
        tasks.push_back(std::move(task));
        moved.notify_all();
    }
    bool run(milliseconds most) {
        std::unique_lock<std::mutex> lock(guard);
        if (!moved.wait_for(lock, most, [&] { return !tasks.empty(); })) return false;
        auto task = std::move(tasks.front());
        tasks.pop_front();
        busy = true;
        lock.unlock();
        task();
        lock.lock();
        busy = false;
        moved.notify_all();
        return true;
    }
    bool idle(milliseconds most) {
        std::unique_lock<std::mutex> lock(guard);
        return moved.wait_for(lock, most, [&] { return tasks.empty() && !busy; });
    }
};

Queue stream, reports, pool;
std::atomic<bool> over{false}, failing{false};
std::atomic<int> slow_ms{0};

void compute(Job* job) {
    for (int64_t i = 0; i < job->tokens * job->hidden; ++i)
        static_cast<float*>(job->sums)[i] = static_cast<const float*>(job->x)[i % job->hidden];
}
// A late worker writes where the poison is: a race that the bridge allows, for its error counts and not the sums.
__attribute__((no_sanitize("thread"))) void compute_late(Job* job) {
    for (int64_t i = 0; i < job->tokens * job->hidden; ++i)
        static_cast<float*>(job->sums)[i] = static_cast<const float*>(job->x)[i % job->hidden];
}

int submit(void*, Job* job) {
    pool.push([job] {
        std::this_thread::sleep_for(milliseconds(slow_ms));
        slow_ms ? compute_late(job) : compute(job);
        job->done(job, failing);
    });
    return 0;
}

void check(bool right, const char* what) {
    if (!right) {
        printf("wrong: %s\n", what);
        exit(1);
    }
}

struct Run {
    static constexpr int64_t hidden = 64, tokens = 4;
    float x[hidden]{}, sums[tokens * hidden]{}, back[tokens * hidden]{};
    Bridge* bridge;
    Payload* payload;

    explicit Run(int64_t limit_ms) : bridge(umbra_bridge_open(nullptr, submit, nullptr, limit_ms, 0)) {
        check(bridge && !umbra_bridge_subscribe(bridge, &stream), "open");
        const Job job{x, nullptr, nullptr, nullptr, sums, tokens, 2, hidden, 5, -1, nullptr};
        payload = umbra_payload_new(bridge, &job, sizeof sums);
    }
    void step(int64_t number) {  // copy out, callback, copy back
        umbra_bridge_begin(bridge, number);
        stream.push([this, number] { std::fill(x, x + hidden, static_cast<float>(number)); });
        check(!umbra_bridge_launch(bridge, &stream, payload), "launch");
        stream.push([this] { memcpy(back, sums, sizeof sums); });
    }
    bool wait() { return umbra_bridge_synchronize(bridge, &stream, 5000) == 0; }
    const char* error() { return umbra_bridge_error(bridge, nullptr); }
    void close(int status) {
        check(umbra_bridge_close(bridge, 2000) == status, "close");
        if (!status) {
            umbra_payload_free(payload);
            umbra_bridge_free(bridge);
        }
    }
};

}  // namespace

extern "C" {
int aclrtGetCurrentContext(void** context) { return *context = &stream, 0; }
int aclrtSetCurrentContext(void*) { return 0; }
int aclrtSubscribeReport(uint64_t, Stream) { return 0; }
int aclrtUnSubscribeReport(uint64_t, Stream) { return 0; }
int aclrtProcessReport(int32_t ms) { return reports.run(milliseconds(ms)) ? 0 : kReportTimeout; }
int aclrtSynchronizeStreamWithTimeout(Stream, int32_t ms) { return stream.idle(milliseconds(ms)) ? 0 : kSyncTimeout; }
int aclrtSynchronizeDeviceWithTimeout(int32_t ms) { return aclrtSynchronizeStreamWithTimeout(nullptr, ms); }
int aclrtLaunchCallback(void (*function)(void*), void* data, int, Stream) {
    stream.push([=] {
        struct Signal {
            std::mutex guard;
            std::condition_variable moved;
            bool done = false;
        } signal;
        reports.push([&] {
            function(data);
            std::lock_guard<std::mutex> lock(signal.guard);
            signal.done = true;
            signal.moved.notify_all();
        });
        std::unique_lock<std::mutex> lock(signal.guard);
        signal.moved.wait(lock, [&] { return signal.done; });
    });
    return 0;
}
}

int main() {
    std::thread streams([] {
        while (!over) stream.run(milliseconds(10));
    });
    std::thread workers([] {
        while (!over) pool.run(milliseconds(10));
    });
    {
        Run run(5000);
        for (int64_t step = 1; step < 500; ++step) {
            run.step(step);
            check(run.wait() && !run.error(), "a step");
            check(run.back[0] == step && run.back[Run::tokens * Run::hidden - 1] == step, "sums of this step");
        }
        run.close(0);
    }
    for (int round = 0; round < 20; ++round) {  // late by less and less: the end of the job races with the deadline
        slow_ms = 24 - round;
        Run run(15);
        run.step(round);
        check(run.wait(), "the stream goes on");
        check(std::isnan(run.back[0]) ? run.error() != nullptr : run.error() || run.back[0] == round, "silently wrong");
        run.close(0);
    }
    slow_ms = 0, failing = true;
    {
        Run run(5000);
        run.step(7);
        check(run.wait() && run.error() == std::string("layer 5, step 7: the shadow pool failed"), "failed");
        run.close(0);
    }
    failing = false, slow_ms = 60;
    int poisoned = 0;
    for (int round = 0; round < 20; ++round) {  // closed with a callback pending, or waiting for its worker
        Run run(5000);
        run.step(round);
        std::this_thread::sleep_for(milliseconds(round % 4));
        run.close(0);
        // On a busy machine a worker can be done before this thread runs again.
        check(std::isnan(run.back[0]) || run.back[0] == round, "closed early");
        poisoned += std::isnan(run.back[0]);
    }
    check(poisoned > 0, "poisoned");
    over = true;
    streams.join();
    workers.join();
    puts("ok");
}

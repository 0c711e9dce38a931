// ops/ascend/csrc/bridge.cpp in every order: a stream, a worker and the host. The callback begins after the copies to the
// host and ends before the copy back; a job's memory belongs to one of them at a time; sums are the job's or NaN with an
// error; after `close` returned 0 nothing of the bridge is used any more.

#include "ops/ascend/csrc/bridge.cpp"

#include "machine.h"

namespace {

void write(Job* job) { *static_cast<float*>(job->sums) = 2 * *static_cast<const float*>(job->x); }
// A late worker writes where the poison is: a race that the bridge allows, for its error counts and not the sums.
__attribute__((no_sanitize("thread"))) void write_late(Job* job) {
    *static_cast<float*>(job->sums) = 2 * *static_cast<const float*>(job->x);
}

struct Machine {  // a stream that runs its callbacks itself (aclrtLaunchHostFunc), and a worker
    float x = 0, sums = 0, back = 0;
    std::mutex guard;
    std::condition_variable moved;
    Job* job = nullptr;
    bool over = false, late = false;

    void compute() {  // the worker's thread: one job
        std::unique_lock<std::mutex> lock(guard);
        moved.wait(lock, [&] { return job || over; });
        if (!job) return;
        Job* mine = job;
        lock.unlock();
        late ? write_late(mine) : write(mine);
        mine->done(mine, 0);
    }
    void end() {
        std::lock_guard<std::mutex> lock(guard);
        over = true;
        moved.notify_all();
    }
};

int accept(void* context, Job* job) {
    Machine& m = *static_cast<Machine*>(context);
    std::lock_guard<std::mutex> lock(m.guard);
    m.job = job;
    m.moved.notify_all();
    return 0;
}
int refuse(void*, Job*) { return 1; }

int launch_now(Stream, void (*function)(void*), void* data) { return function(data), 0; }
int ok_wait(int32_t) { return 0; }

Bridge* opened(SubmitJob submit, Machine* m) {
    new (&told) std::string;  // what it has is of the execution before, whose memory is gone
    auto* b = new Bridge;
    b->acl.launch_host_func = launch_now;
    b->acl.synchronize_device = ok_wait;
    b->submit = submit, b->context = m;
    b->limit = milliseconds(10);
    b->host_func = true;
    return b;
}
Payload* payload(Bridge* b, Machine& m) {
    const Job job{&m.x, nullptr, nullptr, nullptr, &m.sums, 1, 1, 1, 5, -1, nullptr};
    return umbra_payload_new(b, &job, sizeof m.sums);
}

bool is_nan(float value) { return value != value; }

void step() {
    Machine m;
    Bridge* b = opened(accept, &m);
    Payload* p = payload(b, m);
    std::thread worker([&] { m.compute(); });
    std::thread stream([&] {
        m.x = 3;
        umbra_bridge_launch(b, nullptr, p);
        m.back = m.sums;
    });
    umbra_bridge_begin(b, 1);  // the host goes on meanwhile
    machine::demand(!umbra_bridge_error(b, nullptr), "no error");
    stream.join();
    machine::demand(m.back == 6 && umbra_payload_seen(p) >= 0 && umbra_bridge_events(b) == 2, "the sums of the job");
    machine::demand(umbra_bridge_close(b, 1000) == 0, "closed");
    umbra_payload_free(p);
    delete b;
    worker.join();
}

// The host closes at any time, or the worker is late. What is freed is not used any more.
void closed() {
    Machine m;
    m.late = true;
    Bridge* b = opened(accept, &m);
    Payload* p = payload(b, m);
    std::thread worker([&] { m.compute(); });
    std::thread stream([&] {
        m.x = 3;
        umbra_bridge_launch(b, nullptr, p);
    });
    const int status = umbra_bridge_close(b, 1000);
    stream.join();
    m.end();
    worker.join();
    const bool error = umbra_bridge_error(b, nullptr);
    machine::demand(error || m.sums == 6, "sums or an error");
    machine::outcome(10 * status + error);
    umbra_payload_free(p);
    delete b;
}

void refused() {
    Machine m;
    Bridge* b = opened(refuse, &m);
    Payload* p = payload(b, m);
    std::thread stream([&] { umbra_bridge_launch(b, nullptr, p); });
    machine::demand(umbra_bridge_events(b) <= 2, "events of one callback");
    stream.join();
    machine::demand(is_nan(m.sums) && umbra_bridge_error(b, nullptr), "NaN and an error");
    machine::demand(umbra_bridge_close(b, 1000) == 0, "closed");
    umbra_payload_free(p);
    delete b;
}

}  // namespace

int main(int count, char** arguments) {
    return machine::explore(count, arguments,
                            {{"a step", step},
                             {"refused", refused},
                             {"closed", closed},
                             {"late", closed, 1},
                             {"late twice", closed, 2, true}});
}

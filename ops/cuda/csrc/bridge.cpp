// The GPU's part of the bridge whose host's part is ops/bridge/calls.h. It compiles without CUDA: the driver's library is
// loaded when a bridge is opened, and what it needs of the driver's types is declared here. Both ways work in a capture.
//
// By a host function, on a side stream:
//
//   main stream    ..x, ids, weights..[fork]......resident experts......[join] own + sums (read from the host)
//   side stream                       [fork] publish, host function     [join]
//   driver's thread                                   run(payload): submit(job), wait for done(job)
//
// By a doorbell, without a side stream or a thread of the driver. The mail is two words of mapped host memory:
//
//   main stream    publish, task = n ........resident experts........ wait for done == 1, done = 0, own + sums
//   coordinator             polls task; task = 0, run(payload n), done = 1
//
// Ordering. `publish` writes x, ids, weights and places to mapped host memory. A host function is called after the work
// before it is complete, and its end precedes the work after it. A write of a stream to memory (cuStreamBatchMemOp) is
// preceded by a fence of the system's scope, so the coordinator, which acquires `task`, sees what was published; it
// releases `done` after the sums, and what the stream does after its wait sees them. One job is in flight at a time,
// since the next one is published only after the wait, so each word has one writer at a time: the stream writes `task`
// when it is 0 and `done` when it is 1; the coordinator the other way round.
//
// The coordinator polls for kHot after a job or the beginning of a step, and sleeps otherwise.
//
// After an error of the context no host function is called any more and no stream goes on, so the bridge's owner must
// look at the context too: umbra_bridge_wait polls an event and returns the context's error.
#include <thread>
#include <type_traits>
#include <vector>

#include <dlfcn.h>

#include "../../bridge/calls.h"

namespace {

using umbra::Clock;
using umbra::fail;
using umbra::Job;
using umbra::microseconds;
using umbra::milliseconds;
using umbra::Payload;
using umbra::SubmitJob;
using umbra::told;
using Address = unsigned long long;
using Stream = void*;
using Event = void*;
constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY
constexpr unsigned kPortable = 1, kMapped = 2, kWait = 1, kWrite = 2,
                   kWriteWide = 5;  // CU_MEMHOSTALLOC_.., CU_STREAM_MEM_OP_..
constexpr unsigned kEqual = 1;      // CU_STREAM_WAIT_VALUE_EQ
constexpr milliseconds kHot{50}, kSpinning{5};
constexpr microseconds kNap{20};

struct MemOp {  // CUstreamBatchMemOpParams
    unsigned operation;
    Address address;
    uint64_t value;
    unsigned flags;
    Address alias;
    uint64_t rest;
};
static_assert(sizeof(MemOp) == 48, "cuda.h has pad[6] of 64 bits");

struct Driver {
    int (*current)(void**);
    int (*launch_host_func)(Stream, void (*)(void*), void*);
    int (*mem_ops)(Stream, unsigned count, MemOp*, unsigned flags);
    int (*query_stream)(Stream);
    int (*query_event)(Event);
    int (*host_alloc)(void**, size_t, unsigned flags);
    int (*host_free)(void*);
    int (*device_address)(Address*, void*, unsigned flags);
    int (*error_name)(int, const char**);
};

struct alignas(64) Mail {
    alignas(64) std::atomic<uint32_t> task;  // number of a payload, from 1; 0: none
    alignas(64) std::atomic<uint32_t> done;
};

struct Bridge : umbra::Calls {
    Driver cu{};
    void* library = nullptr;
    std::vector<Stream> streams;   // that host functions were launched on
    Mail* mail = nullptr;          // nullptr: host functions
    Address task = 0, answer = 0;  // of the mail's words, for the device
    std::vector<Payload*> numbered;
    std::atomic<bool> stop{false};
    bool stopped = true;
    bool failed = false;  // the context, as far as its owner has seen
    std::thread coordinator;
};

bool bind(Driver& cu, void* library) {
    const auto find = [&](auto& to, const char* name) {
        to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(dlsym(library, name));
        return to || fail(std::string("the driver has no ") + name);
    };
    return find(cu.current, "cuCtxGetCurrent") && find(cu.launch_host_func, "cuLaunchHostFunc") &&
           find(cu.mem_ops, "cuStreamBatchMemOp_v2") && find(cu.query_stream, "cuStreamQuery") &&
           find(cu.query_event, "cuEventQuery") && find(cu.host_alloc, "cuMemHostAlloc") &&
           find(cu.host_free, "cuMemFreeHost") && find(cu.device_address, "cuMemHostGetDevicePointer_v2") &&
           find(cu.error_name, "cuGetErrorName");
}

std::string named(const Bridge& b, const char* call, int status) {
    const char* name = nullptr;
    b.cu.error_name(status, &name);
    return std::string(call) + ": error " + std::to_string(status) + (name ? std::string(" (") + name + ")" : "");
}

void coordinate(Bridge& b) {
    auto hot = Clock::now() + kHot;
    int64_t step = -1;
    std::unique_lock<std::mutex> lock(b.guard, std::defer_lock);
    while (!b.stop) {
        const uint32_t task = b.mail->task.load(std::memory_order_acquire);
        if (task) {
            b.mail->task.store(0, std::memory_order_relaxed);
            lock.lock();
            Payload* const payload = b.numbered[task - 1];
            lock.unlock();
            umbra::run(payload);
            b.mail->done.store(1, std::memory_order_release);
            hot = Clock::now() + kHot;
            continue;
        }
        for (int i = 0; i < 16; i++) umbra::relax();
        if (Clock::now() < hot) continue;
        lock.lock();
        b.moved.wait_for(lock, kHot, [&] { return b.stop || b.step != step; });
        if (b.step != step) hot = Clock::now() + kHot;
        step = b.step;
        lock.unlock();
    }
    lock.lock();
    b.stopped = true;
    b.moved.notify_all();
}

bool open_mail(Bridge& b) {
    void* memory = nullptr;
    if (int status = b.cu.host_alloc(&memory, sizeof(Mail), kPortable | kMapped))
        return fail(named(b, "cuMemHostAlloc", status));
    b.mail = new (memory) Mail{};
    for (auto [to, word] : {std::pair(&b.task, &b.mail->task), std::pair(&b.answer, &b.mail->done)})
        if (int status = b.cu.device_address(to, word, 0)) return fail(named(b, "cuMemHostGetDevicePointer", status));
    b.stopped = false;
    b.coordinator = std::thread(coordinate, std::ref(b));
    return true;
}

int mem_ops(Bridge* b, Stream stream, unsigned count, MemOp* ops) {
    const int status = b->cu.mem_ops(stream, count, ops, 0);
    return status ? !fail(named(*b, "cuStreamBatchMemOp", status)) : 0;
}

}  // namespace

extern "C" {

// Opens a bridge for the current context. Returns nullptr on failure, with its reason in umbra_bridge_told(). With
// `doorbell` 1 jobs go by a doorbell, otherwise by host functions. A call polls its job for `spin_us` before it sleeps.
Bridge* umbra_bridge_open(const char* library, SubmitJob submit, void* context, int64_t limit_ms, int64_t spin_us,
                          int doorbell) {
    void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!opened) return fail(dlerror()), nullptr;
    auto* b = new Bridge;
    b->library = opened;
    b->submit = submit;
    b->context = context;
    b->limit = milliseconds(limit_ms);
    b->spin = microseconds(spin_us);
    void* current = nullptr;
    if (bind(b->cu, opened) &&
        ((!b->cu.current(&current) && current) || fail("no context is current in this thread")) &&
        (!doorbell || open_mail(*b)))
        return b;
    if (b->mail) b->cu.host_free(b->mail);
    delete b;
    return dlclose(opened), nullptr;
}

// The word that rings the doorbell, as an address of the device, for a kernel that publishes and rings; 0: there is none.
uint64_t umbra_bridge_bell(Bridge* b) { return b->task; }

// The number to write there for a payload, with release at the system's scope. To be called once for each payload.
uint32_t umbra_bridge_number(Bridge* b, Payload* p) {
    std::lock_guard<std::mutex> lock(b->guard);
    b->numbered.push_back(p);
    return static_cast<uint32_t>(b->numbered.size());
}

// The following three queue on the stream, or add to the graph that it is being captured into.
int umbra_bridge_launch(Bridge* b, Stream stream, Payload* p) {  // the host function; `p` must outlive the graph
    if (std::find(b->streams.begin(), b->streams.end(), stream) == b->streams.end()) b->streams.push_back(stream);
    const int status = b->cu.launch_host_func(stream, umbra::run, p);
    return status ? !fail(named(*b, "cuLaunchHostFunc", status)) : 0;
}
int umbra_bridge_ring(Bridge* b, Stream stream, uint32_t number) {
    MemOp op{kWrite, b->task, number, 0, 0, 0};
    return mem_ops(b, stream, 1, &op);
}
int umbra_bridge_await(Bridge* b, Stream stream) {
    MemOp ops[] = {{kWait, b->answer, 1, kEqual, 0, 0}, {kWrite, b->answer, 0, 0, 0, 0}};
    return mem_ops(b, stream, 2, ops);
}

// Writes 64 bits of the device's memory once the work before it on the stream is complete and visible.
int umbra_bridge_write(Bridge* b, Stream stream, uint64_t address, uint64_t value) {
    MemOp op{kWriteWide, address, value, 0, 0, 0};
    return mem_ops(b, stream, 1, &op);
}

// Waits at most `ms` for the event. 0: it has happened, 1: not yet, -1: an error, see umbra_bridge_told(). Must not be
// called while the event's stream is being captured.
int umbra_bridge_wait(Bridge* b, Event event, int32_t ms) {
    const auto begun = Clock::now();
    for (;;) {
        const int status = b->cu.query_event(event);
        if (!status) return 0;
        if (status != kNotReady) {
            b->failed = true;
            return fail("the GPU's context failed: " + named(*b, "cuEventQuery", status)), -1;
        }
        const auto past = Clock::now() - begun;
        if (past >= milliseconds(ms)) return 1;
        if (past < kSpinning)
            for (int i = 0; i < 64; i++) umbra::relax();
        else
            std::this_thread::sleep_for(kNap);
    }
}

// Closes the bridge. Calls that wait, and those that come later, return at once with sums of NaN. Returns 0 once all
// work has ended. Returns 1 if after `ms` a stream, a call or a worker is still busy, or the context has failed; then
// neither the bridge nor its payloads and their buffers may ever be freed.
int umbra_bridge_close(Bridge* b, int64_t ms) {
    const auto deadline = Clock::now() + milliseconds(ms);
    std::unique_lock<std::mutex> lock(b->guard);
    b->closing = true;
    b->moved.notify_all();
    lock.unlock();
    bool busy = b->failed;
    for (Stream stream : b->streams) {
        int status;
        while ((status = b->cu.query_stream(stream)) == kNotReady && Clock::now() < deadline)
            std::this_thread::sleep_for(kNap);
        busy = busy || status;
    }
    lock.lock();
    const bool quiet = b->moved.wait_until(lock, deadline, [&] { return !b->inside && !b->running; });
    if (busy || !quiet) return 1;  // the coordinator goes on, so that the streams do
    b->stop = true;
    b->moved.notify_all();
    lock.unlock();
    if (b->coordinator.joinable()) b->coordinator.join();
    return 0;
}

void umbra_bridge_free(Bridge* b) {
    if (b->mail) b->cu.host_free(b->mail);
    dlclose(b->library);
    delete b;
}

}  // extern "C"

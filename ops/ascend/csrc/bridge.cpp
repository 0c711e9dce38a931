// The Ascend NPU's part of the bridge whose host's part is ops/bridge/calls.h. It compiles without CANN, whose library is
// loaded when a bridge is opened.
//
//   main stream   ..x, ids, weights..[fork]......resident experts......[join]..
//   side stream                      [fork] D2H, D2H, D2H, callback, H2D [join]
//   report thread                                    run(payload): submit(job), wait for done(job)
//   workers                                                          job
//
// A callback is called by the report thread, which loops over aclrtProcessReport and is subscribed for the side stream.
// With aclrtLaunchHostFunc it is called by a thread of CANN instead.
//
// Ordering. All of this is on one stream, so the callback begins after the copies to the host (D2H), and the copy back
// (H2D) begins after the callback has returned. From submit to done, only the workers access the buffers. The next job
// of the same payload cannot begin earlier, since its copies come later on the same stream, in a later step or replay.
#include <thread>
#include <vector>

#include <dlfcn.h>

#include "../../bridge/calls.h"

namespace {

using umbra::Clock;
using umbra::fail;
using umbra::Job;
using umbra::milliseconds;
using umbra::Payload;
using umbra::SubmitJob;
using umbra::told;
using Stream = void*;
constexpr size_t kStreams = 32;                                            // most streams of one bridge
constexpr int kBlock = 1, kReportTimeout = 507012, kSyncTimeout = 507046;  // ACL_CALLBACK_BLOCK, ACL_ERROR_RT_..
constexpr milliseconds kReportWait{100};

struct Acl {
    int (*get_context)(void**);
    int (*set_context)(void*);
    int (*subscribe)(uint64_t thread, Stream);
    int (*unsubscribe)(uint64_t thread, Stream);
    int (*process_report)(int32_t ms);
    int (*launch_callback)(void (*)(void*), void*, int block, Stream);
    int (*launch_host_func)(Stream, void (*)(void*), void*);  // nullptr if this CANN does not have it
    int (*synchronize_stream)(Stream, int32_t ms);
    int (*synchronize_device)(int32_t ms);
};

struct Bridge : umbra::Calls {
    Acl acl{};
    void *library = nullptr, *device = nullptr;  // device: the context of the thread that opened the bridge
    bool host_func = false;
    bool stop = false, stopped = true;
    std::vector<Stream> streams;
    std::thread reporter;
    uint64_t thread = 0;
};

bool bind(Acl& acl, void* library) {
    const auto find = [&](auto& to, const char* name) {
        to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(dlsym(library, name));
        return to || fail(std::string("libascendcl has no ") + name);
    };
    find(acl.launch_host_func, "aclrtLaunchHostFunc");
    return find(acl.get_context, "aclrtGetCurrentContext") && find(acl.set_context, "aclrtSetCurrentContext") &&
           find(acl.subscribe, "aclrtSubscribeReport") && find(acl.unsubscribe, "aclrtUnSubscribeReport") &&
           find(acl.process_report, "aclrtProcessReport") && find(acl.launch_callback, "aclrtLaunchCallback") &&
           find(acl.synchronize_stream, "aclrtSynchronizeStreamWithTimeout") &&
           find(acl.synchronize_device, "aclrtSynchronizeDeviceWithTimeout");
}

void report(Bridge& b) {
    b.acl.set_context(b.device);
    std::unique_lock<std::mutex> lock(b.guard);
    while (!b.stop) {
        lock.unlock();
        const int status = b.acl.process_report(static_cast<int32_t>(kReportWait.count()));
        lock.lock();
        if (status && status != kReportTimeout) {  // for example if no stream is subscribed yet; for error texts
            b.aside = "; aclrtProcessReport: error " + std::to_string(status);
            b.moved.wait_for(lock, milliseconds(1));
        }
    }
    b.stopped = true;
    b.moved.notify_all();
}

}  // namespace

extern "C" {

// Opens a bridge. Returns nullptr on failure, with its reason in umbra_bridge_told(). With `host_func` 1 the bridge
// uses aclrtLaunchHostFunc if libascendcl has it.
Bridge* umbra_bridge_open(const char* library, SubmitJob submit, void* context, int64_t limit_ms, int host_func) {
    void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!opened) return fail(dlerror()), nullptr;
    auto* b = new Bridge;
    b->library = opened;
    if (!bind(b->acl, opened) || (b->acl.get_context(&b->device) && !fail("no device is set in this thread"))) {
        delete b;
        return dlclose(opened), nullptr;
    }
    b->submit = submit;
    b->context = context;
    b->limit = milliseconds(limit_ms);
    b->host_func = host_func && b->acl.launch_host_func;
    if (!b->host_func) {
        b->stopped = false;
        b->reporter = std::thread(report, std::ref(*b));
        b->thread = static_cast<uint64_t>(b->reporter.native_handle());
    }
    return b;
}

int umbra_bridge_host_func(Bridge* b) { return b->host_func; }

// To be called once for each stream, before its first launch and outside of captures.
int umbra_bridge_subscribe(Bridge* b, Stream stream) {
    std::lock_guard<std::mutex> lock(b->guard);
    if (std::find(b->streams.begin(), b->streams.end(), stream) != b->streams.end()) return 0;
    if (b->streams.size() == kStreams) return !fail("a bridge serves " + std::to_string(kStreams) + " streams at most");
    if (int status = b->host_func ? 0 : b->acl.subscribe(b->thread, stream))
        return !fail("aclrtSubscribeReport: error " + std::to_string(status));
    b->streams.push_back(stream);
    return 0;
}

// Queues the callback, or adds it to the graph that the stream is being captured into. `p` must outlive both.
int umbra_bridge_launch(Bridge* b, Stream stream, Payload* p) {
    const char* name = b->host_func ? "aclrtLaunchHostFunc" : "aclrtLaunchCallback";
    const int status = b->host_func ? b->acl.launch_host_func(stream, umbra::run, p)
                                    : b->acl.launch_callback(umbra::run, p, kBlock, stream);
    return status ? !fail(std::string(name) + ": error " + std::to_string(status)) : 0;
}

// Waits at most `ms` for the stream. 0: the stream is idle, 1: it is not idle yet, -1: an error, see
// umbra_bridge_told().
int umbra_bridge_synchronize(Bridge* b, Stream stream, int32_t ms) {
    const int status = b->acl.synchronize_stream(stream, ms);
    if (!status || status == kSyncTimeout) return status != 0;
    return fail("aclrtSynchronizeStreamWithTimeout: error " + std::to_string(status)), -1;
}

// Closes the bridge. Callbacks that wait, and those that come later, return at once with sums of NaN. Returns 0 once
// all work has ended. Returns 1 if after `ms` the device, a callback or a worker is still busy; then neither the bridge
// nor its payloads and their buffers may ever be freed.
int umbra_bridge_close(Bridge* b, int64_t ms) {
    const auto deadline = Clock::now() + milliseconds(ms);
    std::unique_lock<std::mutex> lock(b->guard);
    b->closing = true;
    b->moved.notify_all();
    lock.unlock();
    const bool busy = !b->streams.empty() && b->acl.synchronize_device(static_cast<int32_t>(ms));
    for (Stream stream : b->streams)
        if (!b->host_func) b->acl.unsubscribe(b->thread, stream);
    lock.lock();
    b->stop = true;
    const bool quiet = b->moved.wait_until(lock, std::max(deadline, Clock::now() + 2 * kReportWait),
                                           [&] { return b->stopped && !b->inside && !b->running; });
    const bool joinable = b->stopped;
    lock.unlock();
    if (b->reporter.joinable()) joinable ? b->reporter.join() : b->reporter.detach();
    return busy || !quiet;
}

void umbra_bridge_free(Bridge* b) {
    dlclose(b->library);
    delete b;
}

}  // extern "C"

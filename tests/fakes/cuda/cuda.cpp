// A fake of NVIDIA's driver, as far as Umbra calls it: streams are threads, events are counters, and the memory of the
// device is the host's. What a stream may not do is refused as the real driver refuses it, and remembered:
//
//   - a host function that calls the driver (CUDA_ERROR_NOT_PERMITTED);
//   - a query, an allocation or a synchronisation while the thread captures (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
//     which spoils the capture;
//   - a capture that ends before streams that it forked to have joined (CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
//   - a copy to or from memory of which the driver does not know.
//
// A replay runs each stream of the captured graph in a thread of its own, ordered by the graph's edges alone. After
// fake_cuda_kill the context is dead: streams stop, no host function is called, and every call returns that error.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace fake_cuda {

enum : int {
    kOk = 0,
    kInvalid = 1,
    kMemory = 2,
    kNoContext = 201,
    kHandle = 400,
    kNotReady = 600,
    kAlreadyRegistered = 712,
    kNotRegistered = 713,
    kNotPermitted = 800,
    kUnsupported = 900,
    kInvalidated = 901,
    kUnjoined = 904,
};

using Work = std::function<void()>;

struct Node {
    Work work;
    size_t branch;              // of the stream
    std::vector<size_t> after;  // nodes
};
struct Graph {
    std::vector<Node> nodes;
};

struct Event;
struct Stream;
struct Capture {
    Stream* origin;
    std::thread::id thread;
    Graph graph;
    std::map<Stream*, std::vector<size_t>> ends;  // of each stream: the nodes that its next one comes after
    std::map<Stream*, size_t> branches;
    std::map<Event*, std::vector<size_t>> events;
    bool spoilt = false;
};

struct Event {
    std::atomic<uint64_t> recorded{0}, happened{0};
    std::chrono::steady_clock::time_point at{};
};

struct Machine {
    std::mutex guard;
    std::condition_variable moved;
    std::set<Stream*> streams;
    std::set<Event*> events;
    std::map<uintptr_t, size_t> device, host;  // memory: address -> bytes
    std::unique_ptr<Capture> capture;
    std::vector<std::string> violations;
    std::map<std::string, std::pair<int, int>> failing;  // function -> error, calls that pass before
    std::atomic<int> dead{0};
    size_t most_registered = SIZE_MAX, registered = 0;
};
Machine& machine() {
    static auto* made = new Machine;  // streams may outlive the statics
    return *made;
}

thread_local bool in_host_function = false, has_context = false;

struct Stream {
    std::deque<Work> work;
    bool busy = false, end = false;
    std::thread thread;

    void loop() {
        Machine& m = machine();
        std::unique_lock<std::mutex> lock(m.guard);
        for (;;) {
            m.moved.wait(lock, [&] { return end || (!work.empty() && !m.dead); });
            if (end) return;
            Work next = std::move(work.front());
            work.pop_front();
            busy = true;
            lock.unlock();
            next();
            lock.lock();
            busy = false;
            m.moved.notify_all();
        }
    }
};

Stream* legacy() {
    static auto* made = [] {
        auto* s = new Stream;
        s->thread = std::thread([s] { s->loop(); });
        s->thread.detach();
        return s;
    }();
    return made;
}
Stream* stream_of(void* handle) { return handle ? static_cast<Stream*>(handle) : legacy(); }

int violation(const std::string& what, int error) {
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);
    m.violations.push_back(what);
    return error;
}

// What every call looks at first. `capturing`: whether it may be made by a thread that captures.
int entered(const char* name, bool capturing) {
    Machine& m = machine();
    if (in_host_function) return violation(std::string(name) + " within a host function", kNotPermitted);
    std::lock_guard<std::mutex> lock(m.guard);
    if (m.dead) return m.dead;
    if (auto at = m.failing.find(name); at != m.failing.end() && at->second.second-- <= 0) {
        const int error = at->second.first;
        m.failing.erase(at);
        return error;
    }
    if (!capturing && m.capture && m.capture->thread == std::this_thread::get_id()) {
        m.capture->spoilt = true;
        m.violations.push_back(std::string(name) + " while the thread captures");
        return kUnsupported;
    }
    return kOk;
}

bool waits(const std::function<bool()>& over) {  // false: the context has died
    while (!over()) {
        if (machine().dead) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
}

int enqueue(void* handle, Work work) {
    Machine& m = machine();
    Stream* stream = stream_of(handle);
    std::lock_guard<std::mutex> lock(m.guard);
    if (m.capture && m.capture->ends.count(stream)) {
        Capture& c = *m.capture;
        const size_t branch = c.branches.emplace(stream, c.branches.size()).first->second;
        c.graph.nodes.push_back({std::move(work), branch, c.ends[stream]});
        c.ends[stream] = {c.graph.nodes.size() - 1};
        return kOk;
    }
    stream->work.push_back(std::move(work));
    m.moved.notify_all();
    return kOk;
}

void replay(const Graph& graph) {
    std::mutex guard;
    std::condition_variable moved;
    std::vector<char> ended(graph.nodes.size());
    std::map<size_t, std::vector<size_t>> branches;
    for (size_t i = 0; i < graph.nodes.size(); i++) branches[graph.nodes[i].branch].push_back(i);
    std::vector<std::thread> threads;
    for (auto& of : branches)
        threads.emplace_back([&, numbers = of.second] {
            for (size_t i : numbers) {
                std::unique_lock<std::mutex> lock(guard);
                moved.wait(lock, [&] {
                    const auto& after = graph.nodes[i].after;
                    return std::all_of(after.begin(), after.end(), [&](size_t j) { return ended[j]; });
                });
                lock.unlock();
                if (!machine().dead) graph.nodes[i].work();
                lock.lock();
                ended[i] = 1;
                moved.notify_all();
            }
        });
    for (auto& thread : threads) thread.join();
}

bool known(const void* address, size_t bytes) {
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);
    const auto at = reinterpret_cast<uintptr_t>(address);
    for (auto* memory : {&m.device, &m.host}) {
        auto next = memory->upper_bound(at);
        if (next == memory->begin()) continue;
        const auto& [begin, size] = *std::prev(next);
        if (at + bytes <= begin + size) return true;
    }
    return false;
}

int give(std::map<uintptr_t, size_t> Machine::* which, void** out, size_t bytes) {
    Machine& m = machine();
    void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::lock_guard<std::mutex> lock(m.guard);
    (m.*which)[reinterpret_cast<uintptr_t>(memory)] = bytes;
    *out = memory;
    return kOk;
}
int take_back(std::map<uintptr_t, size_t> Machine::* which, void* memory) {
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);
    if (!(m.*which).erase(reinterpret_cast<uintptr_t>(memory))) return kInvalid;
    std::free(memory);
    return kOk;
}

struct MemOp {
    unsigned operation;
    std::atomic<uint32_t>* address;
    uint64_t value;
    unsigned flags;
    unsigned long long alias;
    uint64_t rest;
};

}  // namespace fake_cuda

using namespace fake_cuda;

#define ENTER(capturing) \
    if (int error_ = entered(__func__, capturing)) return error_

extern "C" {

// For tests: what streams and host functions did that they may not, one a line; how often the next calls fail; the death
// of the context; and how much memory may be registered.
const char* fake_cuda_violations() {
    static thread_local std::string text;
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);
    text.clear();
    for (auto& line : m.violations) text += line + "\n";
    m.violations.clear();
    return text.c_str();
}
void fake_cuda_fail(const char* function, int error, int after) {
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);
    m.failing[function] = {error, after};
}
void fake_cuda_kill(int error) {
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);
    m.dead = error;
    m.moved.notify_all();
}
void fake_cuda_most_registered(size_t bytes) { machine().most_registered = bytes; }

int cuInit(unsigned) { return kOk; }
int cuDriverGetVersion(int* version) { return *version = 13000, kOk; }
int cuDeviceGetCount(int* count) { return *count = 1, kOk; }
int cuDeviceGet(int* device, int number) { return *device = number, kOk; }
int cuDeviceGetName(char* text, int bytes, int) { return strncpy(text, "fake GPU", bytes), kOk; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
    static const std::map<int, int> values{{16, 2}, {75, 9}, {76, 0}, {113, 0}, {98, 0}, {134, 0}};
    const auto at = values.find(attribute);
    return *value = at == values.end() ? 1 : at->second, kOk;
}
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = size_t{1} << 30, kOk; }
int cuDevicePrimaryCtxRetain(void** context, int) {
    ENTER(true);
    static int made;
    return *context = &made, kOk;
}
int cuCtxSetCurrent(void* context) { return has_context = context != nullptr, kOk; }
int cuCtxGetCurrent(void** context) {
    ENTER(true);
    static int made;
    return *context = has_context ? &made : nullptr, kOk;
}
int cuGetErrorName(int error, const char** name) {
    static const std::map<int, const char*> names{{kInvalid, "CUDA_ERROR_INVALID_VALUE"},
                                                  {kMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                  {kNotReady, "CUDA_ERROR_NOT_READY"},
                                                  {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                  {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED"},
                                                  {kUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
                                                  {kInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
                                                  {kUnjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"}};
    const auto at = names.find(error);
    *name = at == names.end() ? "CUDA_ERROR_UNKNOWN" : at->second;
    return kOk;
}

int cuMemAlloc_v2(void** out, size_t bytes) {
    ENTER(false);
    return give(&Machine::device, out, bytes);
}
int cuMemFree_v2(void* memory) {
    ENTER(false);
    return take_back(&Machine::device, memory);
}
int cuMemHostAlloc(void** out, size_t bytes, unsigned) {
    ENTER(false);
    return give(&Machine::host, out, bytes);
}
int cuMemFreeHost(void* memory) {
    ENTER(false);
    return take_back(&Machine::host, memory);
}
int cuMemHostGetDevicePointer_v2(void** out, void* memory, unsigned) {
    ENTER(true);
    return *out = memory, kOk;
}
int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned) {
    ENTER(false);
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);
    if (m.registered + bytes > m.most_registered) return kMemory;
    if (!m.host.emplace(reinterpret_cast<uintptr_t>(memory), bytes).second) return kAlreadyRegistered;
    m.registered += bytes;
    return kOk;
}
int cuMemHostUnregister(void* memory) {
    ENTER(false);
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);
    const auto at = m.host.find(reinterpret_cast<uintptr_t>(memory));
    if (at == m.host.end()) return kNotRegistered;
    m.registered -= at->second;
    m.host.erase(at);
    return kOk;
}

int cuStreamCreate(void** out, unsigned) {
    ENTER(false);
    auto* s = new Stream;
    s->thread = std::thread([s] { s->loop(); });
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);
    m.streams.insert(s);
    *out = s;
    return kOk;
}
int cuStreamDestroy_v2(void* handle) {
    ENTER(false);
    Machine& m = machine();
    auto* s = static_cast<Stream*>(handle);
    {
        std::unique_lock<std::mutex> lock(m.guard);
        if (!m.streams.erase(s)) return kHandle;
        m.moved.wait(lock, [&] { return m.dead || (s->work.empty() && !s->busy); });
        s->end = true;
        m.moved.notify_all();
    }
    s->thread.join();
    delete s;
    return kOk;
}
int cuStreamQuery(void* handle) {
    ENTER(false);
    Machine& m = machine();
    Stream* s = stream_of(handle);
    std::lock_guard<std::mutex> lock(m.guard);
    return s->work.empty() && !s->busy ? kOk : kNotReady;
}
int cuStreamSynchronize(void* handle) {
    ENTER(false);
    Machine& m = machine();
    Stream* s = stream_of(handle);
    std::unique_lock<std::mutex> lock(m.guard);
    m.moved.wait(lock, [&] { return m.dead || (s->work.empty() && !s->busy); });
    return m.dead;
}
int cuCtxSynchronize() {
    ENTER(false);
    Machine& m = machine();
    std::unique_lock<std::mutex> lock(m.guard);
    m.moved.wait(lock, [&] {
        return m.dead ||
               std::all_of(m.streams.begin(), m.streams.end(), [](Stream* s) { return s->work.empty() && !s->busy; });
    });
    return m.dead;
}

int cuEventCreate(void** out, unsigned) {
    ENTER(true);
    auto* event = new Event;
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);
    m.events.insert(event);
    return *out = event, kOk;
}
int cuEventDestroy_v2(void* handle) {
    ENTER(true);
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);  // not freed: streams may still write to it
    return m.events.erase(static_cast<Event*>(handle)) ? kOk : kHandle;
}
int cuEventRecord(void* handle, void* stream) {
    ENTER(true);
    auto* event = static_cast<Event*>(handle);
    Machine& m = machine();
    {
        std::lock_guard<std::mutex> lock(m.guard);
        if (m.capture && m.capture->ends.count(stream_of(stream))) {
            m.capture->events[event] = m.capture->ends[stream_of(stream)];
            return kOk;
        }
    }
    const uint64_t number = ++event->recorded;
    return enqueue(stream, [event, number] {
        Machine& m = machine();
        std::lock_guard<std::mutex> lock(m.guard);
        event->at = std::chrono::steady_clock::now();
        event->happened = number;
        m.moved.notify_all();
    });
}
int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
    ENTER(true);
    auto* event = static_cast<Event*>(handle);
    Machine& m = machine();
    {
        std::lock_guard<std::mutex> lock(m.guard);
        if (m.capture && m.capture->events.count(event)) {  // the stream joins the capture
            auto& ends = m.capture->ends[stream_of(stream)];
            const auto& of = m.capture->events[event];
            ends.insert(ends.end(), of.begin(), of.end());
            return kOk;
        }
    }
    return enqueue(stream,
                   [event, number = event->recorded.load()] { waits([&] { return event->happened >= number; }); });
}
int cuEventQuery(void* handle) {
    ENTER(false);
    auto* event = static_cast<Event*>(handle);
    return event->happened >= event->recorded ? kOk : kNotReady;
}
int cuEventSynchronize(void* handle) {
    ENTER(false);
    auto* event = static_cast<Event*>(handle);
    waits([&] { return event->happened >= event->recorded; });
    return machine().dead;
}
int cuEventElapsedTime(float* ms, void* begin, void* end) {
    ENTER(false);
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);
    const auto between = static_cast<Event*>(end)->at - static_cast<Event*>(begin)->at;
    return *ms = std::chrono::duration<float, std::milli>(between).count(), kOk;
}

int cuMemcpyAsync(void* to, const void* from, size_t bytes, void* stream) {
    ENTER(true);
    if (!known(to, bytes)) return violation("a copy to memory that is not the driver's", kInvalid);
    if (!known(from, bytes)) {  // pageable: the real driver copies it before it returns, in a way of its own
        auto held = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
        return enqueue(stream, [=] { memcpy(to, held->data(), bytes); });
    }
    return enqueue(stream, [=] { memcpy(to, from, bytes); });
}
int cuMemsetD32Async(void* to, unsigned value, size_t count, void* stream) {
    ENTER(true);
    if (!known(to, 4 * count)) return violation("memory is set that is not the driver's", kInvalid);
    return enqueue(stream, [=] { std::fill_n(static_cast<unsigned*>(to), count, value); });
}
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
    ENTER(true);
    return enqueue(stream, [=] {
        in_host_function = true;
        function(data);
        in_host_function = false;
    });
}
int cuStreamBatchMemOp_v2(void* stream, unsigned count, MemOp* given, unsigned) {
    ENTER(true);
    std::vector<MemOp> ops(given, given + count);
    for (auto& op : ops)
        if (!known(op.address, 4)) return violation("a word that is not the driver's", kInvalid);
    return enqueue(stream, [ops] {
        for (auto& op : ops) {
            const auto value = static_cast<uint32_t>(op.value);
            if (op.operation == 5)
                reinterpret_cast<std::atomic<uint64_t>*>(op.address)->store(op.value, std::memory_order_release);
            else if (op.operation == 2)
                op.address->store(value, std::memory_order_release);
            else if (!waits([&] { return op.address->load(std::memory_order_acquire) == value; }))
                return;
        }
    });
}

int cuStreamBeginCapture_v2(void* handle, int) {
    ENTER(false);
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);
    if (m.capture || !handle)
        return kUnsupported;  // this fake has one capture at a time, and none of the legacy stream
    auto* s = stream_of(handle);
    m.capture.reset(new Capture{s, std::this_thread::get_id(), {}, {{s, {}}}, {}, {}});
    return kOk;
}
int cuStreamEndCapture(void*, void** out) {
    if (int error = entered(__func__, true)) return error;
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.guard);
    const std::unique_ptr<Capture> c = std::move(m.capture);
    *out = nullptr;
    if (!c) return kInvalid;
    if (c->spoilt) return kInvalidated;
    std::set<size_t> joined;  // all that the origin's last nodes come after
    std::vector<size_t> next = c->ends[c->origin];
    while (!next.empty()) {
        const size_t i = next.back();
        next.pop_back();
        if (!joined.insert(i).second) continue;
        next.insert(next.end(), c->graph.nodes[i].after.begin(), c->graph.nodes[i].after.end());
    }
    if (joined.size() != c->graph.nodes.size()) return kUnjoined;
    *out = new Graph(std::move(c->graph));
    return kOk;
}
int cuGraphInstantiateWithFlags(void** out, void* graph, unsigned long long) {
    ENTER(false);
    return *out = new Graph(*static_cast<Graph*>(graph)), kOk;
}
int cuGraphGetNodes(void* graph, void*, size_t* count) {
    ENTER(true);
    return *count = static_cast<Graph*>(graph)->nodes.size(), kOk;
}
int cuGraphLaunch(void* executable, void* stream) {
    ENTER(false);
    auto* graph = static_cast<Graph*>(executable);
    return enqueue(stream, [graph] { replay(*graph); });
}
int cuGraphExecDestroy(void* executable) { return delete static_cast<Graph*>(executable), kOk; }
int cuGraphDestroy(void* graph) { return delete static_cast<Graph*>(graph), kOk; }

}  // extern "C"

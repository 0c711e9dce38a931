// Each stream is a queue, which waits only for events and host functions. No thread of its own runs the tasks: the
// thread that queues a task, or ends a host function, runs all tasks that have become ready. So without host functions
// every task is done when its launch returns.
//
// Host functions run on real threads, by CANN's rules: a function of aclrtLaunchCallback on the thread that is
// subscribed for the stream, once that thread calls aclrtProcessReport; a function of aclrtLaunchHostFunc on a thread
// of CANN. A stream can have only one of the two kinds, and a host function must not call the device's API.
#include <pthread.h>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "fake.h"

namespace {

constexpr size_t kThreads = 32;  // most threads that may be subscribed at a time

struct Replay;
struct Queue {
    aclrtStream stream;
    std::deque<fake::Task> tasks;
    bool held = false;  // whether a host function or a replay blocks the queue
    Replay* replay = nullptr;
};
struct Replay {  // the streams of one graph, which run while the stream that replays it is blocked
    Queue* by;
    std::map<aclrtStream, Queue> queues;
};
struct Report {
    fake::Task task;
    Queue* queue;
    int era;
};

// The state is never destroyed, since threads still wait in it when the process ends.
struct State {
    std::mutex guard;
    std::condition_variable moved;
    std::map<aclrtStream, Queue> queues;
    std::list<Replay> replays;
    std::map<aclrtStream, uint64_t> subscribed;      // stream -> its thread
    std::map<aclrtStream, bool> kind;                // stream -> whether its host functions run on CANN's own thread
    std::map<uint64_t, std::deque<Report>> reports;  // thread -> reports; 0: CANN's own thread
    std::map<aclrtEvent, fake::Token> recorded;
    bool own_thread = false;
    int era = 0;  // reports of an earlier era have no stream any more
};
State& s = *new State;
thread_local bool inside = false;

Queue& queue(aclrtStream stream) {
    Queue& found = s.queues[stream];
    found.stream = stream;
    return found;
}

bool empty(const Queue& q) { return q.tasks.empty() && !q.held; }

void begin_replay(Queue& by, const std::vector<fake::Task>& tasks) {
    by.held = true;
    Replay& replay = s.replays.emplace_back();
    replay.by = &by;
    std::map<fake::Token, fake::Token> fresh;  // recordings in the capture -> those of this replay
    for (fake::Task task : tasks) {
        if (task.token) {
            fake::Token& token = fresh[task.token];
            if (!token) token = std::make_shared<bool>(false);
            task.token = token;
        }
        Queue& q = replay.queues[task.stream];
        q.stream = task.stream;
        q.replay = &replay;
        q.tasks.push_back(task);
    }
}

// Runs the first task of `q` if it is ready.
bool step(Queue& q) {
    if (q.held || q.tasks.empty()) return false;
    const fake::Task& next = q.tasks.front();
    if (next.kind == fake::Task::kWait && !*next.token) return false;
    if (next.kind == fake::Task::kCallback && !next.host && !s.subscribed.count(next.stream))
        return false;  // never fires
    const fake::Task task = next;
    q.tasks.pop_front();
    switch (task.kind) {
        case fake::Task::kRun:
            fake::ran(q.stream, task.line);
            task.run();
            break;
        case fake::Task::kRecord: *task.token = true; break;
        case fake::Task::kWait: break;
        case fake::Task::kCallback:
            q.held = task.blocks;
            s.reports[task.host ? 0 : s.subscribed[task.stream]].push_back({task, &q, s.era});
            break;
        case fake::Task::kReplay: begin_replay(q, *task.graph); break;
    }
    return true;
}

void pump() {
    for (bool moved = true; moved;) {
        moved = false;
        for (auto& [_, q] : s.queues)
            while (step(q)) moved = true;
        for (auto replay = s.replays.begin(); replay != s.replays.end();) {
            bool done = true;
            for (auto& [_, q] : replay->queues) {
                while (step(q)) moved = true;
                done = done && empty(q);
            }
            if (done) {
                replay->by->held = false;
                replay = s.replays.erase(replay);
                moved = true;
            } else
                ++replay;
        }
    }
    s.moved.notify_all();
}

// Runs a host function that was reported to `thread`. Returns false if none was reported in time.
bool process(uint64_t thread, std::chrono::milliseconds most) {
    std::unique_lock<std::mutex> lock(s.guard);
    if (!s.moved.wait_for(lock, most, [&] { return !s.reports[thread].empty(); })) return false;
    const Report report = s.reports[thread].front();
    s.reports[thread].pop_front();
    const aclrtStream stream = report.task.stream;
    fake::ran(stream, "callback begin");
    lock.unlock();
    inside = true;
    report.task.run();
    inside = false;
    lock.lock();
    fake::ran(stream, "callback end");
    if (report.era == s.era && report.task.blocks) report.queue->held = false;
    pump();
    return true;
}

aclError host_function(aclrtStream stream, std::function<void()> run, bool blocks, bool host) {
    NOT_IN_A_CALLBACK {
        std::lock_guard<std::mutex> lock(s.guard);
        if (s.kind.emplace(stream, host).first->second != host)
            return fake::violation("aclrtLaunchCallback and aclrtLaunchHostFunc on one stream");
        if (host && !s.own_thread) {
            s.own_thread = true;
            std::thread([] {
                for (;;) process(0, std::chrono::milliseconds(1000));
            }).detach();
        }
    }
    fake::Task task{fake::Task::kCallback, stream, "host function", run};
    task.blocks = blocks;
    task.host = host;
    return fake::launch(task);
}

// If the host waits for the device during a capture, that is an error on a real device as well.
template <class Done>
aclError wait(aclrtStream stream, const std::string& what, bool forbidden, int32_t ms, Done done) {
    if (forbidden) return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
    if (aclError error = fake::fault()) return error;
    fake::say("synchronize " + what.substr(0, what.find(' ')));
    fake::given(stream, "synchronize " + what);
    std::unique_lock<std::mutex> lock(s.guard);
    if (ms < 0) return s.moved.wait(lock, done), ACL_SUCCESS;
    return s.moved.wait_for(lock, std::chrono::milliseconds(ms), done) ? ACL_SUCCESS : ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
}

bool all_idle() {
    for (const auto& [_, q] : s.queues)
        if (!empty(q)) return false;
    return true;
}

bool happened(aclrtEvent event) {
    auto found = s.recorded.find(event);
    return found == s.recorded.end() || *found->second;
}

}  // namespace

void fake::enqueue(const Task& task) {
    std::lock_guard<std::mutex> lock(s.guard);
    queue(task.stream).tasks.push_back(task);
    pump();
}

bool fake::inside_callback() { return inside; }

aclError fake::forbid(const char* call) { return violation(std::string(call) + " inside a callback"); }

void fake::record(aclrtEvent event, const Token& token) {
    std::lock_guard<std::mutex> lock(s.guard);
    s.recorded[event] = token;
}

fake::Token fake::last_record(aclrtEvent event) {
    std::lock_guard<std::mutex> lock(s.guard);
    auto found = s.recorded.find(event);
    return found == s.recorded.end() ? nullptr : found->second;
}

extern "C" {

// For tests that leave a stream waiting for ever: drops all queued tasks, and the record of which streams had host
// functions.
void fake_streams_forget() {
    std::lock_guard<std::mutex> lock(s.guard);
    ++s.era;
    s.replays.clear();
    s.queues.clear();
    s.reports.clear();
    s.kind.clear();
    s.subscribed.clear();
    s.moved.notify_all();
}

// All functions that are not written by hand call this. Inside a host function, calls of AscendCL functions are
// forbidden, calls of other libraries are not.
long fake_stub(const char* name) { return inside && !strncmp(name, "acl", 3) ? fake::forbid(name) : 0; }

aclError aclrtSubscribeReport(uint64_t thread, aclrtStream stream) {
    NOT_IN_A_CALLBACK
    std::lock_guard<std::mutex> lock(s.guard);
    std::set<uint64_t> threads{thread};
    for (const auto& [_, other] : s.subscribed) threads.insert(other);
    if (threads.size() > kThreads) return ACL_ERROR_RT_THREAD_SUBSCRIBE;
    if (!s.subscribed.emplace(stream, thread).second) return ACL_ERROR_RT_STREAM_SUBSCRIBE;
    pump();
    return ACL_SUCCESS;
}

aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream stream) {
    NOT_IN_A_CALLBACK
    std::lock_guard<std::mutex> lock(s.guard);
    auto found = s.subscribed.find(stream);
    if (found == s.subscribed.end() || found->second != thread) return ACL_ERROR_RT_THREAD_SUBSCRIBE;
    return s.subscribed.erase(found), ACL_SUCCESS;
}

aclError aclrtProcessReport(int32_t ms) {
    NOT_IN_A_CALLBACK
    const bool came = process(static_cast<uint64_t>(pthread_self()), std::chrono::milliseconds(ms < 0 ? 1000 : ms));
    return came ? ACL_SUCCESS : ACL_ERROR_RT_REPORT_TIMEOUT;
}

aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType type, aclrtStream stream) {
    return host_function(stream, [=] { function(data); }, type == ACL_CALLBACK_BLOCK, false);
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* data) {
    return host_function(stream, [=] { function(data); }, true, true);
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
    NOT_IN_A_CALLBACK
    std::lock_guard<std::mutex> lock(s.guard);
    *status = empty(queue(stream)) ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return ACL_SUCCESS;
}
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
    NOT_IN_A_CALLBACK
    std::lock_guard<std::mutex> lock(s.guard);
    *status = happened(event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t ms) {
    NOT_IN_A_CALLBACK
    return wait(nullptr, "device", fake::capturing(), ms, all_idle);
}
aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t ms) {
    NOT_IN_A_CALLBACK
    return wait(stream, "stream", fake::captured(stream), ms, [=] { return empty(queue(stream)); });
}
aclError aclrtSynchronizeStream(aclrtStream stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }
aclError aclrtSynchronizeEvent(aclrtEvent event) {
    NOT_IN_A_CALLBACK
    return wait(nullptr, "event " + std::to_string(fake::number(event)), false, -1, [=] { return happened(event); });
}

}  // extern "C"

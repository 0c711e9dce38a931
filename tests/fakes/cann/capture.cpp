// Graph capture: which streams are in which capture. A stream joins a capture when it waits for an event of a stream
// that is in it.
#include <map>
#include <mutex>
#include <vector>

#include "fake.h"

namespace {

std::mutex guard;
std::map<aclrtStream, aclmdlRI> streams;                                   // streams in a capture
std::map<aclrtEvent, std::pair<aclmdlRI, fake::Token>> events;             // events recorded in a capture
std::map<aclrtStream, aclrtTaskGrp> updates;                               // streams that are changing a task group
std::map<aclmdlRI, int> graphs;                                            // 1, 2, ... in the order of capture
std::map<aclmdlRI, std::shared_ptr<std::vector<fake::Task>>> tasks;        // tasks of each replay
thread_local aclmdlRI mine = nullptr;                                      // the capture that this thread has begun ...
thread_local aclmdlRICaptureMode mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;  // ... and its mode
thread_local aclmdlRICaptureMode wish = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

template <class Key> aclmdlRI in(const std::map<Key, aclmdlRI>& which, Key key) {
    auto found = which.find(key);
    return found == which.end() ? nullptr : found->second;
}

std::string graph(aclmdlRI model) { return "graph " + std::to_string(graphs[model]); }

}  // namespace

bool fake::captured(aclrtStream stream) {
    std::lock_guard<std::mutex> lock(guard);
    return in(streams, stream);
}

bool fake::capturing() {
    return mine && mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && wish != ACL_MODEL_RI_CAPTURE_MODE_RELAXED;
}

std::string fake::phase(aclrtStream stream) {
    std::lock_guard<std::mutex> lock(guard);
    return updates.count(stream) ? "update " : in(streams, stream) ? "captured " : "";
}

aclError fake::task(aclrtStream stream, const std::string& line, const std::function<void()>& run,
                    const std::string& memory) {
    return launch({Task::kRun, stream, line, run, memory});
}

aclError fake::launch(Task task) {
    NOT_IN_A_CALLBACK
    if (aclError error = fault()) return error;
    const std::string when = phase(task.stream);
    say(when + task.line);
    if (when == "update ") return ACL_SUCCESS;  // the launch is captured: nothing runs
    {
        std::lock_guard<std::mutex> lock(guard);
        if (aclmdlRI model = in(streams, task.stream)) return tasks[model]->push_back(task), ACL_SUCCESS;
    }
    given(task.stream, task.line + (task.memory.empty() ? "" : " |") + task.memory);
    return enqueue(task), ACL_SUCCESS;
}

extern "C" {

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode how) {
    NOT_IN_A_CALLBACK
    std::unique_lock<std::mutex> lock(guard);
    if (in(streams, stream)) return ACL_ERROR_RT_STREAM_CAPTURED;
    streams[stream] = mine = fake::handle();
    mode = how;
    graphs[mine] = static_cast<int>(graphs.size()) + 1;
    tasks[mine] = std::make_shared<std::vector<fake::Task>>();
    fake::say("capture begin " + graph(mine));
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus* status, aclmdlRI* model) {
    std::lock_guard<std::mutex> lock(guard);
    *model = in(streams, stream);
    *status = *model ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI* model) {
    std::lock_guard<std::mutex> lock(guard);
    *model = in(streams, stream);
    if (!*model) return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
    for (auto it = streams.begin(); it != streams.end();) it = it->second == *model ? streams.erase(it) : std::next(it);
    for (auto it = events.begin(); it != events.end();)
        it = it->second.first == *model ? events.erase(it) : std::next(it);
    if (mine == *model) mine = nullptr;
    fake::say("capture end " + graph(*model));
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* how) { return std::swap(wish, *how), ACL_SUCCESS; }

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
    NOT_IN_A_CALLBACK
    fake::Task replay{fake::Task::kReplay, stream, "", nullptr};
    fake::given(stream, "replay");
    {
        std::lock_guard<std::mutex> lock(guard);
        fake::say("replay " + graph(model));
        replay.graph = tasks[model];
    }
    return fake::enqueue(replay), ACL_SUCCESS;
}

aclError aclmdlRIDestroy(aclmdlRI model) {
    std::lock_guard<std::mutex> lock(guard);
    return tasks.erase(model), ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    NOT_IN_A_CALLBACK
    fake::Task record{fake::Task::kRecord, stream, "", nullptr, "", std::make_shared<bool>(false)};
    {
        std::lock_guard<std::mutex> lock(guard);
        if (aclmdlRI model = in(streams, stream)) {
            events[event] = {model, record.token};
            return tasks[model]->push_back(record), ACL_SUCCESS;
        }
        events.erase(event);
    }
    fake::record(event, record.token);
    fake::given(stream, "record " + std::to_string(fake::number(event)));
    return fake::enqueue(record), ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    NOT_IN_A_CALLBACK
    fake::Task wait{fake::Task::kWait, stream, "", nullptr};
    {
        std::lock_guard<std::mutex> lock(guard);
        auto found = events.find(event);
        if (found != events.end()) {
            streams[stream] = found->second.first;
            wait.token = found->second.second;
            return tasks[found->second.first]->push_back(wait), ACL_SUCCESS;
        }
        if (in(streams, stream))
            return ACL_SUCCESS;  // an event from outside the capture: it has happened before any replay
    }
    wait.token = fake::last_record(event);
    if (wait.token) fake::given(stream, "wait " + std::to_string(fake::number(event)));
    if (wait.token) fake::enqueue(wait);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream) { return fake::say("task group begin"), ACL_SUCCESS; }

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream, aclrtTaskGrp* group) {
    *group = fake::handle();
    return fake::say("task group end"), ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp group) {
    std::lock_guard<std::mutex> lock(guard);
    updates[stream] = group;
    return fake::say("task update begin"), ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
    std::lock_guard<std::mutex> lock(guard);
    updates.erase(stream);
    return fake::say("task update end"), ACL_SUCCESS;
}

}  // extern "C"

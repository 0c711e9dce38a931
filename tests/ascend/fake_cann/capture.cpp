// Graph capture: which streams are in which capture. A stream joins when it waits for an event of one that is in.
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "fake.h"

namespace {

std::mutex guard;
std::map<aclrtStream, aclmdlRI> streams, events;      // in a capture; events are keyed by their own handle
std::map<aclrtStream, aclrtTaskGrp> updates;          // streams that are changing a task group
std::map<aclmdlRI, int> graphs;                       // 1, 2, ... in the order of capture
std::map<aclmdlRI, std::vector<std::function<void()>>> tasks; // to do at each replay
thread_local aclmdlRI mine = nullptr;                 // begun by this thread ...
thread_local aclmdlRICaptureMode mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL; // ... in this mode
thread_local aclmdlRICaptureMode wish = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

template <class Key> aclmdlRI in(const std::map<Key, aclmdlRI> &which, Key key) {
    auto found = which.find(key);
    return found == which.end() ? nullptr : found->second;
}

std::string graph(aclmdlRI model) { return "graph " + std::to_string(graphs[model]); }

} // namespace

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

aclError fake::task(aclrtStream stream, const std::string &line, const std::function<void()> &run) {
    say(phase(stream) + line);
    {
        std::lock_guard<std::mutex> lock(guard);
        if (aclmdlRI model = in(streams, stream))
            return tasks[model].push_back(run), ACL_SUCCESS;
    }
    return run(), ACL_SUCCESS;
}

void fake::recorded(aclrtEvent event, aclrtStream stream) {
    std::lock_guard<std::mutex> lock(guard);
    if (aclmdlRI model = in(streams, stream))
        events[event] = model;
    else
        events.erase(event);
}

void fake::waited(aclrtStream stream, aclrtEvent event) {
    std::lock_guard<std::mutex> lock(guard);
    if (aclmdlRI model = in(events, event))
        streams[stream] = model;
}

extern "C" {

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode how) {
    std::unique_lock<std::mutex> lock(guard);
    if (in(streams, stream))
        return ACL_ERROR_RT_STREAM_CAPTURED;
    streams[stream] = mine = fake::handle();
    mode = how;
    graphs[mine] = static_cast<int>(graphs.size()) + 1;
    fake::say("capture begin " + graph(mine));
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *model) {
    std::lock_guard<std::mutex> lock(guard);
    *model = in(streams, stream);
    *status = *model ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *model) {
    std::lock_guard<std::mutex> lock(guard);
    *model = in(streams, stream);
    if (!*model)
        return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
    for (auto *which : {&streams, &events})
        for (auto it = which->begin(); it != which->end();)
            it = it->second == *model ? which->erase(it) : std::next(it);
    if (mine == *model)
        mine = nullptr;
    fake::say("capture end " + graph(*model));
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *how) { return std::swap(wish, *how), ACL_SUCCESS; }

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream) {
    std::vector<std::function<void()>> replayed;
    {
        std::lock_guard<std::mutex> lock(guard);
        fake::say("replay " + graph(model));
        replayed = tasks[model];
    }
    for (const auto &run : replayed)
        run();
    return ACL_SUCCESS;
}

aclError aclmdlRIDestroy(aclmdlRI model) {
    std::lock_guard<std::mutex> lock(guard);
    return tasks.erase(model), ACL_SUCCESS;
}

// A function of the host that a stream calls. Really a thread of the host's does, which waits for it in ProcessReport.
aclError aclrtLaunchCallback(aclrtCallback function, void *data, aclrtCallbackBlockType, aclrtStream stream) {
    return fake::task(stream, "host function", [=] { function(data); });
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *data) {
    return fake::task(stream, "host function", [=] { function(data); });
}

aclError aclrtProcessReport(int32_t) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10)); // it is called in a loop
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream) { return fake::say("task group begin"), ACL_SUCCESS; }

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream, aclrtTaskGrp *group) {
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

} // extern "C"

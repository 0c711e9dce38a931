// What the parts of the fake CANN share. Handles (streams, events, graphs) are small numbers cast to pointers.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "acl/acl.h"

namespace fake {

constexpr int kDevices = 16; // dies of one server of this type
constexpr const char *kSoc = "Ascend910_9391";

void say(const std::string &line);                    // one line of the log, if a test is listening: asked of the device
void ran(aclrtStream stream, const std::string &line); // one line of the other log: a stream has come to it
aclError violation(const std::string &what);           // a rule was broken: kept for the test, and the call fails
void *handle();                                       // a number that nothing else has
int number(const void *handle);                       // the same for people: 1, 2, ...

// --- streams (streams.cpp)
using Token = std::shared_ptr<bool>; // one recording of an event: has its stream come to it?
struct Task {
    enum Kind { kRun, kRecord, kWait, kCallback, kReplay } kind;
    aclrtStream stream; // whose subscription a callback needs, also in a replay
    std::string line;
    std::function<void()> run; // kRun, kCallback
    Token token;               // kRecord, kWait
    bool blocks = true, host = false; // a callback holds its stream up; it is for CANN's own thread
    std::shared_ptr<const std::vector<Task>> graph; // kReplay
};
void enqueue(const Task &task); // done before this returns if nothing on the stream has to wait
void record(aclrtEvent event, const Token &token); // the latest recording of `event`
Token last_record(aclrtEvent event);              // nullptr: none yet
bool inside_callback(); // is this thread calling a host function?
aclError forbid(const char *call);
#define NOT_IN_A_CALLBACK                                                                                              \
    if (fake::inside_callback())                                                                                       \
        return fake::forbid(__func__);

// --- captures (capture.cpp)
// "" for an eager launch, "captured " while the stream is in a capture, "update " while it changes a captured graph.
std::string phase(aclrtStream stream);
// What goes to a stream: logged, and queued now or, if the stream is in a capture, at each replay.
aclError task(aclrtStream stream, const std::string &line, const std::function<void()> &run);
aclError launch(Task task);
bool captured(aclrtStream stream);
bool capturing(); // does this thread hold a capture that forbids waiting for the device?

// --- memory (device.cpp)
bool pinned(const void *p);

std::string type_name(int acl_type);

} // namespace fake

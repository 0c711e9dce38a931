// Declarations that the parts of the fake CANN share. Handles (streams, events, graphs) are small numbers cast to
// pointers.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "acl/acl.h"

namespace fake {

constexpr int kDevices = 16;  // dies of one server of this type
constexpr const char* kSoc = "Ascend910_9391";

void say(const std::string& line);  // logs a line about a call to the device, if a test reads the log
void ran(aclrtStream stream, const std::string& line);    // adds a task that a stream has run to the second log
void given(aclrtStream stream, const std::string& line);  // adds a task or wait to the third, of what streams are given
aclError violation(const std::string& what);              // records that a rule was broken, and makes the call fail
aclError fault();                // counts a call that may fail; an error if this one is to fail
void* handle();                  // a new handle, with a number that no other has
int number(const void* handle);  // the number of a handle: 1, 2, ...

// --- streams (streams.cpp)
using Token = std::shared_ptr<bool>;  // one recording of an event: whether its stream has reached it
struct Task {
    enum Kind { kRun, kRecord, kWait, kCallback, kReplay } kind;
    aclrtStream stream;  // the stream whose subscription a callback needs, also in a replay
    std::string line;
    std::function<void()> run;  // kRun, kCallback
    std::string memory;         // kRun: what it reads and writes, "first:bytes" of each tensor, results last
    Token token;                // kRecord, kWait
    bool blocks = true,
         host = false;  // whether a callback blocks its stream; whether it is called by CANN's own thread
    std::shared_ptr<const std::vector<Task>> graph;  // kReplay
};
void enqueue(const Task& task);  // runs the task before it returns if nothing on the stream has to wait
void record(aclrtEvent event, const Token& token);  // sets the latest recording of `event`
Token last_record(aclrtEvent event);                // nullptr if there is none yet
bool inside_callback();                             // whether this thread is calling a host function
aclError forbid(const char* call);
#define NOT_IN_A_CALLBACK \
    if (fake::inside_callback()) return fake::forbid(__func__);

// --- captures (capture.cpp)
// "" for an eager launch, "captured " while the stream is in a capture, "update " while it changes a captured graph.
std::string phase(aclrtStream stream);
// Logs a task for a stream, and queues it now or, if the stream is in a capture, at each replay.
aclError task(aclrtStream stream, const std::string& line, const std::function<void()>& run,
              const std::string& memory = "");
std::string range(const void* first, size_t bytes);  // as a task's `memory` has it
aclError launch(Task task);
bool captured(aclrtStream stream);
bool capturing();  // whether this thread has begun a capture that forbids waiting for the device

// --- arguments of aclnn kernels (aclnn.cpp)
struct Object {
    std::string text;  // the object's text in the log
    int type = -1;     // of a tensor's elements; -1: a list, a scalar or numbers
    std::vector<int64_t> shape;
    std::vector<const Object*> members;  // members of a list, which owns them
    size_t bytes = 0;                    // bytes of an element of a tensor, or of a communicator's buffer
    std::string memory;                  // of a tensor or a list, as a task has it
    bool tensor() const { return type >= 0; }
};

// --- rules (rules.cpp)
// The rule that a kernel of this name would refuse these arguments by; empty if there is none.
std::string broken_rule(const std::string& kernel, const std::vector<const Object*>& arguments);

// --- communicators (hccl.cpp)
// The communicator whose name the word points to, as an argument; null if there is none, whatever the word is.
const Object* communicator(uintptr_t word);

// --- memory (device.cpp)
bool pinned(const void* p);
const char* cann_version();  // of the environment variable FAKE_CANN_VERSION, or the newest

std::string type_name(int acl_type);

}  // namespace fake

// What the parts of the fake CANN share. Handles (streams, events, graphs) are small numbers cast to pointers.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "acl/acl.h"

namespace fake {

constexpr int kDevices = 16; // dies of one server of this type
constexpr const char *kSoc = "Ascend910_9391";

void say(const std::string &line); // one line of the log, if a test is listening
void *handle();                    // a number that nothing else has
int number(const void *handle);    // the same for people: 1, 2, ...

// "" for an eager launch, "captured " while the stream is in a capture, "update " while it changes a captured graph.
std::string phase(aclrtStream stream);
// What the host can do itself, such as a copy: logged, and done now or, if the stream is in a capture, at each replay.
aclError task(aclrtStream stream, const std::string &line, const std::function<void()> &run);
bool captured(aclrtStream stream);
bool capturing(); // does this thread hold a capture that forbids waiting for the device?
void recorded(aclrtEvent event, aclrtStream stream);
void waited(aclrtStream stream, aclrtEvent event);

std::string type_name(int acl_type);

} // namespace fake

// The logs, all in order: one line for each call to the device, one for each task that its streams ran, and one for all
// that decides when a task can run; and the rules that were broken. Tests read them through ctypes (tests/ascend/log.py).
#include <atomic>
#include <mutex>

#include "fake.h"

namespace {
std::mutex guard;
std::string lines, done, wanted, broken, taken;
bool listening = false;
std::atomic<uintptr_t> last{0};
std::atomic<int64_t> calls{0}, failing{0};

const char* take(std::string& from) {
    taken.swap(from);
    from.clear();
    return taken.c_str();
}
}  // namespace

void fake::say(const std::string& line) {
    std::lock_guard<std::mutex> lock(guard);
    if (listening) lines += line + '\n';
}

void fake::ran(aclrtStream stream, const std::string& line) {
    std::lock_guard<std::mutex> lock(guard);
    if (listening) done += std::to_string(number(stream)) + ' ' + line + '\n';
}

void fake::given(aclrtStream stream, const std::string& line) {
    std::lock_guard<std::mutex> lock(guard);
    if (listening) wanted += std::to_string(number(stream)) + ' ' + line + '\n';
}

std::string fake::range(const void* first, size_t bytes) {
    return " " + std::to_string(reinterpret_cast<uintptr_t>(first)) + ":" + std::to_string(bytes);
}

aclError fake::violation(const std::string& what) {
    std::lock_guard<std::mutex> lock(guard);
    broken += what + '\n';
    return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

aclError fake::fault() { return ++calls == failing ? ACL_ERROR_RT_INTERNAL_ERROR : ACL_SUCCESS; }

void* fake::handle() { return reinterpret_cast<void*>((++last) << 4); }

int fake::number(const void* handle) { return static_cast<int>(reinterpret_cast<uintptr_t>(handle) >> 4); }

extern "C" {

void fake_log_start() {
    std::lock_guard<std::mutex> lock(guard);
    lines.clear();
    done.clear();
    wanted.clear();
    listening = true;
}

// The n-th call from now on that allocates, copies, launches or waits fails; 0: none does.
void fake_fail(int64_t n) {
    calls = 0;
    failing = n;
}

int64_t fake_calls() { return calls; }  // since then

// Returns the log and stops logging. The text is valid until the next call of any of these functions.
const char* fake_log_take() {
    std::lock_guard<std::mutex> lock(guard);
    listening = false;
    return take(lines);
}

// Returns the tasks that the streams have run since the log was started, or since the last call.
const char* fake_ran_take() {
    std::lock_guard<std::mutex> lock(guard);
    return take(done);
}

// Returns what decides when tasks can run, since the log was started.
const char* fake_given_take() {
    std::lock_guard<std::mutex> lock(guard);
    return take(wanted);
}

const char* fake_violations_take() {
    std::lock_guard<std::mutex> lock(guard);
    return take(broken);
}

}  // extern "C"

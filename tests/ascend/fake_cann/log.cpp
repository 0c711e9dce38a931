// The log: what was asked of the device, in order, one line each. Tests read it through ctypes (see ../log.py).
#include <atomic>
#include <mutex>

#include "fake.h"

namespace {
std::mutex guard;
std::string lines, taken;
bool listening = false;
std::atomic<uintptr_t> last{0};
} // namespace

void fake::say(const std::string &line) {
    std::lock_guard<std::mutex> lock(guard);
    if (listening)
        lines += line + '\n';
}

void *fake::handle() { return reinterpret_cast<void *>((++last) << 4); }

int fake::number(const void *handle) { return static_cast<int>(reinterpret_cast<uintptr_t>(handle) >> 4); }

extern "C" void fake_log_start() {
    std::lock_guard<std::mutex> lock(guard);
    lines.clear();
    listening = true;
}

// Valid until the next call. Stops listening.
extern "C" const char *fake_log_take() {
    std::lock_guard<std::mutex> lock(guard);
    listening = false;
    taken.swap(lines);
    lines.clear();
    return taken.c_str();
}

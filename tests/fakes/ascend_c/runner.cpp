// The C interface of a compiled kernel: gives it buffers, runs its blocks in turns, and returns the counts.
#include <sys/mman.h>

#include <dlfcn.h>

#include "kernel_operator.h"

using namespace twin;

namespace {

constexpr size_t kStack = 1 << 20;

struct Stacks {  // one stack for each block; memory pages are allocated at their first access
    explicit Stacks(size_t count_)
        : count(count_), memory(static_cast<uint8_t*>(mmap(nullptr, count * kStack, PROT_READ | PROT_WRITE,
                                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {}
    ~Stacks() { munmap(memory, count * kStack); }
    size_t count;
    uint8_t* memory;
};

using Address = GM_ADDR;
// All arguments are pointers, so passing more than the function takes does no harm.
void call(void* function, const std::vector<Address>& a) {
    using Kernel = void (*)(Address, Address, Address, Address, Address, Address, Address, Address, Address, Address,
                            Address, Address, Address, Address, Address, Address);
    reinterpret_cast<Kernel>(function)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
                                       a[13], a[14], a[15]);
}

struct Entry {
    void* function;
    std::vector<Address> arguments;
    std::string error;
} entry;

void end_of_block() {
    Core& core = twin::core();
    AscendC::TPipe::release_all();
    for (int event = 0; event < int(AscendC::HardEvent::COUNT); ++event)
        for (int id = 0; id < 8; ++id)
            if (core.flags[event][id].set)
                core.fail(text("SetFlag<%s>(%d) has no WaitFlag", event_name(AscendC::HardEvent(event)).c_str(), id));
}

void block() {
    Core& core = twin::core();
    try {
        call(entry.function, entry.arguments);
        core.op = Shadow::op_id("end");
        end_of_block();
    } catch (const std::exception& error) {
        entry.error = error.what();
    }
    core.done = true;
    swapcontext(&core.context, &run()->scheduler);
}

// To be called when no block can go on.
void check_cross_flags(const Run& run) {
    for (auto& core : run.cores) {
        if (core->done) continue;
        const int id = core->waits_for;
        for (auto& other : run.cores)
            if (other->cross[id].set.empty()) {
                entry.error = text("core %d %s without the %s that core %d waits at: deadlock", other->index,
                                   other->done ? "ended" : "waits", cross_name(id).c_str(), core->index);
                return;
            }
    }
    for (auto& core : run.cores)
        for (int id = 0; id < kCrossFlags; ++id) {
            const CrossFlag& flag = core->cross[id];
            if (flag.set.empty() && flag.complete.empty()) continue;
            entry.error = text("core %d, end: CrossCoreSetFlag(%d) %s", core->index, id,
                               flag.complete.empty() ? "which not all cores have set" : "has no CrossCoreWaitFlag");
            return;
        }
}

void run_blocks(Run& run, Stacks& stacks) {
    for (auto& core : run.cores) {
        getcontext(&core->context);
        core->context.uc_stack = {stacks.memory + core->index * kStack, 0, kStack};
        core->context.uc_link = nullptr;
        makecontext(&core->context, block, 0);
    }
    for (bool goes_on = true; goes_on;) {
        goes_on = false;
        for (auto& core : run.cores) {
            if (core->done || (core->waits_for >= 0 && core->cross[core->waits_for].complete.empty())) continue;
            goes_on = true;
            run.core = core.get();
            swapcontext(&run.scheduler, &core->context);
            if (!entry.error.empty()) return;
        }
    }
    check_cross_flags(run);
}

std::string json(const Run& run) {
    std::string text = "{\"buffers\": {";
    for (const Buffer& buffer : run.memory.buffers)
        text += (&buffer == &run.memory.buffers[0] ? "\"" : ", \"") + buffer.name +
                "\": {\"read\": " + std::to_string(buffer.read) + ", \"written\": " + std::to_string(buffer.written) +
                "}";
    text += "}, \"cores\": [";
    for (auto& core : run.cores) {
        text += core->index ? ", [" : "[";
        for (auto& phase : core->phases) text += (&phase == &core->phases.front() ? "" : ", ") + counts_json(phase);
        text += "]";
    }
    return text + "]}";
}

}  // namespace

// Buffers are in the order of the kernel's arguments; a null base stands for an optional input that is absent. The
// workspace is the last buffer, and its `base` is the start of the library's part. Returns 0, or 1 with the rule that
// was broken in *answer.
extern "C" __attribute__((visibility("default"))) int twin_run(const char* kernel, int count, const char** names,
                                                               const int* roles, uint8_t** bases, const uint64_t* sizes,
                                                               const uint8_t* tiling, uint64_t tiling_bytes,
                                                               uint64_t key, int cores, char* answer,
                                                               uint64_t answer_bytes) {
    Run state;
    run() = &state;
    entry = Entry{};
    auto answer_with = [&](const std::string& text, int code) {
        if (text.size() + 1 > answer_bytes) return 2;
        std::memcpy(answer, text.c_str(), text.size() + 1);
        return code;
    };
    state.kernel = kernel, state.key = key;
    entry.function = dlsym(RTLD_DEFAULT, kernel);
    if (Dl_info info; dladdr(reinterpret_cast<void*>(&twin_run), &info))
        entry.function = dlsym(dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD), kernel);
    if (!entry.function || count > 14)
        return answer_with(text("no kernel %s of at most 14 buffers in the library", kernel), 1);
    state.tiling.assign(tiling, tiling + tiling_bytes);
    for (int buffer = 0; buffer < count; ++buffer) {
        const auto role = static_cast<Role>(roles[buffer]);
        entry.arguments.push_back(bases[buffer]);
        const uint64_t before = role == Role::WORKSPACE ? AscendC::kLibraryWorkspace : 0;
        if (bases[buffer])
            state.memory.buffers.emplace_back(names[buffer], role, bases[buffer] + before, sizes[buffer] - before);
    }
    entry.arguments.push_back(state.tiling.data());
    entry.arguments.resize(16, nullptr);
    for (int index = 0; index < cores; ++index) {
        state.cores.push_back(std::make_unique<Core>());
        state.cores.back()->index = index;
        state.cores.back()->seen.resize(cores);
    }
    Stacks stacks(cores);
    run_blocks(state, stacks);
    if (!entry.error.empty()) return answer_with(std::string(kernel) + ": " + entry.error, 1);
    return answer_with(json(state), 0);
}

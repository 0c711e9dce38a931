// One vector core in a run, and the run. Blocks take turns on one thread and switch at SyncAll or at their end, so that
// every run is the same.
#pragma once
#include <ucontext.h>

#include <deque>

#include "global.h"

namespace AscendC {
class TPipe;
}

namespace twin {

struct Flag {
    bool set = false, taken = false;  // taken: AllocEventID or a queue has taken the flag
    uint32_t known[kPipes];           // for each pipe, the last instruction that had ended when the flag was set
};

struct Core : Shadow {
    std::deque<Counts> phases{Counts{}};
    std::deque<Slot> slots;  // a deque, since tensors point to its elements
    AscendC::TPipe* pipe = nullptr;
    Flag flags[int(AscendC::HardEvent::COUNT)][8];
    bool waits = false, done = false;  // the block waits at a SyncAll; it has ended
    ucontext_t context;

    Counts& counts() { return phases.back(); }
};

struct Run {
    std::string kernel;
    GlobalMemory memory;
    std::vector<std::unique_ptr<Core>> cores;
    std::vector<uint8_t> tiling;
    uint64_t key = 0;
    int kernel_type = -1;  // the type that the kernel declared
    Core* core = nullptr;  // the core that runs now
    ucontext_t scheduler;
};

inline Run*& run() {
    static Run* current = nullptr;
    return current;
}
inline Core& core() { return *run()->core; }

struct Pipes {
    int from, to;
};
inline Pipes pipes_of(AscendC::HardEvent event) {
    using E = AscendC::HardEvent;
    static const Pipes table[] = {{PIPE_S, PIPE_V},    {PIPE_S, PIPE_MTE2}, {PIPE_S, PIPE_MTE3},
                                  {PIPE_V, PIPE_S},    {PIPE_V, PIPE_MTE2}, {PIPE_V, PIPE_MTE3},
                                  {PIPE_MTE2, PIPE_S}, {PIPE_MTE2, PIPE_V}, {PIPE_MTE2, PIPE_MTE3},
                                  {PIPE_MTE3, PIPE_S}, {PIPE_MTE3, PIPE_V}, {PIPE_MTE3, PIPE_MTE2}};
    static_assert(sizeof table / sizeof *table == size_t(E::COUNT));
    return table[int(event)];
}
inline std::string event_name(AscendC::HardEvent event) {
    return text("%s_%s", pipe_name(pipes_of(event).from), pipe_name(pipes_of(event).to));
}

inline Flag& flag_of(AscendC::HardEvent event, int id) {
    if (id < 0 || id > 7) core().fail(text("event id %d is not in 0..7", id));
    return core().flags[int(event)][id];
}
inline void set_flag(AscendC::HardEvent event, int id) {
    Core& c = core();
    Flag& flag = flag_of(event, id);
    if (flag.set) c.fail(text("SetFlag<%s>(%d) while that flag is still set", event_name(event).c_str(), id));
    const int from = pipes_of(event).from;
    flag.set = true;
    std::copy(c.known[from], c.known[from] + kPipes, flag.known);
    if (from != PIPE_S)  // the instruction was issued after everything that the scalar unit had waited for
        for (int other = PIPE_V; other < kPipes; ++other)
            flag.known[other] = std::max(flag.known[other], c.known[PIPE_S][other]);
    flag.known[from] = c.number[from];
}
inline void wait_flag(AscendC::HardEvent event, int id) {
    Core& c = core();
    Flag& flag = flag_of(event, id);
    if (!flag.set)
        c.fail(
            text("WaitFlag<%s>(%d) of a flag that was not set: it would wait for ever", event_name(event).c_str(), id));
    flag.set = false;
    uint32_t* known = c.known[pipes_of(event).to];
    for (int other = 0; other < kPipes; ++other) known[other] = std::max(known[other], flag.known[other]);
}
inline int take_event(AscendC::HardEvent event) {
    for (int id = 0; id < 8; ++id) {
        Flag& flag = core().flags[int(event)][id];
        if (!flag.taken) {
            flag.taken = true;
            return id;
        }
    }
    core().fail(text("all 8 event ids of %s are taken", event_name(event).c_str()));
}

}  // namespace twin

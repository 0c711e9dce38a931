// One vector core in a run, and the run. Blocks take turns on one thread and switch where they wait for each other or
// end, so that every run is the same.
#pragma once
#include <ucontext.h>

#include <deque>

#include "global.h"

enum KernelMetaType { KERNEL_TYPE_AIV_ONLY, KERNEL_TYPE_AIC_ONLY, KERNEL_TYPE_MIX_AIV_1_0, KERNEL_TYPE_MIX_AIC_1_2 };

namespace AscendC {
class TPipe;
}

namespace twin {

struct Flag {
    bool set = false, taken = false;  // taken: AllocEventID or a queue has taken the flag
    uint32_t known[kPipes];           // for each pipe, the last instruction that had ended when the flag was set
};

// A core's word that its instructions so far have ended, for all other cores: what had ended, and what it knew of others.
struct Report {
    Ended ended;
    std::vector<Ended> seen;
};
using Reports = std::vector<Report>;  // one of each core

constexpr int kCrossFlags = 16, kSyncAllFlag = 14;  // SyncAll takes 11 to 14 for itself
constexpr size_t kMostCounted = 15;                 // of a cross-core flag's counter

struct CrossFlag {                                  // of one core
    std::deque<Report> set;                         // reports that not all cores have made yet
    std::deque<std::shared_ptr<Reports>> complete;  // what all cores have reported and this one has not waited for
};

struct Core : Shadow {
    std::deque<Counts> phases{Counts{}};
    std::deque<Slot> slots;  // a deque, since tensors point to its elements
    AscendC::TPipe* pipe = nullptr;
    Flag flags[int(AscendC::HardEvent::COUNT)][8];
    CrossFlag cross[kCrossFlags];
    int waits_for = -1;  // the cross-core flag that the block waits for
    bool done = false;   // the block has ended
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
inline std::string cross_name(int id) { return id == kSyncAllFlag ? "SyncAll" : text("cross-core flag %d", id); }

// Reports that what `pipe` was given so far has ended, as soon as it has; with the last core's report all are complete.
inline void set_cross(int pipe, int id) {
    Core& c = core();
    if (run()->kernel_type != KERNEL_TYPE_MIX_AIV_1_0)
        c.fail(text("%s needs KERNEL_TYPE_MIX_AIV_1_0: with other vector types the hardware starts no scheduler for it",
                    cross_name(id).c_str()));
    c.cross[id].set.push_back({c.ended_before(pipe), c.seen});
    auto& cores = run()->cores;
    if (std::any_of(cores.begin(), cores.end(), [&](auto& each) { return each->cross[id].set.empty(); })) return;
    const auto all = std::make_shared<Reports>();
    for (auto& each : cores) {
        all->push_back(std::move(each->cross[id].set.front()));
        each->cross[id].set.pop_front();
        each->cross[id].complete.push_back(all);
        if (each->cross[id].complete.size() > kMostCounted)
            c.fail(text("%s: core %d has not waited for %zu reports, its counter ends at 15", cross_name(id).c_str(),
                        each->index, each->cross[id].complete.size()));
    }
}

// Issues nothing more until all cores have reported; what was issued before goes on. A phase of the counts ends here.
inline void wait_cross(int id) {
    Core& c = core();
    const uint64_t ahead = c.under_way(PIPE_MTE2);
    c.waits_for = id;
    swapcontext(&c.context, &run()->scheduler);  // comes back once the reports are complete
    c.waits_for = -1;
    const Reports& all = *c.cross[id].complete.front();
    auto join = [](Ended& to, const Ended& from) {
        for (int pipe = 0; pipe < kPipes; ++pipe) to[pipe] = std::max(to[pipe], from[pipe]);
    };
    for (size_t other = 0; other < all.size(); ++other) {
        join(c.seen[other], all[other].ended);
        for (size_t third = 0; third < all.size(); ++third) join(c.seen[third], all[other].seen[third]);
    }
    for (int pipe = PIPE_V; pipe < kPipes; ++pipe)
        c.known[PIPE_S][pipe] = std::max(c.known[PIPE_S][pipe], all[c.index].ended[pipe]);
    c.cross[id].complete.pop_front();
    c.phases.emplace_back();
    c.counts().ahead = ahead;
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

// Barriers, flags, SyncAll, and the functions that return a block's index and the number of blocks.
//
// Not modelled: SyncAll in software (with a workspace), CrossCoreSetFlag, mutexes.
#pragma once
#include "queues.h"

enum KernelMetaType { KERNEL_TYPE_AIV_ONLY, KERNEL_TYPE_AIC_ONLY, KERNEL_TYPE_MIX_AIV_1_0, KERNEL_TYPE_MIX_AIC_1_2 };
#define KERNEL_TASK_TYPE_DEFAULT(type) (twin::run()->kernel_type = (type))
#define KERNEL_TASK_TYPE(key, type) ((void)(twin::run()->key == (key) && (twin::run()->kernel_type = (type), true)))

namespace AscendC {

template <pipe_t pipe> void PipeBarrier() {
    static_assert(pipe != PIPE_S, "the scalar pipe has no barrier");
    twin::Core& core = twin::core();
    core.counts().barriers[twin::pipe_name(pipe)] += 1;
    core.barrier(pipe);
}
template <HardEvent event> void SetFlag(int32_t id) {
    twin::core().counts().flags += 1;
    twin::set_flag(event, id);
}
template <HardEvent event> void WaitFlag(int32_t id) { twin::wait_flag(event, id); }

inline int64_t GetBlockIdx() { return twin::core().index; }
inline int64_t GetBlockNum() { return twin::run()->cores.size(); }

template <bool isAIVOnly = true> void SyncAll() {
    static_assert(isAIVOnly, "SyncAll<false> would wait for cube cores, which these kernels do not start");
    twin::Core& core = twin::core();
    if (twin::run()->kernel_type != KERNEL_TYPE_MIX_AIV_1_0)
        core.fail(
            "SyncAll<true>() needs KERNEL_TYPE_MIX_AIV_1_0: with other vector types the hardware starts no "
            "scheduler for it");
    const uint64_t ahead = core.under_way(PIPE_MTE2);
    core.barrier(PIPE_ALL);
    core.waits = true;
    swapcontext(&core.context, &twin::run()->scheduler);
    core.phases.emplace_back();
    core.counts().ahead = ahead;
}

// The workspace begins with memory of CANN's library; the kernel's own part follows.
constexpr uint64_t kLibraryWorkspace = 16 << 20;
inline GM_ADDR GetUserWorkspace(GM_ADDR workspace) { return workspace + kLibraryWorkspace; }

}  // namespace AscendC
using AscendC::GetUserWorkspace;

#define TILING_KEY_IS(k) (twin::run()->key == (k))
#define GET_TILING_DATA(name, tiling) \
    TWIN_TILING_STRUCT name;          \
    twin::copy_tiling(&name, sizeof name, tiling)

namespace twin {
inline void copy_tiling(void* to, size_t bytes, const uint8_t* tiling) {
    const auto& data = run()->tiling;
    if (tiling != data.data() || bytes > (data.size() + 7) / 8 * 8)
        core().fail(text("GET_TILING_DATA of %zu bytes, the host wrote %zu", bytes, data.size()));
    std::memcpy(to, tiling, std::min(bytes, data.size()));
}
}  // namespace twin

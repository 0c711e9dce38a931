// Barriers, flags, what cores wait for each other with, and the functions that return a block's index and the number of
// blocks.
//
// A core reports to the others with CrossCoreSetFlag, in the order of one of its pipes, and waits for all reports with
// CrossCoreWaitFlag. SyncAll is both, after a PipeBarrier<PIPE_ALL>, as in the headers of CANN 8.5.0 to 9.1.0. Not
// modelled: SyncAll in software (with a workspace), flags between cores of one kind alone (modes 1 and 2), mutexes.
#pragma once
#include "queues.h"

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
    PipeBarrier<PIPE_ALL>();
    twin::set_cross(PIPE_MTE3, twin::kSyncAllFlag);
    twin::wait_cross(twin::kSyncAllFlag);
    twin::core().sync_alls += 1;
}

inline int own_cross_flag(uint16_t id) {
    if (id > 15 || (id > 10 && id < 15))
        twin::core().fail(twin::text("cross-core flag %u: 0 to 10 and 15 are free, SyncAll takes 11 to 14", id));
    return id;
}
template <uint8_t modeId, pipe_t pipe> void CrossCoreSetFlag(uint16_t flagId) {
    static_assert(modeId == 0, "the twin has vector cores only, which all wait for each other: mode 0");
    static_assert(pipe != PIPE_S && pipe != PIPE_ALL, "a cross-core flag is set by one pipe other than the scalar one");
    static const uint16_t op = twin::Shadow::op_id("CrossCoreSetFlag");
    twin::core().op = op;
    twin::set_cross(pipe, own_cross_flag(flagId));
}
template <uint8_t modeId = 0, pipe_t pipe = PIPE_S> void CrossCoreWaitFlag(uint16_t flagId) {
    static const uint16_t op = twin::Shadow::op_id("CrossCoreWaitFlag");
    twin::core().op = op;
    twin::wait_cross(own_cross_flag(flagId));
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
inline void copy_tiling(void* to, size_t bytes, GM_ADDR at) {
    const auto* tiling = (const uint8_t*)at;
    const auto& data = run()->tiling;
    if (tiling != data.data() || bytes > (data.size() + 7) / 8 * 8)
        core().fail(text("GET_TILING_DATA of %zu bytes, the host wrote %zu", bytes, data.size()));
    std::memcpy(to, tiling, std::min(bytes, data.size()));
}
}  // namespace twin

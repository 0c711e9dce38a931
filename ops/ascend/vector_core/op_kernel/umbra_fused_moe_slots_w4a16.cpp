// A mixture of experts (umbra_fused.h) with matrices in slots of an arena. places (E) says where; -1: not resident.
#include "umbra_fused.h"

extern "C" __global__ __aicore__ void umbra_fused_moe_slots_w4a16(GM_ADDR x, GM_ADDR arena, GM_ADDR places, GM_ADDR ids,
                                                                  GM_ADDR weights, GM_ADDR y, GM_ADDR workspace,
                                                                  GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    GET_TILING_DATA(t, tiling);
    constexpr uint64_t kApart = umbra::kPlace;
    const umbra::Experts experts{
        {arena, arena + t.s13, arena + t.z13, kApart}, {arena + t.w2, arena + t.s2, arena + t.z2, kApart}, places};
    umbra::FusedMoeByKey<umbra::FromMemory>(experts, x, ids, weights, y, workspace, t);
}

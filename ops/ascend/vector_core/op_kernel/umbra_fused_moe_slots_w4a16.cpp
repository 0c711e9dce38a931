// A mixture of experts (umbra_fused.h) with matrices in slots of an arena. places (E) says where; -1: not resident.
#include "umbra_fused.h"

template <typename T, bool kHalfSums>
__aicore__ inline void Run(GM_ADDR x, GM_ADDR arena, GM_ADDR places, GM_ADDR ids, GM_ADDR weightsAt, GM_ADDR y,
                           GM_ADDR workspace, const UmbraGemvTiling& t) {
    umbra::Room room;
    umbra::Units units;
    umbra::Weights weights;
    room.Init();
    units.Read(room, ids, t.tokens * t.topK, t.experts, places);
    weights.template Read<T>(room, weightsAt, t.tokens * t.topK);
    const umbra::Bank up(arena, arena + t.s13, arena + t.z13, t.zeros, t.k, 2 * t.n, t.group, umbra::kPlace);
    const umbra::Bank down(arena + t.w2, arena + t.s2, arena + t.z2, t.zeros, t.n, t.k, t.group2, umbra::kPlace);
    umbra::FusedMoe<T, kHalfSums>(room, units, weights, up, down, x, y, workspace, t);
}

extern "C" __global__ __aicore__ void umbra_fused_moe_slots_w4a16(GM_ADDR x, GM_ADDR arena, GM_ADDR places, GM_ADDR ids,
                                                                  GM_ADDR weights, GM_ADDR y, GM_ADDR workspace,
                                                                  GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    GET_TILING_DATA(t, tiling);
    GM_ADDR ours = AscendC::GetUserWorkspace(workspace);
    if (TILING_KEY_IS(1))
        Run<half, false>(x, arena, places, ids, weights, y, ours, t);
    else if (TILING_KEY_IS(2))
        Run<bfloat16_t, false>(x, arena, places, ids, weights, y, ours, t);
    else if (TILING_KEY_IS(3))
        Run<half, true>(x, arena, places, ids, weights, y, ours, t);
    else if (TILING_KEY_IS(4))
        Run<bfloat16_t, true>(x, arena, places, ids, weights, y, ours, t);
}

// y[r, j] = x[r] times the matrix of expert ids[r, j], in 4 bits; zero where there is no such expert.
#include "umbra_grouped.h"

template <typename T, bool kHalfSums>
__aicore__ inline void Run(
    GM_ADDR x, GM_ADDR w, GM_ADDR scales, GM_ADDR zeros, GM_ADDR ids, GM_ADDR y, GM_ADDR parts,
    const UmbraGemvTiling& t) {
    umbra::Room room;
    umbra::Units units;
    room.Init();
    const umbra::Bank bank(w, scales, zeros, t.zeros, t.k, t.n, t.group);
    units.Read(room, ids, t.tokens * t.topK, t.experts);
    umbra::Grouped<T, kHalfSums>(room, units, bank, x, y, parts, t.tokens * t.topK, t.topK, t.parts);
}

extern "C" __global__ __aicore__ void umbra_grouped_gemv_w4a16(
    GM_ADDR x, GM_ADDR w, GM_ADDR scales, GM_ADDR zeros, GM_ADDR ids, GM_ADDR y, GM_ADDR workspace, GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    GET_TILING_DATA(t, tiling);
    GM_ADDR parts = AscendC::GetUserWorkspace(workspace);
    if (TILING_KEY_IS(1))
        Run<half, false>(x, w, scales, zeros, ids, y, parts, t);
    else if (TILING_KEY_IS(2))
        Run<bfloat16_t, false>(x, w, scales, zeros, ids, y, parts, t);
    else if (TILING_KEY_IS(3))
        Run<half, true>(x, w, scales, zeros, ids, y, parts, t);
    else if (TILING_KEY_IS(4))
        Run<bfloat16_t, true>(x, w, scales, zeros, ids, y, parts, t);
}

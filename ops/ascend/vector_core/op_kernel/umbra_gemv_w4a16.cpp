// y = x w, with w in 4 bits: the grouped product with one expert, whom every row chose.
#include "umbra_grouped.h"

template <typename T, bool kHalfSums>
__aicore__ inline void Run(
    GM_ADDR x, GM_ADDR w, GM_ADDR scales, GM_ADDR zeros, GM_ADDR y, GM_ADDR parts, const UmbraGemvTiling& t) {
    umbra::Room room;
    umbra::Units units;
    room.Init();
    const umbra::Bank bank(w, scales, zeros, t.zeros, t.k, t.n, t.group);
    for (uint32_t row = 0; row < t.tokens; ++row)
        units.Add(row, 0, row > 0);
    umbra::Grouped<T, kHalfSums>(room, units, bank, x, y, parts, t.tokens, 1, t.parts);
}

extern "C" __global__ __aicore__ void umbra_gemv_w4a16(
    GM_ADDR x, GM_ADDR w, GM_ADDR scales, GM_ADDR zeros, GM_ADDR y, GM_ADDR workspace, GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    GET_TILING_DATA(t, tiling);
    GM_ADDR parts = AscendC::GetUserWorkspace(workspace);
    if (TILING_KEY_IS(1))
        Run<half, false>(x, w, scales, zeros, y, parts, t);
    else if (TILING_KEY_IS(2))
        Run<bfloat16_t, false>(x, w, scales, zeros, y, parts, t);
    else if (TILING_KEY_IS(3))
        Run<half, true>(x, w, scales, zeros, y, parts, t);
    else if (TILING_KEY_IS(4))
        Run<bfloat16_t, true>(x, w, scales, zeros, y, parts, t);
}

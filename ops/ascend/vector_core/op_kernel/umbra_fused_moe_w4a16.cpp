// A mixture of experts (umbra_fused.h) with the experts' matrices side by side.
#include "umbra_fused.h"

extern "C" __global__ __aicore__ void umbra_fused_moe_w4a16(GM_ADDR x, GM_ADDR w13, GM_ADDR s13, GM_ADDR z13,
                                                            GM_ADDR w2, GM_ADDR s2, GM_ADDR z2, GM_ADDR ids,
                                                            GM_ADDR weights, GM_ADDR y, GM_ADDR workspace,
                                                            GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    GET_TILING_DATA(t, tiling);
    const umbra::Experts experts{{w13, s13, z13, 0}, {w2, s2, z2, 0}, nullptr};
    umbra::FusedMoeByKey<umbra::FromMemory>(experts, x, ids, weights, y, workspace, t);
}

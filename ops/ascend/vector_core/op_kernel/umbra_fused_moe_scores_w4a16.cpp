// A mixture of experts (umbra_fused.h) with the experts' matrices side by side, which chooses the experts itself.
#include "umbra_fused.h"

extern "C" __global__ __aicore__ void umbra_fused_moe_scores_w4a16(GM_ADDR x, GM_ADDR w13, GM_ADDR s13, GM_ADDR z13,
                                                                   GM_ADDR w2, GM_ADDR s2, GM_ADDR z2, GM_ADDR scores,
                                                                   GM_ADDR bias, GM_ADDR y, GM_ADDR workspace,
                                                                   GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    GET_TILING_DATA(t, tiling);
    const umbra::Experts experts{{w13, s13, z13, 0}, {w2, s2, z2, 0}, nullptr};
    umbra::FusedMoeByKey<umbra::FromScores>(experts, x, scores, bias, y, workspace, t);
}

"""L3: op by op on the fake device. The real host code takes every call, and what reaches the device is this list and
nothing else: an added cast, copy or wait is seen in review."""

from pathlib import Path

import pytest
import torch
import torch_npu

from ops.ascend.ops import AscendOps
from tests.ascend.engine import ascend_case, ascend_runner, prefilled
from tests.ascend.log import DeviceLog, device_log

ATTENTION = [
    "aclnnMatmulWeightNz (3,128)bfloat16 (128,512)bfloat16:NZ (3,512)bfloat16",
    "aclnnRmsNorm (3,4,64)bfloat16@strides(512,64,1) (64)bfloat16 (3,4,64)bfloat16 (3,4,1)float32",
    "aclnnRmsNorm (3,2,64)bfloat16@strides(512,64,1) (64)bfloat16 (3,2,64)bfloat16 (3,2,1)float32",
    "aclnnApplyRotaryPosEmbV2 (3,1,4,64)bfloat16 (3,1,2,64)bfloat16 (3,1,1,64)bfloat16 (3,1,1,64)bfloat16",
    "aclnnScatterNdUpdate (5,128,128)bfloat16 (3,2)int64 (3,128)bfloat16",
    "aclnnScatterNdUpdate (5,128,128)bfloat16 (3,2)int64 (3,128)bfloat16@strides(512,1)",
    "aclnnFusedInferAttentionScoreV3 (3,1,4,64)bfloat16 [(5,128,128)bfloat16] [(5,128,128)bfloat16] ints(5,2,24)"
    " (3,1)int32 (3,1,4,64)bfloat16 (0)float32",
    "aclnnMatmulWeightNz (3,256)bfloat16 (256,128)bfloat16:NZ (3,128)bfloat16",
    "aclnnAddRmsNorm (3,128)bfloat16 (3,128)bfloat16 (128)bfloat16 (3,128)bfloat16 (3,1)float32 (3,128)bfloat16",
]
ROUTER = [
    "aclnnMm (3,128)bfloat16 (128,8)bfloat16 (3,8)bfloat16",
    "aclnnMoeGatingTopKSoftmax (3,8)bfloat16 (3,3)bfloat16 (3,3)int32 (3,3)int32",
    "aclnnReduceSum (3,3)bfloat16 ints(-1) (3,1)bfloat16",
    "aclnnDiv (3,3)bfloat16 (3,1)bfloat16 (3,3)bfloat16",
]
EXPERTS = [
    "aclnnGroupedMatmulWeightNz [(9,128)bfloat16] [(8,128,128)bfloat16:NZ] (8)int64 ints() [(9,128)bfloat16]",
    "aclnnSwiGlu (9,128)bfloat16 (9,64)bfloat16",
    "aclnnGroupedMatmulWeightNz [(9,64)bfloat16] [(8,64,128)bfloat16:NZ] (8)int64 ints() [(9,128)bfloat16]",
]
MOE = {
    "fusion_v2": [
        "aclnnMoeInitRoutingV3 (3,128)bfloat16 (3,3)int32 ints(0,8) (9,128)bfloat16 (9)int32 (8)int64 (9)float32",
        *EXPERTS,
        "aclnnMoeFinalizeRoutingV4 (9,128)bfloat16 (9)int32 (3,3)bfloat16 (3,128)bfloat16",
    ],
    "fusion_v1": [
        "aclnnArange",
        "aclnnInplaceCopy",
    ],
}
END_OF_LAYER = (
    "aclnnAddRmsNorm (3,128)bfloat16 (3,128)bfloat16 (128)bfloat16 (3,128)bfloat16 (3,1)float32 (3,128)bfloat16"
)


def decode_log(folder: Path, *overrides: str) -> DeviceLog:
    runner = ascend_runner(ascend_case(folder, "exe_mode=eager", *overrides), folder)
    running = prefilled(runner)
    with device_log() as log:
        runner._decode(running)
    return log


def test_print(tmp_path: Path) -> None:
    for r in ("fusion_v1", "tp"):
        print(r); print("\n".join(decode_log(tmp_path, f"moe_routing={r}").lines))
    print("\n".join(decode_log(tmp_path, "method=q4").lines))
    runner = ascend_runner(ascend_case(tmp_path, "exe_mode=eager"), tmp_path)
    with device_log() as log:
        prefilled(runner)
    print("prefill"); print("\n".join(log.lines))

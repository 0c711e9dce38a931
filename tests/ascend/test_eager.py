"""L3: op by op on the fake device. The real host code accepts every call, and the calls that reach the device are
exactly the lists here, so that an added cast, copy or wait is seen in review."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.ascend.engine import (
    FLASH,
    GLM,
    GPT_OSS,
    M2,
    PROLOG,
    QWEN2,
    QWEN3,
    V2,
    V3,
    Family,
    ascend_case,
    ascend_runner,
    in_int8,
    prefilled,
)
from tests.ascend.log import device_log
from umbra.executor.platform.ascend import device
from umbra.ops.ascend.cann import ALL_ABILITIES
from umbra.ops.counted import ASCEND_KERNELS

ATTENTION = [
    "aclnnMatmulWeightNz (3,128)bfloat16 (128,512)bfloat16:NZ (3,512)bfloat16",
    "aclnnQkvRmsNormRopeCache (3,512)bfloat16 (128)bfloat16 (128)bfloat16 (3,128)bfloat16 (3,128)bfloat16 (3)int64"
    " (3,256)bfloat16 (5,8,128,16)bfloat16 (5,8,128,16)bfloat16 ints(1,3,4,128) ints(2,1,1)",
    # torch_npu gives tensors of five dimensions this format
    "aclnnFusedInferAttentionScoreV3 (3,1,2,128)bfloat16 [(5,1,8,128,16)bfloat16:format30]"
    " [(5,1,8,128,16)bfloat16:format30] ints(5,2,24) (3,1)int32 (3,1,2,128)bfloat16 (0)float32",
    "aclnnMatmulWeightNz (3,256)bfloat16 (256,128)bfloat16:NZ (3,128)bfloat16",
    "aclnnAddRmsNorm (3,128)bfloat16 (3,128)bfloat16 (128)bfloat16 (3,128)bfloat16 (3,1)float32 (3,128)bfloat16",
]
EARLIER_ATTENTION = [  # with CANN 8.5
    ATTENTION[0],
    "aclnnRmsNorm (3,2,128)bfloat16@strides(512,128,1) (128)bfloat16 (3,2,128)bfloat16 (3,2,1)float32",
    "aclnnRmsNorm (3,1,128)bfloat16@strides(512,128,1) (128)bfloat16 (3,1,128)bfloat16 (3,1,1)float32",
    "aclnnApplyRotaryPosEmbV2 (3,1,2,128)bfloat16 (3,1,1,128)bfloat16 (3,1,1,128)bfloat16 (3,1,1,128)bfloat16",
    "aclnnScatterNdUpdate (5,128,128)bfloat16 (3,2)int64 (3,128)bfloat16",
    "aclnnScatterNdUpdate (5,128,128)bfloat16 (3,2)int64 (3,128)bfloat16@strides(512,1)",
    "aclnnFusedInferAttentionScoreV3 (3,1,2,128)bfloat16 [(5,128,128)bfloat16] [(5,128,128)bfloat16] ints(5,2,24)"
    " (3,1)int32 (3,1,2,128)bfloat16 (0)float32",
    *ATTENTION[-2:],
]
PRODUCT = "aclnnMm (3,128)bfloat16 (128,8)bfloat16 (3,8)bfloat16"
ROUTER = [PRODUCT, "aclnnMoeGatingTopK (3,8)bfloat16 (3,3)bfloat16 (3,3)int32 (3,8)float32"]
EARLIER_ROUTER = [
    PRODUCT,
    "aclnnMoeGatingTopKSoftmax (3,8)bfloat16 (3,3)bfloat16 (3,3)int32 (3,3)int32",
    "aclnnReduceSum (3,3)bfloat16 ints(-1) (3,1)bfloat16",
    "aclnnDiv (3,3)bfloat16 (3,1)bfloat16 (3,3)bfloat16",
]
EXPERTS = [
    "aclnnGroupedMatmulWeightNz [(9,128)bfloat16] [(8,128,128)bfloat16:NZ] (8)int64 ints() [(9,128)bfloat16]",
    "aclnnSwiGlu (9,128)bfloat16 (9,64)bfloat16",
    "aclnnGroupedMatmulWeightNz [(9,64)bfloat16] [(8,64,128)bfloat16:NZ] (8)int64 ints() [(9,128)bfloat16]",
]
FINALIZE = "aclnnMoeFinalizeRoutingV4 (9,128)bfloat16 (9)int32 (3,3)bfloat16 (3,128)bfloat16"
MOE = {
    "fusion_v2": [
        "aclnnMoeInitRoutingV3 (3,128)bfloat16 (3,3)int32 ints(0,8) (9,128)bfloat16 (9)int32 (8)int64 (9)float32",
        *EXPERTS,
        FINALIZE,
    ],
    "fusion_v1": [
        "aclnnArange scalar:int64 scalar:int64 scalar:int64 (9)int32",
        "aclnnInplaceCopy (3,3)int32 (3,3)int32@strides(1,3)",
        "aclnnMoeInitRouting (3,128)bfloat16 (3,3)int32 (3,3)int32 (9,128)bfloat16 (9)int32 (9)int32",
        "aclnnMoeComputeExpertTokens (9)int32 (8)int32",
        "aclnnInplaceCopy (8)int64 (8)int32",
        *EXPERTS,
        FINALIZE.replace("(3,3)bfloat16", "(3,3)bfloat16 (3,3)int32"),
    ],
    "tp": [
        "aclnnSort (9)int32 (9)int32 (9)int64",
        "aclnnArange scalar:int64 scalar:int64 scalar:int64 (8)int32",
        "aclnnEqTensor (9)int32 (8,1)int32 (8,9)bool",
        "aclnnReduceSum (8,9)bool ints(1) (8)int64",
        "aclnnFloorDivides (9)int64 scalar:int64 (9)int64",
        "aclnnIndex (3,128)bfloat16 [(9)int64] (9,128)bfloat16",
        *EXPERTS,
        "aclnnSort (9)int64 (9)int64 (9)int64",
        "aclnnIndex (9,128)bfloat16 [(9)int64] (9,128)bfloat16",
        "aclnnMul (3,3,128)bfloat16 (3,3,1)bfloat16 (3,3,128)bfloat16",
        "aclnnReduceSum (3,3,128)bfloat16 ints(1) (3,128)bfloat16",
    ],
}
# MiniMax-M2: the norms are of all heads together, and the router is in float32.
M2_ATTENTION = [
    ATTENTION[0],
    "aclnnRmsNorm (3,256)bfloat16@strides(512,1) (256)bfloat16 (3,256)bfloat16 (3,1)float32",
    "aclnnRmsNorm (3,128)bfloat16@strides(512,1) (128)bfloat16 (3,128)bfloat16 (3,1)float32",
    "aclnnApplyRotaryPosEmbV2 (3,1,4,64)bfloat16 (3,1,2,64)bfloat16 (3,1,1,64)bfloat16 (3,1,1,64)bfloat16",
    "aclnnScatterPaKvCache (3,2,64)bfloat16 (5,8,128,16)bfloat16 (3)int64 (3,2,64)bfloat16@strides(512,64,1)"
    " (5,8,128,16)bfloat16 ints(1,1) ints(0,0)",
    "aclnnFusedInferAttentionScoreV3 (3,1,4,64)bfloat16 [(5,2,4,128,16)bfloat16:format30]"
    " [(5,2,4,128,16)bfloat16:format30] ints(5,2,24) (3,1)int32 (3,1,4,64)bfloat16 (0)float32",
    *ATTENTION[-2:],
]
M2_ROUTER = [
    "aclnnInplaceCopy (3,128)float32 (3,128)bfloat16",
    "aclnnMm (3,128)float32 (128,8)float32 (3,8)float32",
    "aclnnMoeGatingTopK (3,8)float32 (8)float32 (3,3)float32 (3,3)int32 (3,8)float32",
    "aclnnInplaceCopy (3,3)bfloat16 (3,3)float32",
]
WITH_BIAS = (
    ATTENTION[0]
    .replace("aclnnMatmulWeightNz", "aclnnAddmmWeightNz (512)bfloat16")
    .replace(" (3,512)", " scalar:int64 scalar:int64 (3,512)")
)
QWEN2_ATTENTION = [  # heads have no norms: columns of the product are copied, then rotate
    WITH_BIAS,
    "aclnnInplaceCopy (3,2,128)bfloat16 (3,2,128)bfloat16@strides(512,128,1)",
    "aclnnInplaceCopy (3,1,128)bfloat16 (3,1,128)bfloat16@strides(512,128,1)",
    EARLIER_ATTENTION[3],
    "aclnnScatterPaKvCache (3,1,128)bfloat16 (5,8,128,16)bfloat16 (3)int64 (3,1,128)bfloat16@strides(512,128,1)"
    " (5,8,128,16)bfloat16 ints(1,1) ints(0,0)",
    *ATTENTION[2:],
]
QWEN2_SHARED = [
    "aclnnMatmulWeightNz (3,128)bfloat16 (128,128)bfloat16:NZ (3,128)bfloat16",
    "aclnnSwiGlu (3,128)bfloat16 (3,64)bfloat16",
    "aclnnMatmulWeightNz (3,64)bfloat16 (64,128)bfloat16:NZ (3,128)bfloat16",
    "aclnnMm (3,128)bfloat16 (128,1)bfloat16 (3,1)bfloat16",
    "aclnnSigmoid (3,1)bfloat16 (3,1)bfloat16",
    "aclnnInplaceAddcmul (3,128)bfloat16 (3,128)bfloat16 (3,1)bfloat16 scalar:int64",
]
GLM_SHARED = [
    "aclnnMatmulWeightNz (3,128)bfloat16 (128,256)bfloat16:NZ (3,256)bfloat16",
    "aclnnSwiGlu (3,256)bfloat16 (3,128)bfloat16",
    "aclnnMatmulWeightNz (3,128)bfloat16 (128,128)bfloat16:NZ (3,128)bfloat16",
    "aclnnInplaceAdd (3,128)bfloat16 (3,128)bfloat16 scalar:int64",
]
OSS_ATTENTION = [  # biases; packed tokens attend with sinks
    "aclnnAddmmWeightNz (768)bfloat16 (3,128)bfloat16 (128,768)bfloat16:NZ scalar:int64 scalar:int64 (3,768)bfloat16",
    "aclnnInplaceCopy (3,8,64)bfloat16 (3,8,64)bfloat16@strides(768,64,1)",
    "aclnnInplaceCopy (3,2,64)bfloat16 (3,2,64)bfloat16@strides(768,64,1)",
    "aclnnApplyRotaryPosEmbV2 (3,1,8,64)bfloat16 (3,1,2,64)bfloat16 (3,1,1,64)bfloat16 (3,1,1,64)bfloat16",
    M2_ATTENTION[4].replace("(512,64,1)", "(768,64,1)").replace("(5,8,128,16)", "(9,8,128,16)"),  # two sets of layers
    "aclnnFusedInferAttentionScoreV4 (3,8,64)bfloat16 [(9,2,4,128,16)bfloat16:format30]"
    " [(9,2,4,128,16)bfloat16:format30] (2048,2048)bool ints(1,2,3) ints(5,2,24) (3,1)int32 (8)bfloat16"
    " (3,8,64)bfloat16 (0)float32",
    "aclnnAddmmWeightNz (128)bfloat16 (3,512)bfloat16 (512,128)bfloat16:NZ scalar:int64 scalar:int64 (3,128)bfloat16",
    ATTENTION[-1],
]
OSS_ROUTER = [
    "aclnnAddmm (8)bfloat16 (3,128)bfloat16 (128,8)bfloat16 scalar:int64 scalar:int64 (3,8)bfloat16",
    ROUTER[1],
]
LATENT_ATTENTION = [  # queries have latents of their own; rotated keys lie beside the cache of latents
    "aclnnMatmulWeightNz (3,128)bfloat16 (128,608)bfloat16:NZ (3,608)bfloat16",
    "aclnnRmsNorm (3,32)bfloat16@strides(608,1) (32)bfloat16 (3,32)bfloat16 (3,1)float32",
    "aclnnMatmulWeightNz (3,32)bfloat16 (32,384)bfloat16:NZ (3,384)bfloat16",
    "aclnnKvRmsNormRopeCache (3,1,1,576)bfloat16@strides(608,576,576,1) (512)bfloat16 (3,1,1,64)bfloat16"
    " (3,1,1,64)bfloat16 (3)int64 (5,128,1,64)bfloat16 (5,128,1,512)bfloat16 (3,1,1,64)bfloat16 (3,1,1,512)bfloat16",
    "aclnnRotaryPositionEmbeddingV2 (1,3,2,64)bfloat16@strides(1152,384,64,1) (1,3,1,64)bfloat16 (1,3,1,64)bfloat16"
    " (1,3,2,64)bfloat16",
    "aclnnTransposeBatchMatMul (3,2,128)bfloat16@strides(384,128,1) (2,128,512)bfloat16 ints(1,0,2) ints(0,1,2)"
    " ints(1,0,2) (3,2,512)bfloat16",
    "aclnnFusedInferAttentionScoreV3 (3,1,2,512)bfloat16 [(5,128,512)bfloat16] [(5,128,512)bfloat16] ints(5,2,24)"
    " (3,1)int32 (3,1,2,64)bfloat16 (5,128,64)bfloat16 (3,1,2,512)bfloat16 (0)float32",
    "aclnnTransposeBatchMatMul (3,2,512)bfloat16 (2,512,128)bfloat16 ints(1,0,2) ints(0,1,2) ints(1,0,2)"
    " (3,2,128)bfloat16",
    *ATTENTION[-2:],
]
PROLOG_KERNEL = (  # in place of all before attention
    "aclnnMlaPrologV3WeightNz (3,1024)bfloat16 (1024,1536)bfloat16:NZ (1536,384)bfloat16:NZ (2,128,512)bfloat16"
    " (1024,576)bfloat16:NZ (1536)bfloat16 (512)bfloat16 (3,64)bfloat16 (3,64)bfloat16 (5,128,1,512)bfloat16"
    " (5,128,1,64)bfloat16 (3)int64 (3,2,512)bfloat16 (3,2,64)bfloat16"
)
FLASH_ATTENTION = [  # eight heads in place of six; no multiple of 128 columns
    *LATENT_ATTENTION[:2],
    LATENT_ATTENTION[2].replace("384", "1536"),
    LATENT_ATTENTION[3],
    LATENT_ATTENTION[4].replace("(1,3,2,", "(1,3,6,").replace("1152,384", "4608,1536"),
    "aclnnBatchMatMul (6,3,192)bfloat16@strides(192,1536,1) (6,192,512)bfloat16 (6,3,512)bfloat16",
    "aclnnConstantPadNd (3,6,512)bfloat16@strides(512,1536,1) ints(0,0,0,2) scalar:float64 (3,8,512)bfloat16",
    "aclnnConstantPadNd (3,6,64)bfloat16 ints(0,0,0,2) scalar:float64 (3,8,64)bfloat16",
    LATENT_ATTENTION[6].replace("(3,1,2,", "(3,1,8,"),
    "aclnnTransposeBatchMatMul (3,6,512)bfloat16@strides(4096,512,1) (6,512,256)bfloat16 ints(1,0,2) ints(0,1,2)"
    " ints(1,0,2) (3,6,256)bfloat16",
    ATTENTION[-2].replace("(3,256)", "(3,1536)").replace("(256,128)", "(1536,128)"),
    ATTENTION[-1],
]
OSS_EXPERTS = {  # which kernel replaces which
    **{line: line.replace(":NZ]", ":NZ] [(8,128)float32]") for line in EXPERTS[::2]},
    EXPERTS[1]: EXPERTS[1].replace("SwiGlu", "ClippedSwiglu"),
}
LAYERS: dict[Family, tuple[list[str], list[str], list[str]]] = {  # attention, router, shared expert
    QWEN3: (ATTENTION, ROUTER, []),
    M2: (M2_ATTENTION, M2_ROUTER, []),
    QWEN2: (QWEN2_ATTENTION, EARLIER_ROUTER[:2], QWEN2_SHARED),
    GLM: ([WITH_BIAS, *ATTENTION[1:]], M2_ROUTER, GLM_SHARED),
    GPT_OSS: (OSS_ATTENTION, OSS_ROUTER, []),
    V3: (LATENT_ATTENTION, M2_ROUTER, GLM_SHARED),
    V2: (LATENT_ATTENTION, [line.replace(" (8)float32", "") for line in M2_ROUTER], GLM_SHARED),
    FLASH: (FLASH_ATTENTION, M2_ROUTER, GLM_SHARED),
}
FOUR_BITS = {  # the same layer with 4-bit weights: which kernel replaces which
    ATTENTION[0]: "aclnnWeightQuantBatchMatmulV2 (3,128)bfloat16 (128,64)int32 (4,512)bfloat16 (3,512)bfloat16",
    ATTENTION[3]: "aclnnWeightQuantBatchMatmulV2 (3,256)bfloat16 (256,16)int32 (8,128)bfloat16 (3,128)bfloat16",
    EXPERTS[0]: "aclnnGroupedMatmulV5 [(9,128)bfloat16] [(8,128,16)int32] [(8,4,128)bfloat16] (8)int64 ints()"
    " [(9,128)bfloat16]",
    EXPERTS[2]: "aclnnGroupedMatmulV5 [(9,64)bfloat16] [(8,64,16)int32] [(8,2,128)bfloat16] (8)int64 ints()"
    " [(9,128)bfloat16]",
}
ROUNDED = "aclnnDynamicQuantV2 (3,128)bfloat16 (3,128)int8 (3)float32"
ROUNDING_NORM = (
    "aclnnAddRmsNormDynamicQuantV2 (3,128)bfloat16 (3,128)bfloat16 (128)bfloat16 bools(1,0) (3,128)int8 ()int8"
    " (3,128)bfloat16 (3)float32 ()float32"
)
INT8 = {  # the same layer with weights in int8, after its first norm
    ATTENTION[0]: [
        "aclnnQuantMatmulWeightNz (3,128)int8 (128,512)int8:NZ (3)float32 (512)float32 (0)bfloat16 (0)bfloat16"
        " (3,512)bfloat16"
    ],
    ATTENTION[3]: [
        ROUNDED.replace("128", "256"),
        "aclnnQuantMatmulWeightNz (3,256)int8 (256,128)int8:NZ (3)float32 (128)float32 (0)bfloat16 (0)bfloat16"
        " (3,128)bfloat16",
    ],
    MOE["fusion_v2"][0]: [MOE["fusion_v2"][0].replace("(9,128)bfloat16", "(9,128)int8")],
    EXPERTS[0]: [
        "aclnnGroupedMatmulSwigluQuantWeightNzV2 (9,128)int8 [(8,128,128)int8:NZ] [(8,128)float32] (9)float32 (8)int64"
        " ints() (9,64)int8 (9)float32"
    ],
    EXPERTS[1]: [],
    EXPERTS[2]: [
        "aclnnGroupedMatmulWeightNz [(9,64)int8] [(8,64,128)int8:NZ] [(8,128)bfloat16] [(9)float32] (8)int64 ints()"
        " [(9,128)bfloat16]"
    ],
}
IN_PARTS = {  # where torch_npu has no op for the first product with its SwiGLU, nor for a norm with its rounding
    ATTENTION[0]: [ROUNDED, *INT8[ATTENTION[0]]],
    EXPERTS[0]: ["aclnnGroupedMatmulWeightNz [(9,128)int8] [(8,128,128)int8:NZ] (8)int64 ints() [(9,128)int32]"],
    EXPERTS[1]: ["aclnnDequantSwigluQuantV2 (9,128)int32 (8,128)float32 (9)float32 (8)int64 (9,64)int8 (9)float32"],
}
PACKED_ATTENTION = (
    "aclnnFusedInferAttentionScoreV3 (28,2,128)bfloat16 [(5,1,8,128,16)bfloat16:format30]"
    " [(5,1,8,128,16)bfloat16:format30] (2048,2048)bool ints(4,5,28) ints(4,1,23) (3,1)int32 (28,2,128)bfloat16"
    " (0)float32"
)


def decode_log(folder: Path, *overrides: str, family: Family = QWEN3) -> list[str]:
    """The calls of one decode step of three sequences to the device."""
    runner = ascend_runner(ascend_case(folder, "exe_mode=eager", *overrides, family=family), folder)
    prefilled(runner)
    with device_log() as log:
        runner.loop.step()
    return log.lines


def last_layer(lines: list[str]) -> list[str]:
    """The second layer's lines: it begins with the second norm with a residual, and ends before the fourth."""
    norms = [i for i, line in enumerate(lines) if line.startswith("aclnnAddRmsNorm")]
    assert len(norms) == 4
    return lines[norms[1] : norms[3]]


def golden(routing: str, family: Family = QWEN3) -> list[str]:
    attention, router, shared = LAYERS[family]
    of_experts = OSS_EXPERTS if family is GPT_OSS else {}
    return [attention[-1], *attention, *router, *(of_experts.get(line, line) for line in MOE[routing]), *shared]


def golden_in_int8(fused: bool = True) -> list[str]:
    """`fused`: torch_npu has the ops that round what they compute."""
    norm, *others = golden("fusion_v2")
    replaced = INT8 if fused else INT8 | IN_PARTS
    return [ROUNDING_NORM if fused else norm, *(new for line in others for new in replaced.get(line, [line]))]


def test_kernels_of_attention_over_latents_are_counted() -> None:
    heads = ("head_linear", "latent_attention", "head_linear")
    ops = ("linear", "rms_norm", "linear", "rope_write_latents", *heads, "linear", "add_rms_norm")
    assert sum(ASCEND_KERNELS.get(op, 1) for op in ops) == len(LATENT_ATTENTION)


def test_one_kernel_precedes_attention_over_latents(tmp_path: Path) -> None:
    (prolog, *after), last = last_layer(decode_log(tmp_path, family=PROLOG))[1:4], LATENT_ATTENTION[6:8]
    assert (prolog, after) == (PROLOG_KERNEL, last)


def test_kernels_of_a_decode_layer_on_an_earlier_cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "get_cann_version", lambda: "8.5.0")
    expected = [ATTENTION[-1], *EARLIER_ATTENTION, *EARLIER_ROUTER, *MOE["fusion_v2"]]
    assert last_layer(decode_log(tmp_path)) == expected


@pytest.mark.parametrize(
    ("family", "routing"),
    [*((QWEN3, routing) for routing in MOE), *((family, "fusion_v2") for family in list(LAYERS)[1:])],
    ids=str,
)
def test_kernels_of_a_decode_layer(tmp_path: Path, family: Family, routing: str) -> None:
    assert last_layer(decode_log(tmp_path, f"moe_routing={routing}", family=family)) == golden(routing, family)


def test_kernels_of_a_decode_layer_in_four_bits(tmp_path: Path) -> None:
    expected = [FOUR_BITS.get(line, line) for line in golden("fusion_v2")]
    assert last_layer(decode_log(tmp_path, "method=q4")) == expected


@pytest.mark.parametrize("fused", [True, False])
def test_kernels_of_a_decode_layer_in_int8(tmp_path: Path, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    can = dataclasses.replace(ALL_ABILITIES, fused_swiglu=fused, rounding_norm=fused)
    monkeypatch.setattr(device, "installed", lambda _: can)
    expected = golden_in_int8(fused)
    assert (last_layer(decode_log(tmp_path, family=in_int8(QWEN3))), len(expected)) == (expected, 13 if fused else 15)


def test_a_prefill_layer_has_the_same_kernels_over_packed_tokens(tmp_path: Path) -> None:
    """And, as the last one, two that pick the rows of both parts of the residual sum whose logits are wanted."""
    runner = ascend_runner(ascend_case(tmp_path, "exe_mode=eager"), tmp_path)
    with device_log() as log:
        prefilled(runner)
    lines = last_layer(log.lines)
    names = [line.split()[0] for line in golden("fusion_v2")]
    norm = names.index("aclnnAddRmsNorm", 1)
    assert [line.split()[0] for line in lines] == [*names[:norm], "aclnnIndexSelect", "aclnnIndexSelect", *names[norm:]]
    assert PACKED_ATTENTION in lines


def test_the_float_router_keeps_its_mantissas() -> None:
    """In HF32, which is off unless someone turns it on, a float32 product would drop bits of its inputs."""
    assert not torch.npu.matmul.allow_hf32


def test_prefill_by_chunks_attends_to_what_is_cached(tmp_path: Path) -> None:
    runner = ascend_runner(ascend_case(tmp_path, "exe_mode=eager", "chunked_prefill_size=16"), tmp_path)
    with device_log() as log:
        prefilled(runner)
    steps = [line for line in log.lines if line.startswith("aclnnFusedInferAttentionScore")][::2]
    first, second = steps
    assert "ints(4,5,16) ints(4,1,11)" in first
    assert "ints(1,2,14) ints(5,2,23)" in second


def test_the_only_thing_read_back_is_the_chosen_tokens(tmp_path: Path) -> None:
    assert [line for line in decode_log(tmp_path) if "D2H" in line] == ["memcpy D2H 24"]

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
from umbra.ops.ascend.counted import KERNELS

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
ROUTER = [
    "aclnnMm (3,128)bfloat16 (128,8)bfloat16 (3,8)bfloat16",
    "aclnnMoeGatingTopK (3,8)bfloat16 (3,3)bfloat16 (3,3)int32 (3,8)float32",
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
# The same of other families, and of Qwen3-MoE in other formats, by a name in brackets. A new family adds what a failing
# test shows, once it has been looked at.
LAYERS: dict[str, list[str]] = {}
for line in (Path(__file__).parent / "decode_layers.txt").read_text().splitlines():
    if line.startswith("["):
        LAYERS[line.strip("[]")] = lines = []
    elif line:
        lines.append(line)
FAMILIES = (QWEN3, M2, QWEN2, GLM, GPT_OSS, V3, V2, FLASH)
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
    return [ATTENTION[-1], *ATTENTION, *ROUTER, *MOE[routing]] if family == QWEN3 else LAYERS[family.name]


def test_kernels_of_attention_over_latents_are_counted() -> None:
    heads = ("head_linear", "latent_attention", "head_linear")
    ops = ("linear", "rms_norm", "linear", "rope_write_latents", *heads, "linear", "add_rms_norm")
    norms = [i for i, line in enumerate(LAYERS[V3.name]) if line.startswith("aclnnAddRmsNorm")]
    assert sum(KERNELS.get(op, 1) for op in ops) == norms[1] - norms[0]


def test_one_kernel_precedes_attention_over_latents(tmp_path: Path) -> None:
    expected = LAYERS["one kernel before attention over latents"]
    assert last_layer(decode_log(tmp_path, family=PROLOG))[1:4] == expected


def test_kernels_of_a_decode_layer_on_an_earlier_cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "get_cann_version", lambda: "8.5.0")
    assert last_layer(decode_log(tmp_path)) == LAYERS["earlier CANN"]


@pytest.mark.parametrize(
    ("family", "routing"),
    [*((QWEN3, routing) for routing in MOE), *((family, "fusion_v2") for family in FAMILIES[1:])],
    ids=str,
)
def test_kernels_of_a_decode_layer(tmp_path: Path, family: Family, routing: str) -> None:
    assert last_layer(decode_log(tmp_path, f"moe_routing={routing}", family=family)) == golden(routing, family)


def test_kernels_of_a_decode_layer_in_four_bits(tmp_path: Path) -> None:
    assert last_layer(decode_log(tmp_path, "method=q4")) == LAYERS["four bits"]


@pytest.mark.parametrize("fused", [True, False])
def test_kernels_of_a_decode_layer_in_int8(tmp_path: Path, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    can = dataclasses.replace(ALL_ABILITIES, fused_swiglu=fused, rounding_norm=fused)
    monkeypatch.setattr(device, "installed", lambda _: can)
    expected = LAYERS["int8" if fused else "int8, not fused"]
    assert last_layer(decode_log(tmp_path, family=in_int8(QWEN3))) == expected


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

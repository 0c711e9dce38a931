"""Memory plans of the MiniMax-M2 cases, and the planner of shadow experts at the model's true sizes."""

import json
from pathlib import Path

import pytest

from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.executor.config.case import Case
from umbra.executor.config.load import load_case
from umbra.executor.plan.shadows import host_bytes, sizes_of
from umbra.executor.platform.ascend.plan.memory import make_plan

pytestmark = pytest.mark.slow

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCABULARY = 62, 256, 8, 3072, 1536, 48, 8, 128, 200064
EXPERT = 3 * HIDDEN * INNER
LONGEST, PAGE = 4096 + 1024, 128
W4A16, OFFLOAD = "minimax_m2_w4a16_tp8", "minimax_m2_w4a16_offload"
MIB = 1 << 20
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": True}


def by_hand(ranks: int, q4: bool) -> dict[str, int]:
    """Bytes of the weights of one of `ranks` ranks. Attention and experts have 16 bits, or 4 and a 16-bit scale for
    every 32; above 8 ranks each KV head is on several."""
    q, kv = HEADS * DIM // ranks, max(KV_HEADS // ranks, 1) * DIM
    attention = LAYERS * (HIDDEN * (q + 2 * kv) + q * HIDDEN)
    experts = LAYERS * EXPERTS * EXPERT // ranks
    table = VOCABULARY * HIDDEN // ranks * 2
    sizes = {
        "embedding": table,
        "attention": attention // 2 + attention // 16 if q4 else attention * 2,
        "router": LAYERS * (EXPERTS * HIDDEN + EXPERTS) * 4,  # with the selection bias, float32 and whole on every rank
        "experts": experts // 2 if q4 else experts * 2,
        "experts' scales and biases": experts // 16 if q4 else 0,
        "norms": LAYERS * (2 * HIDDEN + q + kv) * 2 + HIDDEN * 2,
        "head": table,
        "rotary": 2 * LONGEST * DIM * 2,
    }
    return {name: size for name, size in sizes.items() if size}


def awq(folder: Path, case: str, *excluded: str, **sizes: int) -> Case:
    """The case `case` on a config.json in `folder` that says AWQ, kept as it is."""
    data = json.loads((ROOT / "checkpoints/MiniMax-M2.5/config.json").read_text())
    data["quantization_config"] = AWQ | {"modules_to_not_convert": ["gate", "lm_head", *excluded]}
    (folder / "config.json").write_text(json.dumps(data))
    overrides = [f"{key}={size}" for key, size in sizes.items()]
    return load_case(case, [f"model_path={folder}", "quantization.method=auto", *overrides])


@pytest.mark.thorough
def test_groups_follow_the_columns_of_a_rank(tmp_path: Path) -> None:
    """1536 columns of w2 over 8 ranks are 192, over 16 are 96, over 32 are 48. A checkpoint's groups are cut smaller;
    the groups that a case asks for must fit."""
    for ranks, group in ((4, 128), (8, 64), (16, 32)):
        sizes = {p.name: p.nbytes for p in make_plan(awq(tmp_path, W4A16, world_size=ranks)).sections["weights"]}
        assert sizes["experts' scales and biases"] * group == 8 * sizes["experts"], ranks  # 4 B a group, 1/2 a value
    split = dict(world_size=32, attn_tp_size=16)
    with pytest.raises(
        UserError, match=r"experts\.0\.w1: 1536 quantised columns over 32 ranks are 48 on each, no multi"
    ):
        make_plan(awq(tmp_path, W4A16, **split))
    make_plan(awq(tmp_path, W4A16, **split, moe_tp_size=16))  # each half of the ranks has half of the experts
    for overrides, told in (
        (["quantization.group_size=128"], "group_size: 128: a matrix of 192 inputs .*: choose group_size 32 or 64$"),
        (["world_size=16", "quantization.group_size=64"], "group_size: 64: a matrix of 96 inputs .* group_size 32$"),
        (["world_size=32", "attn_tp_size=16"], "group_size: 32: a matrix of 48 inputs .*: split it over fewer ranks$"),
    ):
        with pytest.raises(UserError, match=told):
            make_plan(load_case(W4A16, overrides))


def test_the_arena_of_the_offload_case() -> None:
    """Two dies: each has half of every expert, and 4 of the 8 KV heads."""
    sizes = sizes_of(load_case(OFFLOAD))
    slot = EXPERT // 2 * 9 // 16  # 4 bits, and 16 for every 32: 7.963 MB over two ranks
    assert (sizes.slot_bytes, round(2 * slot / 1e6, 3)) == (slot, 7.963)
    assert sizes.frame == (2 * LAYERS, PAGE * 4 * 31_744, 0)
    assert (sizes.shape.layers, sizes.shape.experts, sizes.shape.top_k) == (30, EXPERTS, TOP_K)
    assert (sizes.split.experts, sizes.split.extent_frames, sizes.split.extent_slots) == (30 * EXPERTS, 1, 4)
    assert (sizes.split.frames, sizes.split.sequences) == (20_000 * MIB // sizes.frame[1] - 1, 4)
    whole = by_hand(2, True)
    assert sizes.fixed_bytes == sum(whole.values()) - 30 * EXPERTS * slot
    arena = sizes.split.frames * sizes.frame[1]
    assert sizes.fixed_bytes + arena < 59e9  # a die has 68.7: allowance, prefill, a bank of one layer's experts
    assert 0.6 < sizes.split.usual_hit < 0.65
    assert host_bytes(sizes) == 30 * EXPERTS * (-(-slot // 4096) * 4096)

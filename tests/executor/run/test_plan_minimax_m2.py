"""Memory plans of the MiniMax-M2 cases, counted by hand and beside the rounded figures of a table worked out apart from
this project (GB are 10^9 bytes in it); and the planner at the model's true sizes."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_offload.planner import choosing
from cpu_offload.planner.choosing import Sizes, choose
from cpu_offload.planner.model import Costs, Line
from executor.config.case import Case
from executor.config.load import load_case
from executor.run.ascend_memory_plan import make_plan
from executor.run.memory_report import check_fits, show_plan
from executor.run.shadow_plan import sizes_of, wanted_of
from tests.variants import thorough_but
from umbra.errors import UserError
from umbra.files import ROOT

pytestmark = pytest.mark.slow

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCABULARY = 62, 256, 8, 3072, 1536, 48, 8, 128, 200064
EXPERT = 3 * HIDDEN * INNER
PARAMETERS = 228_689_764_864
LONGEST, PAGE = 4096 + 1024, 128
BF16, W4A16, OFFLOAD = "minimax_m2_bf16_tp16", "minimax_m2_w4a16_tp8", "minimax_m2_w4a16_offload"
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
        "experts' scales": experts // 16 if q4 else 0,
        "norms": LAYERS * (2 * HIDDEN + q + kv) * 2 + HIDDEN * 2,
        "head": table,
        "rotary": 2 * LONGEST * DIM * 2,
    }
    return {name: size for name, size in sizes.items() if size}


@pytest.mark.parametrize(("name", "ranks", "q4"), [(BF16, 16, False), (W4A16, 8, True)])
def test_the_cases_are_as_counted_by_hand_and_fit(name: str, ranks: int, q4: bool) -> None:
    plan, weights = make_plan(load_case(name)), by_hand(ranks, q4)
    assert {part.name: part.nbytes for part in plan.sections["weights"]} == weights
    assert weights["router"] == 195_035_136 + LAYERS * EXPERTS * 4  # the gates have 195 MB
    assert plan.page_nbytes == PAGE * 31_744  # one KV head a rank, of 8 or of 16 ranks
    assert plan.of("KV cache") == (4 * LONGEST // PAGE + 1) * PAGE * 31_744
    assert plan.left > 29 * 1024 * MIB
    check_fits(plan)
    experts = weights["experts"] + weights.get("experts' scales", 0)
    others = sum(weights.values()) - experts - weights["embedding"] - weights["rotary"]
    hit = round(experts * (1 - (1 - TOP_K / EXPERTS) ** 4))
    assert [part.nbytes for part in plan.decode] == [others, hit, 4 * LONGEST * 31_744]


# The table has 4 bits over 32 ranks too, but 48 of an expert's columns are not whole groups (test_groups_*).
@pytest.mark.parametrize(
    ("name", "ranks", "billions"),
    [(BF16, 4, 114.5), (BF16, 8, 57.4), (BF16, 16, 28.8), (W4A16, 4, 32.8), (W4A16, 8, 16.5), (W4A16, 16, 8.4)],
)
def test_a_rank_has_the_weights_of_the_table(name: str, ranks: int, billions: float) -> None:
    plan = make_plan(load_case(name, [f"world_size={ranks}"]))
    assert round(plan.of("weights") / 1e9, 1) == billions


def test_32_ranks_hold_tables_and_attention_of_16() -> None:
    """48 heads are not divided by 32, so attention and the vocabulary are split by 16 and the batch by 2: 0.15 and 0.08
    GB more than a 32nd, which would be 14.6."""
    plan = make_plan(load_case(BF16, ["world_size=32", "attn_tp_size=16", "hccl_config.aiv_group=none"]))
    sizes, halved = {part.name: part.nbytes for part in plan.sections["weights"]}, by_hand(16, False)
    assert sizes == halved | {"experts": halved["experts"] // 2}
    q_and_o = LAYERS * 2 * HIDDEN * HEADS * DIM // 32 * 2
    assert round((plan.of("weights") - q_and_o - sizes["embedding"]) / 1e9, 1) == 14.6
    assert round(q_and_o / 1e9, 2) == 0.15


def test_the_whole_model_is_as_large_as_it_is_called() -> None:
    weights = by_hand(16, False)
    doubled = (16 - KV_HEADS) * LAYERS * (2 * DIM * HIDDEN + DIM) * 2  # copies of the KV heads and of their norms
    copied = 15 * (weights["router"] + (LAYERS * 2 + 1) * HIDDEN * 2)
    whole = 16 * (sum(weights.values()) - weights["rotary"]) - doubled - copied
    assert whole == 2 * PARAMETERS + weights["router"] // 2  # routers have 32 bits
    assert round(whole / 1e9, 1) == 457.5


def awq(folder: Path, case: str, *excluded: str, **sizes: int) -> Case:
    """The case `case` on a config.json in `folder` that says AWQ, kept as it is."""
    data = json.loads((ROOT / "checkpoints/MiniMax-M2.5/config.json").read_text())
    data["quantization_config"] = AWQ | {"modules_to_not_convert": ["gate", "lm_head", *excluded]}
    (folder / "config.json").write_text(json.dumps(data))
    overrides = [f"{key}={size}" for key, size in sizes.items()]
    return load_case(case, [f"model_path={folder}", "quantization.method=auto", *overrides])


def test_awq_with_float_attention_has_more_than_the_table(tmp_path: Path) -> None:
    """The table has 15.8 GB a rank of 8 for groups of 128 and 4-bit zero points. Here 1536 / 8 = 192 columns make
    groups of 64 of a layer's experts, and zero points are kept as 16 bits, as the device's products want them."""
    plan = make_plan(awq(tmp_path, W4A16, "self_attn"))
    sizes, experts = {part.name: part.nbytes for part in plan.sections["weights"]}, LAYERS * EXPERTS * EXPERT // 8
    assert sizes["attention"] == by_hand(8, False)["attention"]
    assert (sizes["experts"], sizes["experts' scales"]) == (experts // 2, experts // 64 * 4)
    assert round(plan.of("weights") / 1e9, 1) == 17.0
    table = sum(sizes.values()) - sizes["experts' scales"] + round(experts / 128 * 2.5)
    assert round(table / 1e9, 1) == 15.8


def test_layer_0_in_floats(tmp_path: Path) -> None:
    """As published: attention, and the experts of layer 0, are not quantised."""
    some = make_plan(awq(tmp_path, W4A16, "self_attn", "model.layers.0.")).of("weights")
    none = make_plan(awq(tmp_path, W4A16, "self_attn")).of("weights")
    assert some - none == EXPERTS * EXPERT // 8 * (2 - 0.5) - EXPERTS * EXPERT // 8 // 64 * 4


def test_groups_follow_the_columns_of_a_rank(tmp_path: Path) -> None:
    """1536 columns of w2 over 8 ranks are 192, over 16 are 96, over 32 are 48. A checkpoint's groups are cut smaller;
    the groups that a case asks for must fit."""
    for ranks, group in ((4, 128), (8, 64), (16, 32)):
        sizes = {p.name: p.nbytes for p in make_plan(awq(tmp_path, W4A16, world_size=ranks)).sections["weights"]}
        assert sizes["experts' scales"] * group == 8 * sizes["experts"], ranks  # 4 B a group, 1/2 a value
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
    assert (sizes.slot_bytes, sizes.blocks.block_bytes, round(2 * slot / 1e6, 3)) == (slot, slot, 7.963)
    assert sizes.frame == (2 * LAYERS, PAGE * 4 * 31_744)
    assert (sizes.shape.layers, sizes.shape.experts, sizes.shape.top_k) == (30, EXPERTS, TOP_K)
    assert (sizes.split.experts, sizes.split.extent_frames, sizes.split.extent_slots) == (30 * EXPERTS, 1, 4)
    assert (sizes.split.frames, sizes.split.sequences) == (22_000 * MIB // sizes.frame[1] - 1, 4)
    whole = by_hand(2, True)
    assert sizes.fixed_bytes == sum(whole.values()) - 30 * EXPERTS * slot
    arena = sizes.split.frames * sizes.frame[1]
    assert sizes.fixed_bytes + arena < 59e9  # a die has 68.7: allowance, prefill, a bank of one layer's experts
    assert 0.65 < sizes.split.usual_hit < 0.75


def made_up_costs(sizes: Sizes) -> Costs:
    """A host that reads weights at 200 GB/s."""
    expert = sizes.blocks.block_bytes / 200e6
    return Costs(
        0.01, Line(0.005, expert / 4, 0.001), Line(0.03, expert, 0.01), 0.1, 0.2, sizes.slot_bytes, (1, 1), 0.0
    )


@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_choices_at_the_true_sizes(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """A copy of 3.98 MB takes 0.2 ms over the assumed link, and the CPU computes an expert in 0.02: several copies fit
    beside a step, and only long prefills are streamed."""
    case = load_case(OFFLOAD, [f"offload_config.mode={mode}"])
    sizes = sizes_of(case)
    monkeypatch.setattr(choosing, "made_up", lambda *_: None)
    monkeypatch.setattr(choosing, "measure", lambda *_: made_up_costs(sizes))
    planner, chosen = choose(wanted_of(case), sizes, (0, 2))
    assert planner.costs.copy == pytest.approx(sizes.slot_bytes / 20e6)  # a device: 20 GB/s
    assert planner.step_ms(4, 1.0) < planner.step_ms(4, 0.7) < planner.step_ms(4, 0.0)
    # Two sequences at once, then the other two, are a little faster than all four with fewer experts.
    slots = sizes.split.experts if mode == "elastic" else sizes.split.slots(2 * sizes.split.longest)
    assert chosen.slots.value == slots
    hit = sizes.split.usual_hit if mode == "elastic" else slots / sizes.split.experts
    assert 5 < planner.step_ms(4, hit) < 20
    assert chosen.max_swaps.value == int(planner.step_ms(4, hit) / 4 / planner.costs.copy)
    assert chosen.stream_tokens.value == 1024


def test_offload_plans_print_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan(load_case(OFFLOAD, ["offload_config.measure_s=0"]))
    out = capsys.readouterr().out
    assert "experts: 7680 with shadows, 3981312 bytes each; 7680 may be resident at once" in out
    assert "on the host: 30.58 GB of shadows, and 30.58 GB pinned" in out
    # All experts from the start layer on are on the CPU; the arena is for the cache.
    show_plan(load_case(OFFLOAD, ["mode=fixed", "slots=-1", "arena_mb=1000", "start_layer=50", "measure_s=0"]))
    out = capsys.readouterr().out
    assert "3072 with shadows, 3981312 bytes each; 0 may be resident" in out
    assert "half as long       63 pages,      0 slots:   0%" in out  # no more pages than there are


@pytest.mark.parametrize("name", thorough_but([BF16, OFFLOAD, "qwen3_235b_a22b_bf16_tp16"], OFFLOAD))
def test_planning_is_quick_and_small(name: str) -> None:
    """CPU time, of a process that imports everything and, with shadow experts, measures: seconds on an idle machine."""
    code = "import run; run.main(['--plan']); print(*(x for x in open('/proc/self/status') if 'VmHWM' in x))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"CASE_NAME": name}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    assert int(re.findall(r"VmHWM:\s*(\d+) kB", done.stdout)[0]) * 1024 < 1.5e9

"""`--plan`: every number compared with one worked out by hand and with a real model; and cases that do not fit."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.command import umbra
from tests.tiny import save_tiny, tiny_case
from tests.variants import thorough_but
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.executor.config.case import Case
from umbra.executor.config.load import list_cases, load_case, load_model_config
from umbra.executor.config.units import GB
from umbra.executor.plan.activations import Ledger
from umbra.executor.plan.batch_limits import limits_of
from umbra.executor.plan.kv_caches import bind_caches
from umbra.executor.plan.resolve import STEP, resolve
from umbra.executor.plan.shadows import plan_with_arena
from umbra.executor.plan.weight_formats import build_of
from umbra.executor.platform.ascend.plan.memory import make_plan
from umbra.executor.platform.ascend.plan.shadows import CountedShadows
from umbra.executor.run.memory_report import check_fits, print_plan
from umbra.models.layers.base import layers_of
from umbra.models.registry import model_class
from umbra.ops.ascend.counted import AscendCosts
from umbra.ops.ascend.layout import AscendLayout
from umbra.ops.ascend.slots import ArenaSlots
from umbra.ops.ascend.weights import AscendExperts
from umbra.ops.counted import CountedOps
from umbra.ops.formats import FORMATS, Format
from umbra.ops.interface import SILU_EXPERTS
from umbra.ops.parallel.join import parallel_of

pytestmark = pytest.mark.slow

VOCABULARY, DIM, EXPERTS, TOP_K = 151936, 128, 128, 8
PAGES, BATCH, CHUNK, LONGEST = 4 * (4096 + 1024) // 128, 4, 4096, 4096 + 1024
MIB = 1024 * 1024
CASES: dict[str, dict[str, Any]] = {
    "qwen3_30b_a3b_bf16_tp8": dict(tp=8, layers=48, hidden=2048, heads=32, inner=768, q4=False),
    "qwen3_235b_a22b_w4a16_tp8": dict(tp=8, layers=94, hidden=4096, heads=64, inner=1536, q4=True),
}


def by_hand(tp: int, layers: int, hidden: int, heads: int, inner: int, q4: bool) -> dict[str, dict[str, int]]:
    """Whole tensors divided by the ranks; with 8 or 16 ranks each holds one of the 4 KV heads."""
    q, one_head = heads * DIM // tp, DIM
    in_attention = hidden * (q + one_head + one_head) + q * hidden
    in_experts = EXPERTS * 3 * hidden * inner // tp
    table = VOCABULARY * hidden // tp * 2
    weights: dict[str, Any] = {"embedding": table}
    weights |= {"attention": layers * (in_attention // 2 + in_attention // 32 * 2 if q4 else in_attention * 2)}
    weights |= {"router": layers * EXPERTS * hidden * 2}
    weights |= {"experts": layers * in_experts // 2 if q4 else layers * in_experts * 2}
    weights |= {"experts' scales and biases": layers * in_experts // 32 * 2 if q4 else 0}
    weights |= {"norms": layers * (2 * hidden + 2 * DIM) * 2 + hidden * 2, "head": table}
    weights |= {"rotary": 2 * LONGEST * DIM * 2}
    prefill = {
        "model.rotary: rows": 2 * CHUNK * DIM * 2,
        "a layer: residual sum": 2 * CHUNK * hidden * 2,  # this layer's and the one before's
        "a layer: normalised": CHUNK * hidden * 2,
        "mlp: weights": CHUNK * TOP_K * 2,
        "mlp: ids": CHUNK * TOP_K * 4,
        "mlp.experts: rows in expert order": CHUNK * TOP_K * hidden * 2,
        "mlp.experts: order back": CHUNK * TOP_K * 4,
        "mlp.experts: rows of each expert": EXPERTS * 8,
        "mlp.experts: scales of rows": CHUNK * TOP_K * 4,  # npu_moe_init_routing_v2 returns them unused
        "mlp.experts: down's result": CHUNK * TOP_K * hidden * 2,
        "mlp.experts: sums over experts": 2 * CHUNK * hidden * 2,  # this layer's and the one before's
        "inputs": CHUNK * (8 + 8 + 16) + BATCH * (40 * 4 + 8),
        "causal mask": 4 * MIB,
    }
    if q4:  # CANN's grouped product unpacks them first
        prefill["w13 of a layer, unpacked"] = EXPERTS * hidden * 2 * inner // tp * 2
        prefill["w2 of a layer, unpacked"] = EXPERTS * hidden * inner // tp * 2
    # Hidden states, from which a decode step takes every row without a copy; this rank's logits; those of all ranks as
    # they come and, of more than one sequence, in order.
    in_head = {n: hidden * 2 + VOCABULARY // tp * 2 + (1 + (n > 1)) * VOCABULARY * 2 for n in (1, 2, 4)}
    return {
        "weights": {name: size for name, size in weights.items() if size},
        "KV cache": {"pages": layers * 2 * (PAGES + 1) * 128 * one_head * 2},
        "prefill step": {"fullest at mlp.experts: sums over experts": 0, **prefill},
        "decode graphs": {f"{n} row(s)": n * (in_head[n] + 8 + 8 + 16 + 40 * 4 + 8) for n in (1, 2, 4)},
        "HCCL buffers": {"world, attn_tp, embed_tp, lmhead_tp": 2 * 200 * MIB},
        "allowance": {"CANN, operators, tiles": 6 * 1024 * MIB},
    }


@pytest.mark.parametrize("name", CASES)
def test_the_shipped_cases_are_as_counted_by_hand_and_fit(name: str) -> None:
    plan, wanted = make_plan(load_case(name)), by_hand(**CASES[name])
    assert {section: {p.name: p.nbytes for p in parts} for section, parts in plan.sections.items()} == wanted
    total = sum(size for parts in wanted.values() for size in parts.values())
    assert plan.total == total
    assert plan.left == 64 * 1024 * MIB - total > 8 * GB
    token = CASES[name]["layers"] * 2 * DIM * 2
    assert plan.tokens_left == plan.left // (128 * token) * 128
    check_fits(plan)
    weights = wanted["weights"]
    experts = weights["experts"] + weights.get("experts' scales and biases", 0)
    others = sum(weights.values()) - experts - weights["embedding"] - weights["rotary"]
    hit = round(experts * (1 - (120 / 128) ** 4))
    assert [part.nbytes for part in plan.decode] == [others, hit, BATCH * LONGEST * token]


@pytest.mark.parametrize(
    "name",
    thorough_but(
        [name for name, _ in list_cases() if load_case(name).platform == "ascend"],
        "gpt_oss_120b_bf16_tp8",
        "qwen3_235b_a22b_w4a16_offload",
    ),
)
def test_every_case_of_ascend_fits(name: str) -> None:
    case = load_case(name)
    if case.offload_config.mode == "none":
        return check_fits(make_plan(case))
    case = resolve(case)
    check_fits(plan_with_arena(case))
    if chunk := case.data_config.chunked_prefill_size:
        assert plan_with_arena(load_case(name, [f"chunked_prefill_size={chunk + STEP}"])).left < 0
    return None


def tiny(folder: Path, *, config: dict[str, Any] | None = None, **sections: Any) -> Case:
    sizes = dict(hidden_size=64, moe_intermediate_size=128) | (config or {})
    if not (folder / "model").exists():
        save_tiny(folder / "model", **sizes)
    data = {"prompts": ["x"], "input_max_len": 100, "max_new_tokens": 60, "batch_size": 4}
    on_ascend: dict[str, Any] = {"platform": "ascend", "exe_mode": "ge_graph", "model_config": {"dtype": "bfloat16"}}
    on_ascend |= {"data_config": data, "cache_config": {"page_size": 128}}
    return tiny_case(folder, folder / "model", **on_ascend | sections)


@pytest.mark.parametrize(("method", "ranks"), [("none", 1), ("q4", 2)])
def test_a_real_model_takes_what_was_planned(tmp_path: Path, method: str, ranks: int) -> None:
    config = dict(attention_bias=True, mlp_only_layers=[0], intermediate_size=64)
    wanted = {"method": method, "zero_points": method == "q4"}
    case = tiny(tmp_path, config=config, world_size=ranks, quantization=wanted)
    build = build_of(
        case,
        cast(Any, AscendLayout(torch.bfloat16)),
        parallel_of(case.parallel_sizes, 0, {}),
        torch.device("cpu"),
        quantised_head=False,
    )
    model = model_class(case.model_name)(load_model_config(case), build)
    bind_caches(model, case, build, limits_of(case, load_model_config(case)).pages)
    tensors = [*model.parameters(), *model.buffers(), *(t for _, layer in layers_of(model) for t in layer.storages())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    plan = make_plan(case)
    assert sum(storages.values()) == plan.of("weights") + plan.of("KV cache")
    assert {"attention", "dense MLP", "experts"} <= {part.name for part in plan.sections["weights"]}


def test_a_rank_of_gpt_oss_120b() -> None:
    """Experts in bfloat16, their biases in float32; layers of windows share the caches of those that see all."""
    plan = make_plan(load_case("gpt_oss_120b_bf16_tp8"))
    sizes, experts = {part.name: part.nbytes for part in plan.sections["weights"]}, 36 * 128 // 8
    assert sizes["experts"] == experts * 3 * 2880 * 2880 * 2
    assert sizes["experts' scales and biases"] == experts * 3 * 2880 * 4
    assert plan.page_nbytes == 18 * 2 * 128 * 64 * 2
    assert 34 << 30 < plan.total < 35 << 30


def test_a_layer_that_guesses_is_counted() -> None:
    """Its page of latents and rotated keys, and the hidden states of graphs of five sizes."""
    plain, mtp = (make_plan(load_case("deepseek_r1_w8a8_tp16", [f"draft_config.method={m}"])) for m in ("none", "mtp"))
    assert mtp.of("KV cache") - plain.of("KV cache") == (1024 + 1) * 128 * (512 + 64) * 2
    graphs = {part.name: part.nbytes for part in mtp.sections["decode graphs"]}
    assert graphs["guesses after 64 row(s)"] > 5 * 64 * 7168 * 2
    assert "guesses after 64 row(s)" not in {part.name for part in plain.sections["decode graphs"]}


def test_a_head_that_guesses_is_counted() -> None:
    """A prefill keeps three hidden states for it; a step that guesses nothing does not read its cache."""
    head = ["draft_config.method=eagle3", "draft_config.model_path=checkpoints/Qwen3-30B-A3B-eagle3"]
    plain, eagle3 = (make_plan(load_case("qwen3_30b_a3b_bf16_tp8", more)) for more in ([], head))
    assert eagle3.of("prefill step") - plain.of("prefill step") > 3 * 4096 * 2048 * 2
    assert "guesses after 16 row(s)" in {part.name for part in eagle3.sections["decode graphs"]}
    assert eagle3.decode == plain.decode


@pytest.mark.parametrize(
    "format", [FORMATS["bfloat16"], Format("q4", 32, True), FORMATS["w8a8"]], ids=lambda format: format.kind
)
def test_a_bank_of_experts_out_of_slots_is_counted_as_it_is_gathered(format: Format) -> None:
    ledger, kind, count, inner, hidden = Ledger(), SILU_EXPERTS, 5, 96, 256
    ops = CountedOps(AscendLayout(torch.bfloat16), torch.bfloat16, 128, 8, AscendCosts, name=ledger.note)
    shadow = CountedShadows(load_case("glm46_w4a16_offload"), ops, 8).experts(
        "model.layers.40.mlp", slice(0, 8), inner, hidden, format, kind
    )
    assert shadow
    block, host = shadow.layout.block_bytes, torch.device("cpu")
    like = AscendExperts(8, inner, hidden, format, torch.bfloat16, host, in_planes=shadow.layout.in_planes)
    slots = ArenaSlots(torch.zeros(9 * block, dtype=torch.uint8), 8 * block, shadow.layout, like)
    slots.prepare(count)
    places, x = torch.zeros(count, dtype=torch.int32), torch.zeros(1, hidden, device="meta")
    steps: list[Any] = [lambda _: slots.bank(places), lambda _: shadow.bank(x, count)]
    sizes = [ledger.fullest(torch.nn.Identity(), step, cast(Any, None)).nbytes for step in steps]
    assert sizes[0] == sizes[1] > count * block


def test_what_does_not_fit_is_named_and_still_printed(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(load_case("qwen3_235b_a22b_bf16_tp16", ["memory_gb=32"]))
    print_plan(plan)
    assert "does not fit" in capsys.readouterr().out
    with pytest.raises(UserError) as raised:
        check_fits(plan)
    over = f"{plan.total / GB:.2f} GB are {(plan.total - 32 * GB) / GB:.2f} GB more than ascend_config.memory_gb: 32"
    assert over in str(raised.value)
    assert f"weights with {plan.of('weights') / GB:.2f} GB: raise world_size" in str(raised.value)
    long = make_plan(load_case("qwen3_30b_a3b_bf16_tp8", ["batch_size=64", "chunked_prefill_size=0", "memory_gb=30"]))
    with pytest.raises(UserError, match=r"prefill step .* lower chunked_prefill_size"):
        check_fits(long)


def start(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=240)


def test_the_command_prints_the_plan_and_starts_no_rank() -> None:
    name = "qwen3_30b_a3b_bf16_tp8"
    planned = umbra("plan", name)
    assert planned.returncode == 0, planned.stderr
    assert f"{CASES[name]['tp']} rank(s)" in planned.stdout
    assert f"{make_plan(load_case(name)).total:,}" in planned.stdout
    assert not (ROOT / "results" / name).exists()


def test_run_py_prints_the_same_plan() -> None:
    name = next(iter(CASES))
    alone = start([sys.executable, "run.py", "--plan"], CASE_NAME=name)
    assert alone.stdout == umbra("plan", name).stdout, alone.stderr


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_refusals_are_one_line_before_any_rank() -> None:
    name = "qwen3_235b_a22b_w4a16_tp8"
    small = umbra("plan", name, "--set", "memory_gb=16")
    assert "GB more than ascend_config.memory_gb: 16" in one_line(small)
    assert "does not fit" in small.stdout
    here = umbra("plan", "demo", "--max-num-seqs=4096", "--kv-cache-dtype=float32", "--max-model-len=2048")
    assert "KV cache and" in one_line(here)
    assert "memory" in here.stdout.splitlines()[-1]
    if not (ROOT / "checkpoints/Qwen3-235B-A22B/model.safetensors.index.json").exists():
        missing = one_line(umbra("run", name))
        assert "Qwen3-235B-A22B holds neither model.safetensors nor model.safetensors.index.json" in missing
    if not find_spec("torch_npu"):
        missing = one_line(umbra("run", name, "--set", "with_ckpt=false"))
        assert "platform: ascend needs torch_npu, which is not installed: on a machine with CANN" in missing
    assert not (ROOT / "results" / name).exists()

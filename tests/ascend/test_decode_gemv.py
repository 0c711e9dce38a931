"""Our own kernels for the vector cores in the model: the numbers over the reference's ops (L2), the GE graph and the
captures (L4), and what a run reports about it. The shapes and types (L1) are in test_meta.py."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ascend.engine import M2, QWEN3, SECOND_THOROUGH, Family, ascend_case, ascend_runner, prefilled
from tests.ascend.extension import load_extension
from tests.ascend.ge import GeProgram
from tests.ascend.log import device_log
from tests.ascend.on_cpu import ReferenceOnCpu, ascend_on_cpu
from tests.ascend.ranks import gloo_ranks, run_gloo_ranks
from tests.ascend.test_ge import FUSED, M2_FUSED, decode_program
from tests.ascend.test_numerics import assert_same, logits, save
from tests.ascend.umbra_on_cpu import CALLS
from tests.quantised import quantise_tiny
from tests.tiny import ONE_RANK
from umbra.base.errors import UserError
from umbra.executor.config.env import RankEnv
from umbra.executor.model_runner import make_runner
from umbra.ops.ascend import vector_core

STEPS = 5  # of decode, of two layers each: test_numerics.logits
MOE, SCORES, GEMV = "fused_moe_w4a16", "fused_moe_scores_w4a16", "gemv_w4a16"
UNPACK, TILES = "unpack_w4a16", "unpack_tiles_w4a16"


def checkpoint(folder: Path, format: str, group: int, symmetric: bool, family: Family = QWEN3, **options: Any) -> None:
    save(family, folder, inner=64, **options)
    quantise_tiny(folder / "model", folder / "quantised", format, group, 4, symmetric)


def ours(folder: Path, gemv_tokens: int, ranks: RankEnv = ONE_RANK, **sections: Any) -> dict[str, np.ndarray]:
    CALLS.clear()
    return logits(folder, ascend_on_cpu("fusion_v2", gemv_tokens), ranks, model="quantised", **sections)


@pytest.mark.parametrize(
    ("format", "group", "symmetric", "family", "options", "gemv_tokens"),
    [
        ("awq", 64, False, QWEN3, dict(attention_bias=True, mlp_only_layers=[1], intermediate_size=64), 6),
        ("pack-quantized", 64, True, QWEN3, dict(norm_topk_prob=False), 6),
        ("awq", 32, False, M2, {}, 6),
        ("awq", 32, False, QWEN3, {}, 5),
    ],
    ids=str,
)
def test_model_equals_reference(
    tmp_path: Path, format: str, group: int, symmetric: bool, family: Family, options: dict[str, Any], gemv_tokens: int
) -> None:
    """A decode step is padded to six tokens here; the prefill has more."""
    checkpoint(tmp_path, format, group, symmetric, family, **options)
    assert_same(ours(tmp_path, gemv_tokens), logits(tmp_path, ReferenceOnCpu, model="quantised-floats"), 1e-4)
    dense = len(options.get("mlp_only_layers", []))  # two linear layers more, and no experts
    unpacked = Counter({UNPACK: 4 + 2 * dense, TILES: 2 * (2 - dense)})  # for the prefill
    moe = SCORES if options.get("norm_topk_prob", True) else MOE  # the kernel renormalises
    calls = {GEMV: (4 + 2 * dense) * STEPS, moe: (2 - dense) * STEPS} | unpacked
    assert (calls if gemv_tokens == 6 else {op: n * (1 + STEPS) for op, n in unpacked.items()}) == +Counter(CALLS)


def rank_logits(rank: int, port: int, folder: Path, split: dict[str, int]) -> None:
    ranks = gloo_ranks(rank, port, 2)
    arrays: dict[str, Any] = ours(folder, 8, ranks, world_size=2, parallel_config=split)
    np.savez(folder / f"rank{rank}.npz", fused=CALLS[SCORES], gemv=CALLS[GEMV], **arrays)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "split", "fused"),
    [
        (M2, {}, 2 * STEPS),
        (QWEN3, {"moe_tp_size": 1}, 2 * STEPS),  # half of the ids are of the other rank's experts
        (QWEN3, {"attn_tp_size": 1}, 0),  # the experts see both groups' tokens, each padded: more than eight
    ],
    ids=["tp2", "ep2", "dp2"],
)
def test_two_ranks_equal_the_reference(tmp_path: Path, family: Family, split: dict[str, int], fused: int) -> None:
    checkpoint(tmp_path, "awq", 32, False, family)
    run_gloo_ranks(rank_logits, 2, tmp_path, split)
    expected = logits(tmp_path, ReferenceOnCpu, model="quantised-floats")
    for rank in range(2):
        with np.load(tmp_path / f"rank{rank}.npz") as arrays:
            assert_same(dict(arrays), expected, 1e-4)
            short = 4 if rank and "attn_tp_size" in split else 0  # rank 1 has only the prompt of one token
            assert (int(arrays["fused"]), int(arrays["gemv"])) == (fused, 4 * STEPS + short)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretends that the package is built; the list grows each time that it is loaded."""
    torch._dynamo.reset()
    times: list[str] = []
    monkeypatch.setattr(vector_core, "built", lambda: 1)
    monkeypatch.setattr(vector_core, "load", lambda: times.append("loaded"))
    return times


@pytest.fixture
def on_npu(loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The real torch extension on the fake device."""
    monkeypatch.setattr(vector_core, "load", load_extension)


FUSED_INPUTS = ["x", "w13", "s13", "z13", "w2", "s2", "z2", "scores", "bias"]
WRITES = {"Cast", "TensorMove", "Transpose", "TransposeD", "Identity", "TensorScatterUpdate", "Fill"}
REPLACED = Counter(GroupedMatmul=2, MatMul=2, MoeGatingTopK=1, MoeInitRoutingV3=1, MoeFinalizeRoutingV2=1, SwiGlu=1)
OWN = Counter(UmbraFusedMoeScoresW4a16=1, UmbraGemvW4a16=2)
KERNELS = {QWEN3: Counter(FUSED) - REPLACED + OWN, M2: M2_FUSED - REPLACED + OWN}  # of a layer
assert [sum(kernels.values()) for kernels in KERNELS.values()] == [8, 12]


def check(program: GeProgram, family: Family) -> None:
    """Two layers, the linear layers and the mixture of each on the vector cores, which chooses the experts as well;
    without copies between them."""
    count, kernels = program.count(), KERNELS[family]
    around = Counter(RmsNorm=1, MatMul=1)  # the first norm, the head
    assert {name: count[name] - around[name] for name in kernels} == {name: 2 * n for name, n in kernels.items()}
    assert not count.keys() & ((WRITES | REPLACED.keys()) - kernels.keys())
    values = {out.source: out for node in program.nodes for out in node.outputs}
    own = program.of("UmbraFusedMoeScoresW4a16", "UmbraGemvW4a16")
    assert all(node.proto.attr["float_sums"].b for node in own)
    for node in program.of("UmbraFusedMoeScoresW4a16"):
        assert [desc.name for desc in node.proto.input_desc] == FUSED_INPUTS
        assert [values[i].shape if i else None for i in node.inputs] == [
            (4, 128),
            (8, 1, 128, 64),
            (8, 1, 128, 8),
            (8, 1, 128, 8),
            (8, 1, 128, 32),
            (8, 1, 128, 8),
            (8, 1, 128, 8),
            (4, 8),
            (8,) if family == M2 else None,
        ]
        types = [values[i].dtype if i else None for i in node.inputs[-2:]]
        assert types == ([torch.float32] * 2 if family == M2 else [torch.bfloat16, None])
        assert (node.proto.attr["top_k"].i, node.proto.attr["sigmoid"].b) == (3, family == M2)
        assert (node.outputs[0].shape, node.outputs[0].dtype) == ((4, 128), torch.bfloat16)
    for node, inputs, outputs in zip(program.of("UmbraGemvW4a16"), (128, 256) * 2, (512, 128) * 2, strict=True):
        assert [desc.name for desc in node.proto.input_desc] == ["x", "w", "scales", "zeros"]
        kept = (1, outputs, 8)
        assert [values[i].shape if i else None for i in node.inputs] == [
            (4, inputs),
            (inputs // 128, outputs, 64),
            kept,
            kept,
        ]
        assert (node.outputs[0].shape, node.outputs[0].dtype) == ((4, outputs), torch.bfloat16)


@pytest.mark.thorough
@pytest.mark.parametrize("family", SECOND_THOROUGH, ids=str)
def test_the_ge_graph(tmp_path: Path, family: Family, loaded: list[str]) -> None:
    overrides = ["method=q4", "decode_gemv=on", "strict=true", "zero_points=true", "gemv_float_sums=true"]
    check(decode_program(tmp_path, *overrides, family=family), family)
    assert loaded == ["loaded"]


LAYER = [
    "aclnnUmbraGemvW4a16 (4,128)bfloat16 (1,512,64)uint8 (1,512,8)bfloat16 32 (4,512)bfloat16",
    "aclnnUmbraGemvW4a16 (4,256)bfloat16 (2,128,64)uint8 (1,128,8)bfloat16 32 (4,128)bfloat16",
    "aclnnUmbraFusedMoeScoresW4a16 (4,128)bfloat16 (8,1,128,64)uint8 (8,1,128,8)bfloat16 (8,1,128,32)uint8"
    " (8,1,128,8)bfloat16 {} 32 32 (4,128)bfloat16",
]
CHOICE = {QWEN3: "(4,8)bfloat16 3", M2: "(4,8)float32 (8)float32 3 true"}
HEAD = "aclnnMatmulWeightNz (4,128)bfloat16 (128,96)bfloat16:NZ (4,96)bfloat16"
PRODUCTS = ("Umbra", "Matmul", "Gating", "Routing", "SwiGlu", "Sort")


@pytest.mark.thorough
@pytest.mark.usefixtures("on_npu")
@pytest.mark.parametrize(("family", "float_sums"), [(QWEN3, True), (M2, False)], ids=str)
def test_captured_once_and_replayed(tmp_path: Path, family: Family, float_sums: bool) -> None:
    overrides = ["method=q4", "decode_gemv=on", "strict=true", "exe_mode=acl_graph", f"gemv_float_sums={float_sums}"]
    runner = ascend_runner(ascend_case(tmp_path, *overrides, family=family), tmp_path)
    with device_log() as prefill:
        prefilled(runner)
    names = [line.split()[0] for line in prefill.find("Umbra")]
    assert names[:8] == ["aclnnUmbraUnpackW4a16"] * 8  # more than eight tokens
    assert [name[:18] for name in names[8:]] == ["aclnnUmbraFusedMoe"]  # of the last layer: three rows are wanted
    with device_log() as first:
        runner.loop.step()
    products = [line for line in first.lines if any(word in line for word in PRODUCTS)]
    layer = [line.format(CHOICE[family]) for line in LAYER]
    layer = [" true (".join(line.rsplit(" (", 1)) for line in layer] if float_sums else layer
    assert products == [f"captured {line}" for line in [*layer, *layer, HEAD]]
    for _ in range(2):
        with device_log() as log:
            runner.loop.step()
        assert (len(log.find("replay graph")), log.find("Umbra")) == (1, [])
    assert runner.engine.decode_step.compiles == 1


@pytest.mark.usefixtures("on_npu")
def test_a_run_tells_and_reports_the_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = ascend_case(tmp_path, "exe_mode=eager", "method=q4", "with_ckpt=false", "prompts=[]")
    with device_log() as log:
        report = make_runner(case, tmp_path, ONE_RANK).run()
    few = "mlp.experts of layers 0-1, 1 to 8 tokens"
    assert report["kernels"][few] == "fused_moe[_scores]_w4a16 on the vector cores"
    assert f"{few}: fused_moe[_scores]_w4a16 on the vector cores\n" in capsys.readouterr().out
    prefills = 2  # of the warm-up and of the run; the last layer of each has few rows behind its attention
    assert (len(log.find("UmbraFusedMoe")) - prefills) * 2 == len(log.find("UmbraGemv")) > 0


def test_on_without_the_package_is_refused(tmp_path: Path, loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_core, "built", lambda: 0)
    with pytest.raises(
        UserError, match=r"decode_gemv: on: the kernels are not built: run bash ops/ascend/vector_core/build\.sh"
    ):
        ascend_runner(ascend_case(tmp_path, "method=q4", "decode_gemv=on"), tmp_path)
    ascend_runner(ascend_case(tmp_path, "method=q4"), tmp_path)
    assert not loaded

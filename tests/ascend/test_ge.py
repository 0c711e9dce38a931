"""L4, exe_mode ge_graph: the graph that the real torchair passes to GE for a decode step."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from ops.ascend import lowering
from ops.ascend.ops import AscendOps
from tests.ascend.engine import PROMPTS, ascend_case, ascend_runner, generate
from tests.ascend.ge import GeProgram, ge_programs

FUSED = {  # kernels of a layer
    "AddRmsNorm": 2, "ApplyRotaryPosEmb": 1, "FusedInferAttentionScore": 1, "GroupedMatmul": 2, "MatMul": 3,
    "MoeFinalizeRoutingV2": 1, "MoeGatingTopKSoftmax": 1, "MoeInitRoutingV3": 1, "RealDiv": 1, "ReduceSum": 1,
    "RmsNorm": 2, "ScatterNdUpdate": 2, "SplitV": 1, "SwiGlu": 1,
}  # fmt: skip
VIEWS = {"Reshape": 4, "Squeeze": 3, "Unsqueeze": 7}  # no kernels
# Each of a grouped product's absent lists is an empty tensor that torchair makes in place: constants, folded by GE.
FOLDED = {"Cast": 10, "Const": 28, "Fill": 10}
DATA = 11  # weights and caches


@pytest.fixture(autouse=True)
def forget_compiled() -> None:
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> GeProgram:
    """A program that is compiled once for the tests that only read it."""
    return decode_program(tmp_path_factory.mktemp("two_layers"))


def decode_program(folder: Path, *overrides: str, layers: int = 2, prompts: list[list[int]] = PROMPTS) -> GeProgram:
    runner = ascend_runner(ascend_case(folder, "exe_mode=ge_graph", *overrides, num_hidden_layers=layers), folder)
    with ge_programs() as programs:
        generate(runner, prompts)
    (program,) = programs
    return program


def check(program: GeProgram, layers: int = 2) -> None:
    """Checks that the decode step has the intended nodes, and that nothing is copied, cast or transposed."""
    count = program.count()
    assert not program.of("TensorMove", "Transpose", "TransposeD", "Identity", "TensorScatterUpdate")
    constants = {node.name for node in program.of("Const")}
    assert all(node.inputs[0].partition(":")[0] in constants for node in program.of("Cast"))
    (logits,) = program.outputs()  # and no KV cache
    assert (logits.shape, logits.dtype) == ((4, 96), torch.bfloat16)
    for node in program.of("FusedInferAttentionScore"):
        (lengths,) = (value for value in program.inputs() if value.source == node.inputs[6])
        assert (lengths.shape, lengths.dtype) == ((4,), torch.int64)
        table = next(value for value in program.inputs() if value.source == node.inputs[14])
        assert (table.shape, table.dtype) == ((4, 1), torch.int32)
    for name, each in FUSED.items():
        around = {"RmsNorm": 1, "MatMul": 1}.get(name, 0)  # the first norm, the head
        assert count[name] == each * layers + around, name


def test_a_decode_step_is_fused_and_copies_nothing(two_layers: GeProgram) -> None:
    check(two_layers)


def test_nodes_of_one_layer_more(tmp_path: Path, two_layers: GeProgram) -> None:
    three = decode_program(tmp_path, layers=3).count()
    assert three - two_layers.count() == Counter(FUSED | VIEWS | FOLDED | {"Data": DATA})


def test_four_bit_experts(tmp_path: Path) -> None:
    program = decode_program(tmp_path, "method=q4")
    assert program.count()["WeightQuantBatchMatmulV2"] == 2 * 2  # qkv and o of two layers
    assert program.count()["GroupedMatmul"] == 2 * 2
    assert not program.of("TensorMove")


def test_one_graph_serves_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths differ at every step; as sequences end, the batch is padded to a size that has a graph, or gets one."""
    runner = ascend_runner(ascend_case(tmp_path, "exe_mode=ge_graph", "strict=true"), tmp_path)
    decode: Any = runner.engine.decode_step
    with ge_programs() as programs:
        generate(runner, [*PROMPTS, [1, 2]])
        generate(runner)  # three sequences, padded to four
        assert ([p.inputs()[1].shape for p in programs], decode.compiles) == ([(4,)], 1)
        assert programs[0].runs == 5 + 5
        generate(runner, [[9] * 5])
        generate(runner, [[9] * 9])
    assert ([p.inputs()[1].shape for p in programs], decode.compiles) == ([(4,), (1,)], 2)
    assert programs[1].runs == 5 + 5


def test_options_that_reach_ge(two_layers: GeProgram) -> None:
    options = two_layers.options
    assert options["frozen_parameter"] == "1"
    assert options["ge.tiling_schedule_optimize"] == "1"
    assert options["ge.topoSortingMode"] == "3"  # StableRDFS
    assert "0" not in options["frozenInput"].split(",")[4:11]  # a layer's weights and caches


def flat_view(self: AscendOps, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, places: Tensor) -> None:
    flat = (places[:, 0] * 128 + places[:, 1])[:, None]
    for x, cache in ((k, k_cache), (v, v_cache)):
        torch_npu.npu_scatter_nd_update_(input=cache.view(-1, cache.shape[2]), indices=flat, updates=x.flatten(1))


def in_float(self: AscendOps, x: Tensor) -> Tensor:
    return torch_npu.npu_swiglu(input=x.float(), dim=-1).to(x.dtype)


@pytest.mark.parametrize(("op", "mutant"), [("write_kv", flat_view), ("silu_mul", in_float)])
def test_a_mistake_in_an_op_is_seen(
    tmp_path: Path, op: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AscendOps, op, mutant)
    if op == "silu_mul":
        monkeypatch.setattr("ops.ascend.moe.swiglu", lambda x: in_float(AscendOps, x))  # type: ignore[arg-type]
    program = decode_program(tmp_path)
    with pytest.raises(AssertionError):
        check(program)


def test_torchairs_own_rotary_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for ops/ascend/lowering.py, which can be removed when this test fails."""
    monkeypatch.setattr(torch.ops.npu.npu_apply_rotary_pos_emb.default, "_ge_converter", lowering.TORCHAIRS_ROTARY)
    assert decode_program(tmp_path).count()["TensorMove"] == 2 * 2

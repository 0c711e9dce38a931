"""L4, exe_mode ge_graph: the graph that the real torchair passes to GE for a decode step."""

import dataclasses
import functools
import importlib
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchair._ge_concrete_graph.ge_converter.custom import apply_rotary_pos_emb
from torchair.core import _backend

from tests.ascend.engine import (
    GLM,
    GPT_OSS,
    M2,
    PROLOG,
    PROMPTS,
    QWEN2,
    QWEN3,
    V3,
    Family,
    ascend_case,
    ascend_runner,
    generate,
    in_int8,
    prefilled,
)
from tests.ascend.ge import GeProgram, ge_programs
from tests.variants import thorough_but
from umbra.executor.platform.ascend import device
from umbra.ops.ascend import lowering
from umbra.ops.ascend.attention import ALL_TOKENS
from umbra.ops.ascend.cann import ALL_ABILITIES
from umbra.ops.ascend.ops import AscendOps

FUSED = {  # kernels of a layer
    "AddRmsNorm": 2,
    "FusedInferAttentionScore": 1,
    "GroupedMatmul": 2,
    "MatMul": 3,
    "MoeFinalizeRoutingV2": 1,
    "MoeGatingTopK": 1,
    "MoeInitRoutingV3": 1,
    "QkvRmsNormRopeCache": 1,
    "SwiGlu": 1,
}
EARLIER = {  # the same with CANN 8.5
    "AddRmsNorm": 2,
    "ApplyRotaryPosEmb": 1,
    "FusedInferAttentionScore": 1,
    "GroupedMatmul": 2,
    "MatMul": 3,
    "MoeFinalizeRoutingV2": 1,
    "MoeGatingTopKSoftmax": 1,
    "MoeInitRoutingV3": 1,
    "RealDiv": 1,
    "ReduceSum": 1,
    "RmsNorm": 2,
    "ScatterNdUpdate": 2,
    "SplitV": 1,
    "SwiGlu": 1,
}
M2_FUSED = (
    Counter(EARLIER)
    - Counter(AddRmsNorm=1, MoeGatingTopKSoftmax=1, ReduceSum=1, RealDiv=1, ScatterNdUpdate=2)
    + Counter(
        AddRmsNormCast=1,  # torchair's own fusion: the norm before the router gives its input in float32 as well
        MoeGatingTopK=1,
        ScatterPaKvCache=1,
    )
)
QWEN2_FUSED = (  # heads have no norms but biases, so two copies of columns rotate; a gated shared expert
    Counter(EARLIER)
    - Counter(ReduceSum=1, RealDiv=1, RmsNorm=2, ScatterNdUpdate=2)
    + Counter(Addcmul=1, Identity=2, MatMul=2, MatMulV2=1, ScatterPaKvCache=1, Sigmoid=1, SwiGlu=1)
)
GLM_FUSED = (  # biases, a router in float32, a shared expert
    Counter(FUSED) - Counter(AddRmsNorm=1) + Counter(Add=1, AddRmsNormCast=1, MatMul=1, MatMulV2=1, SwiGlu=1)
)
GPT_OSS_FUSED = (  # as Qwen2-MoE's attention, all products with biases, a clipped SwiGLU
    Counter(EARLIER)
    - Counter(MatMul=3, MoeGatingTopKSoftmax=1, ReduceSum=1, RealDiv=1, RmsNorm=2, ScatterNdUpdate=2, SwiGlu=1)
    + Counter(ClippedSwiglu=1, Identity=2, MatMulV2=3, MoeGatingTopK=1, ScatterPaKvCache=1)
)
V3_FUSED = (  # as GLM's experts; latents
    Counter(GLM_FUSED)
    - Counter(QkvRmsNormRopeCache=1, MatMulV2=1)
    + Counter(KvRmsNormRopeCache=1, MatMul=2, RmsNorm=1, RotaryMul=1, TransposeBatchMatMul=2)
)
PROLOG_FUSED = (  # one op before attention over latents
    Counter(V3_FUSED)
    - Counter(KvRmsNormRopeCache=1, RmsNorm=1, RotaryMul=1, TransposeBatchMatMul=1, MatMul=2)
    + Counter(MlaPrologV3=1)
)
OF_FAMILY = {
    QWEN3: FUSED,
    M2: dict(M2_FUSED),
    QWEN2: dict(QWEN2_FUSED),
    GLM: dict(GLM_FUSED),
    GPT_OSS: dict(GPT_OSS_FUSED),
    V3: dict(V3_FUSED),
    PROLOG: dict(PROLOG_FUSED),
}


@pytest.fixture(autouse=True)
def forget_compiled() -> None:
    torch._dynamo.reset()


@functools.cache
def two_layers(family: Family) -> GeProgram:
    """A program that is compiled once for the tests that only read it."""
    with tempfile.TemporaryDirectory() as folder:
        return decode_program(Path(folder), family=family)


def decode_program(
    folder: Path, *overrides: str, layers: int = 2, prompts: list[list[int]] = PROMPTS, family: Family = QWEN3
) -> GeProgram:
    case = ascend_case(folder, "exe_mode=ge_graph", *overrides, family=family, num_hidden_layers=layers)
    runner = ascend_runner(case, folder)
    with ge_programs() as programs:
        generate(runner, prompts)
    (program,) = programs
    return program


def casts(program: GeProgram) -> list[tuple[str, torch.dtype]]:
    """(the type of the node before, the new type) of each cast of a tensor; casts of constants are folded by GE."""
    types = {node.name: node.type for node in program.nodes}
    conversions = [(types[node.inputs[0].partition(":")[0]], node.outputs[0].dtype) for node in program.of("Cast")]
    return [(source, dtype) for source, dtype in conversions if source not in ("Const", "Range", "Pack")]


AROUND = {"RmsNorm": 1, "MatMul": 1}  # the first norm, the head


def check(
    program: GeProgram,
    family: Family = QWEN3,
    layers: int = 2,
    fused: dict[str, int] | None = None,
    around: dict[str, int] = AROUND,
) -> None:
    """Checks that the decode step has the intended nodes, and that nothing is copied, cast or transposed, but that
    routers in float32 make their weights so."""
    count = program.count()
    copies = {"TensorMove", "Transpose", "TransposeD", "Identity", "TensorScatterUpdate"}
    assert not program.of(*(copies - OF_FAMILY[family].keys()))
    assert casts(program) == [("MoeGatingTopK", torch.bfloat16)] * layers * (family in (M2, GLM, V3, PROLOG))
    (logits,) = program.outputs()  # and no KV cache
    assert (logits.shape, logits.dtype) == ((4, 96), torch.bfloat16)
    for node in program.of("FusedInferAttentionScore"):
        (lengths,) = (value for value in program.inputs() if value.source == node.inputs[6])
        assert (lengths.shape, lengths.dtype) == ((4,), torch.int64)
        table = next(value for value in program.inputs() if value.source == node.inputs[14])
        assert (table.shape, table.dtype) == ((4, 1), torch.int32)
    of_layer = fused or OF_FAMILY[family]
    for name in {*of_layer, *around}:
        assert count[name] == of_layer.get(name, 0) * layers + around.get(name, 0), name


@pytest.mark.parametrize("family", thorough_but(OF_FAMILY, QWEN3), ids=str)
def test_a_decode_step_is_fused_and_copies_nothing(family: Family) -> None:
    check(two_layers(family), family)


@pytest.mark.thorough
def test_layers_attend_over_windows_in_turn() -> None:
    """One layer attends over a token and the seven before it, with sinks; the next attends over all before it."""
    program = two_layers(GPT_OSS)
    nodes, inputs = program.of("FusedInferAttentionScore"), {out.source: out for out in program.inputs()}
    windows = [[node.proto.attr[name].i for name in ("sparse_mode", "pre_tokens", "next_tokens")] for node in nodes]
    assert windows == [[4, 7, 0], [3, ALL_TOKENS, ALL_TOKENS]]
    for node in nodes:
        (sinks,) = (i for i, d in zip(node.inputs, node.proto.input_desc, strict=True) if d.name == "learnable_sink")
        assert (inputs[sinks].shape, inputs[sinks].dtype) == ((8,), torch.bfloat16)


@pytest.mark.thorough
def test_experts_in_a_super_kernel(tmp_path: Path) -> None:
    program = decode_program(tmp_path, "super_kernel=true")
    scopes: dict[str, list[str]] = {}
    for node in program.nodes:
        scope = node.proto.attr["_super_kernel_scope"].s.decode()
        if node.type in FUSED:
            scopes.setdefault(scope, []).append(node.type)
    kernels = ["MoeInitRoutingV3", "GroupedMatmul", "SwiGlu", "GroupedMatmul", "MoeFinalizeRoutingV2"]
    assert (scopes["experts1"], scopes["experts2"]) == (kernels, kernels)
    assert not set(kernels) & set(scopes[""])


@pytest.mark.thorough
def test_the_router_of_minimax_m2_is_in_float32() -> None:
    program = two_layers(M2)
    types = {out.source: out.dtype for node in program.nodes for out in node.outputs}
    for node in program.of("MoeGatingTopK"):
        assert [types[name] for name in node.inputs if name] == [torch.float32] * 2
        attributes = {name: node.proto.attr[name] for name in ("k", "k_group", "group_count", "norm_type", "renorm")}
        assert [value.i for value in attributes.values()] == [3, 1, 1, 1, 0]
        (product,) = (other for other in program.of("MatMul") if f"{other.name}:0" == node.inputs[0])
        assert product.outputs[0].dtype == torch.float32
    options = _backend._get_global_op_compile_config()
    assert options["ge.exec.allow_hf32"][1] == "0"  # of products; the first digit is of convolutions


@pytest.mark.thorough
def test_four_bit_experts(tmp_path: Path) -> None:
    program = decode_program(tmp_path, "method=q4")
    assert program.count()["WeightQuantBatchMatmulV2"] == 2 * 2  # qkv and o of two layers
    assert program.count()["GroupedMatmul"] == 2 * 2
    assert not program.of("TensorMove")


@pytest.mark.thorough
@pytest.mark.parametrize("family", [QWEN3, GLM], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_int8(tmp_path: Path, family: Family, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products of attention, and two of GLM's shared expert, each after a rounding of its rows, which the norm of
    the second layer does."""
    can = dataclasses.replace(ALL_ABILITIES, fused_swiglu=fused, rounding_norm=fused)
    monkeypatch.setattr(device, "installed", lambda _: can)
    plain = Counter(MatMul=3, MatMulV2=1) if family is GLM else Counter(MatMul=2)
    products, replaced = plain.total(), plain + Counter(GroupedMatmul=int(fused), SwiGlu=1)
    of_experts = {"GroupedMatmulSwigluQuantV2": 1} if fused else {"DequantSwigluQuant": 1}
    added = Counter(DynamicQuant=products, QuantBatchMatmulV3=products, **of_experts)
    norm = dict(AddRmsNorm=-1, DynamicQuant=-1, AddRmsNormDynamicQuant=1) if fused else {}
    program, of_layer = decode_program(tmp_path, family=in_int8(family)), Counter(OF_FAMILY[family]) - replaced + added
    check(program, family, fused=of_layer, around=AROUND | norm)


@pytest.mark.thorough
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


def test_options_that_reach_ge() -> None:
    options = two_layers(QWEN3).options
    assert options["frozen_parameter"] == "1"
    assert options["ge.tiling_schedule_optimize"] == "1"
    assert options["ge.topoSortingMode"] == "3"  # StableRDFS
    assert "0" not in options["frozenInput"].split(",")[4:11]  # a layer's weights and caches


REAL: Any = AscendOps.norm_rope_write


def narrow_places(self: AscendOps, *given: Any) -> Tensor:
    *others, slots, out = given
    return REAL(self, *others, slots.int(), out)


def test_cann_refuses_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ascend_runner(ascend_case(tmp_path, "exe_mode=ge_graph", "strict=true"), tmp_path)
    prefilled(runner)
    monkeypatch.setattr(AscendOps, "norm_rope_write", narrow_places)
    with ge_programs(), pytest.raises(RuntimeError, match=r"QkvRmsNormRopeCache: index is \(tokens\) int64"):
        runner.loop.step()


@pytest.mark.thorough
def test_torchairs_own_rotary_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for ops/ascend/lowering.py, which can be removed when this test fails."""
    monkeypatch.setattr(lowering.ROTARY, "_ge_converter", None)  # restored after the test
    importlib.reload(apply_rotary_pos_emb)  # registers torchair's again
    assert decode_program(tmp_path, family=M2).count()["TensorMove"] == 2 * 2

"""Gated DeltaNet on Ascend: numbers of its ops, in plain code under the real schemas, against the reference; kernels of
a layer, captured, eager and in a GE graph."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ascend import npu_on_cpu  # noqa: F401 (registers)
from tests.ascend.engine import CAPTURE_MODES, HYBRID, ascend_case, ascend_runner, generate, prefilled
from tests.ascend.ge import ge_programs
from tests.ascend.log import device_log
from umbra.executor.plan.activations import Ledger
from umbra.ops import reference
from umbra.ops.ascend.counted import KERNELS, AscendCosts
from umbra.ops.ascend.layout import AscendLayout
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.counted import CountedOps
from umbra.ops.interface import Recurrent

KERNEL = 4
UNIT = 48  # floats between places, less than a state
Sequence = tuple[int, int, int, int, int]  # rows, read, write, mark, marked


class Layer:
    """The states and the weights of a layer, and what its ops compute of them. `apart`: places do not overlap."""

    def __init__(
        self,
        ops: Any,
        heads: tuple[int, int],
        depth: int,
        width: int,
        apart: bool,
        places: int = 6,
        by_row: bool = False,
        lowest: float = 0.0,
    ):
        self.ops, (self.key_heads, self.heads), self.depth, self.width = ops, heads, depth, width
        self.decays, self.lowest = self.heads * (depth if by_row else 1), lowest
        self.channels = 2 * self.key_heads * depth + self.heads * width
        size = self.heads * depth * width
        every = size + (KERNEL - 1) * self.channels
        self.units = 1 if apart else -(-every // UNIT)
        if apart:
            self.states = torch.full((places, self.heads, depth, width), torch.nan)
            self.inputs = torch.full((places, KERNEL - 1, self.channels), torch.nan)
        else:
            arena = torch.full((places * self.units * UNIT,), torch.nan)
            units = (len(arena) - every) // UNIT + 1
            self.states = arena.as_strided((units, self.heads, depth, width), (UNIT, depth * width, width, 1))
            self.inputs = arena.as_strided((units, KERNEL - 1, self.channels), (UNIT, self.channels, 1), size)
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.randn(KERNEL, self.channels, generator=generator) / 2
        self.rates = torch.rand(self.heads, generator=generator).mul(4).add(0.01)
        self.dt_bias = torch.randn(self.decays, generator=generator) - 2

    def run(self, rows: Tensor, *sequences: Sequence) -> Tensor:
        """rows (T, channels + heads + decays): x, b and a side by side, as one product makes them"""
        lens, reads, writes, marks, marked = torch.tensor(sequences, dtype=torch.int32).unbind(1)
        starts = torch.cat((lens.new_zeros(1), lens.cumsum(0)))
        reads, writes, marked = (torch.where(x < 0, x, x * self.units).int() for x in (reads, writes, marked))
        at = Recurrent(starts.long(), reads, writes, marks, marked, torch.zeros_like(marks))
        x, b, a = rows.split([self.channels, self.heads, self.decays], 1)
        qkv = self.ops.causal_conv(x, self.weight, self.inputs, at)
        kept = (self.channels + self.heads * self.width) // 2 + self.decays + self.heads
        states = self.states, rows.new_empty(len(self.states), 0, kept), at, self.lowest
        out: Tensor = self.ops.gated_delta_rule(qkv, a, b, self.rates, self.dt_bias, *states)
        return out

    def kept(self, number: int) -> tuple[Tensor, Tensor]:
        """A place's state, in the reference's order, and inputs."""
        state = self.states[number * self.units]
        if self.ops is not reference:
            state = state.reshape(self.heads, self.width, self.depth).mT
        return state.clone(), self.inputs[number * self.units].clone()


STEPS: list[list[Sequence]] = [
    [(1, -1, 0, 0, 0), (0, 3, 3, 0, 0), (2, -1, 1, 0, 0)],
    [(1, 0, 0, 0, 0), (150, 1, 2, 70, 3), (64, 1, -1, 64, 4)],
    [(1, 2, 2, 1, 1), (1, -1, 5, 0, 0), (1, 4, 4, 0, 0)],
    [(3, 2, 2, 0, 0), (65, 3, 5, 1, 0), (130, -1, 4, 128, 3)],
]


@pytest.mark.parametrize(
    ("heads", "depth", "width", "apart", "decays"),
    [
        ((2, 6), 24, 48, True, {}),
        ((2, 6), 24, 48, False, {}),
        ((2, 4), 128, 128, True, {}),
        ((2, 4), 128, 128, False, {}),
        ((2, 6), 24, 48, True, {"by_row": True}),
        ((2, 2), 128, 128, False, {"by_row": True, "lowest": -5.0}),
    ],
)
def test_a_layer_is_the_reference(
    heads: tuple[int, int], depth: int, width: int, apart: bool, decays: dict[str, Any]
) -> None:
    torch.manual_seed(11)
    ops = AscendOps(torch.float32, torch.device("cpu"), "fusion_v2")
    ours, wanted = (Layer(o, heads, depth, width, apart, **decays) for o in (ops, reference))
    for step in STEPS:
        rows = torch.randn(sum(n for n, *_ in step) + 2, ours.channels + ours.heads + ours.decays)
        rows[-2:] = torch.nan  # padding
        torch.testing.assert_close(ours.run(rows, *step), wanted.run(rows, *step), atol=1e-5, rtol=1e-5)
    for number in range(6):
        for kept, expected in zip(ours.kept(number), wanted.kept(number), strict=True):
            torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_chunks_of_like_keys_are_exact() -> None:
    """Changes that hardly decay and keys that repeat: powers of what the rows of a chunk have to do with each other
    would be of 1e17."""
    torch.manual_seed(2)
    heads, width, rows = 2, 32, 200
    qkv = torch.randn(1, 2 * width + heads * width).expand(rows, -1)
    gates = torch.full((rows, heads), -20.0), torch.full((rows, heads), 8.0), torch.full((heads,), 0.01)
    at = Recurrent(torch.tensor([0, rows]), *(torch.tensor([n], dtype=torch.int32) for n in (-1, 0, 0, 0, 0)))
    ops, outs = AscendOps(torch.float32, torch.device("cpu"), "fusion_v2"), []
    for implementation in (ops, reference):
        states, drafts = torch.zeros(1, heads, width, width), torch.empty(1, 0, 3 * width + 2 * heads)
        given = qkv.clone(), *gates, torch.zeros(heads), states, drafts, at
        outs.append(implementation.gated_delta_rule(*given))
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gates(dtype: torch.dtype) -> None:
    ops = AscendOps(dtype, torch.device("cpu"), "fusion_v2")
    wide, x = (torch.randn(30, 2 * 3 * 40) * 20).to(dtype), torch.randn(30, 3, 40).to(dtype)
    gate, weight, exact = wide.split(120, 1)[1], torch.randn(40).to(dtype), dtype == torch.float32
    heads = gate.unflatten(1, (3, 40))
    expected = reference.gated_rms_norm(x, heads, weight, 1e-6)
    tolerance: Any = dict(atol=1e-5, rtol=1e-5 if exact else 2**-7)
    torch.testing.assert_close(ops.gated_rms_norm(x, heads, weight, 1e-6), expected, **tolerance)
    flat = x.flatten(1).clone()
    assert ops.sigmoid_mul(flat, gate) is flat
    torch.testing.assert_close(flat, reference.sigmoid_mul(x.flatten(1).clone(), gate), **tolerance)


def test_a_norm_with_a_float32_weight() -> None:
    """A weight of 1 + w stays in float32, because bfloat16 would round it."""
    ops = AscendOps(torch.bfloat16, torch.device("cpu"), "fusion_v2")
    x, residual = torch.randn(2, 5, 64).bfloat16()
    weight = 1 + torch.randn(64) / 500
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    exact = reference.rms_norm(total.float(), weight, 1e-6)
    assert torch.equal(normed, exact.bfloat16())
    assert not torch.equal(normed, reference.rms_norm(total.float(), weight.bfloat16().float(), 1e-6).bfloat16())


@pytest.mark.parametrize(
    ("lengths", "by_row"),
    [([512], False), ([64 * 80], False), ([1] * 8, False), ([40, 300], False), ([600], True), ([1] * 8, True)],
)
def test_a_plan_counts_what_is_alive(lengths: list[int], by_row: bool) -> None:
    rows, places = sum(lengths), torch.arange(len(lengths), dtype=torch.int32)
    starts, never = torch.tensor([0, *itertools.accumulate(lengths)]), torch.zeros_like(places)
    at = Recurrent(starts, places - len(lengths), places, never, never, never)

    def alive(ops: Any) -> list[int]:
        layer, ledger = Layer(ops, (4 if by_row else 2, 4), 128, 128, True, len(lengths), by_row), Ledger()
        x = torch.zeros(rows, layer.channels, dtype=torch.bfloat16)
        a, b = torch.zeros(rows, layer.decays), torch.zeros(rows, 4)
        of_layer = layer.rates, layer.dt_bias, layer.states, layer.states[:, 0, :0], at
        steps: list[Any] = [
            lambda _: ops.causal_conv(x, layer.weight, layer.inputs, at),
            lambda _: ops.gated_delta_rule(x, a, b, *of_layer),
        ]
        return [ledger.fullest(torch.nn.Identity(), step, Any).nbytes for step in steps]  # type: ignore[arg-type]

    real = alive(AscendOps(torch.bfloat16, torch.device("cpu"), "fusion_v2"))
    planned = alive(CountedOps(AscendLayout(torch.bfloat16), torch.bfloat16, 128, 8, AscendCosts))
    assert all(
        0.95 * real_bytes <= counted <= 1.6 * real_bytes for real_bytes, counted in zip(real, planned, strict=True)
    )


MIXER = [  # between the norm before and the projection back
    "MatmulWeightNz",
    "Mm",
    "IndexSelect",
    "InplaceCopy",
    "Cat",
    "Mul",
    "ReduceSum",
    "InplaceCopy",
    "ScatterNdUpdate",
    "Silu",
    "InplaceCopy",
    "IndexSelect",
    "InplaceCopy",
    "InplaceFillScalar",
    "RmsNorm",
    "InplaceCopy",
    "InplaceAdd",
    "Softplus",
    "Neg",
    "InplaceMul",
    "Muls",
    "InplaceCopy",
    "InplaceCopy",
    "InplaceSigmoid",
    "InplaceExp",
    "InplaceMul",
    "BatchMatMul",
    "InplaceSub",
    "InplaceMul",
    "InplaceAddcmul",
    "BatchMatMul",
    "ScatterNdUpdate",
    "IndexSelect",
    "InplaceMuls",
    "InplaceAdd",  # only of the last layer
    "InplaceCopy",
    "RmsNorm",
    "Cat",
    "SwiGlu",
]
ATTENTION = ["MatmulWeightNz", "RmsNorm", "RmsNorm", "RotaryPositionEmbeddingV2", "RotaryPositionEmbeddingV2"]
ATTENTION += ["ScatterNdUpdate", "ScatterNdUpdate", "FusedInferAttentionScoreV3", "InplaceSigmoid", "InplaceMul"]
NORM = ["InplaceAdd", "RmsNorm"]  # of sums, by a float32 weight
BLOCK = [
    "MatmulWeightNz",
    *NORM,
    "Mm",
    "MoeGatingTopK",
    "MoeInitRoutingV3",
    "GroupedMatmulWeightNz",
    "SwiGlu",
    "GroupedMatmulWeightNz",
    "MoeFinalizeRoutingV4",
    "MatmulWeightNz",
    "SwiGlu",
    "MatmulWeightNz",
    "Mm",
    "InplaceSigmoid",
    "InplaceAddcmul",
    *NORM,
]


@pytest.fixture
def forget_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.thorough
@pytest.mark.usefixtures("forget_compiled")
@pytest.mark.parametrize("mode", CAPTURE_MODES)
def test_kernels_of_a_captured_step(tmp_path: Path, mode: str) -> None:
    """Nothing is copied whole, and a replay is all that a step launches but copies of its inputs."""
    runner = ascend_runner(ascend_case(tmp_path, f"exe_mode={mode}", "strict=true", family=HYBRID), tmp_path)
    prefilled(runner)
    with device_log() as log:
        runner.loop.step()
    kernels = [line.split()[1].removeprefix("aclnn") for line in log.lines if line.startswith("captured acl")]
    ops = "causal_conv", "gated_delta_rule", "gated_rms_norm"
    assert sum(KERNELS[op] for op in ops) == len(MIXER) - 2 - 3
    assert kernels == ["Embedding"] * 3 + ["RmsNorm", *MIXER, *BLOCK, *ATTENTION, *BLOCK, "MatmulWeightNz"]
    with device_log() as log:
        runner.loop.step()
    replay = next(i for i, line in enumerate(log.lines) if line.startswith("replay graph"))
    assert all(line.startswith("memcpy async H2D") for line in log.lines[:replay])
    assert [line for line in log.kernels() if "Attention" not in line] == ["aclnnArgMax"]
    assert runner.engine.decode_step.compiles == 1


@pytest.mark.usefixtures("forget_compiled")
def test_a_ge_graph_writes_states_in_place(tmp_path: Path) -> None:
    runner = ascend_runner(ascend_case(tmp_path, "exe_mode=ge_graph", "strict=true", family=HYBRID), tmp_path)
    with ge_programs() as programs:
        generate(runner)
    (program,) = programs
    assert not program.of("TensorMove", "Assign", "TensorScatterUpdate")
    assert [(out.shape, out.dtype) for out in program.outputs()] == [((4, 96), torch.bfloat16)]
    count = program.count()
    wanted = {"ScatterNdUpdate": 2 + 2, "BatchMatMul": 2, "RotaryMul": 2, "RmsNorm": 1 + 2 + 2 * 2 + 2, "SwiGlu": 5}
    assert {name: count[name] for name in wanted} == wanted


def test_an_eager_step_reads_only_tokens_back(tmp_path: Path) -> None:
    """Also of prompts, whose rows are computed by chunks."""
    runner = ascend_runner(ascend_case(tmp_path, "exe_mode=eager", family=HYBRID), tmp_path)
    with device_log() as log:
        prefilled(runner)
        runner.loop.step()
    assert [line for line in log.lines if "D2H" in line] == ["memcpy D2H 24"] * 2
    assert log.kernels().count("aclnnScatterNdUpdate") == 2 * (2 + 2)

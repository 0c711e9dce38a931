"""Weights of eight bits by activations of eight bits: numbers of the plain ops under the real schemas, against float64
of the same integers."""

from dataclasses import replace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ascend import npu_on_cpu  # noqa: F401 (registers)
from tests.ascend.ranks import gloo_ranks, run_gloo_ranks
from umbra.ops.ascend.cann import ALL_ABILITIES, Abilities, abilities
from umbra.ops.ascend.exchange import AscendExchange
from umbra.ops.ascend.moe import ROUTINGS
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.ascend.slots import ArenaSlots
from umbra.ops.ascend.vector_core.blocks import PLACE, BlockLayout
from umbra.ops.ascend.weights import AscendExperts
from umbra.ops.formats import FORMATS, Format
from umbra.ops.formats.quantised import Quantised
from umbra.ops.interface import Matrix, Rounded

CPU, BF16 = torch.device("cpu"), torch.bfloat16
HIDDEN, INNER, EXPERTS, TOKENS, TOP_K = 128, 64, 6, 5, 3
W8A8 = Format("w8a8", group=32)
UNFUSED = replace(ALL_ABILITIES, fused_swiglu=False)


def int8(rows: int, columns: int) -> Quantised:
    levels = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    return Quantised(W8A8.spec, levels, torch.rand(rows, 1) / 500, None)


def rounded(x: Tensor) -> Tensor:
    """x (T, K) float64 as its int8 and scales have it."""
    scale = x.abs().amax(1, keepdim=True) / 127
    return (x / scale).round() * scale


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    return float((ours.double() - exact).norm() / exact.norm()) < 3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_linear(dtype: torch.dtype) -> None:
    ops = AscendOps(dtype, CPU, "fusion_v2")
    weight, part, bias = ops.matrix(48, HIDDEN, W8A8, CPU), int8(48, HIDDEN), torch.randn(48, dtype=dtype)
    weight.fill(0, part)
    x, levels = torch.randn(TOKENS, HIDDEN, dtype=dtype), part.floats().double()
    assert close(ops.linear(x, weight, bias), rounded(x.double()) @ levels.T + bias.double(), dtype)
    assert ops.linear(x[:0], weight, bias).shape == (0, 48)
    assert torch.equal(weight.data, (part.plain_levels ^ 128).view(torch.int8).T)
    assert weight.nbytes == 48 * HIDDEN + 48 * 4


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, HIDDEN)], ids=["", "biased"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_norm_rounds_its_rows_for_their_reader(dtype: torch.dtype, bias: Tensor | None) -> None:
    torch.manual_seed(0)
    ops, older = AscendOps(dtype, CPU, "fusion_v2"), AscendOps(dtype, CPU, "fusion_v2", can=abilities("8.5.0", False))
    weight, part = ops.matrix(48, HIDDEN, W8A8, CPU), int8(48, HIDDEN)
    weight.fill(0, part)
    norm = ops.rounding_norm(weight)
    assert norm
    assert older.rounding_norm(weight) is ops.rounding_norm(ops.matrix(48, HIDDEN, FORMATS["bfloat16"], CPU)) is None
    x, residual = torch.randn(2, TOKENS, HIDDEN, dtype=dtype)
    given = torch.rand(HIDDEN, dtype=dtype), 1e-5, None if bias is None else bias.to(dtype)
    rows, total = norm(x, residual, *given)
    assert isinstance(rows, Rounded)
    assert torch.equal(total, x + residual)
    exact = total.double() / (total.double().pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * given[0].double()
    exact = rounded(exact if given[2] is None else exact + given[2].double())
    assert close(rows.linear(cast(Matrix, weight), None), exact @ part.floats().double().T, dtype)
    assert isinstance(norm(x[:0], residual[:0], *given)[0], Tensor)


Expert = tuple[Quantised, Quantised, Quantised]  # gate, up, down


Rows = tuple[Tensor, Tensor, Tensor]  # x, weights, ids


def experts_and_rows(dtype: torch.dtype) -> tuple[list[Expert], Rows]:
    """Experts, and rows with weights and ids of theirs: always the same."""
    torch.manual_seed(0)
    parts = [(int8(INNER, HIDDEN), int8(INNER, HIDDEN), int8(HIDDEN, INNER)) for _ in range(EXPERTS)]
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    return parts, (torch.randn(TOKENS, HIDDEN, dtype=dtype), torch.rand(TOKENS, TOP_K, dtype=dtype), ids)


def bank(ops: AscendOps, experts: list[Expert], part: slice = slice(0, INNER)) -> AscendExperts:
    """Experts of which this rank has a part of the hidden columns."""
    filled = ops.expert_matrices(len(experts), part.stop - part.start, HIDDEN, W8A8, CPU)
    for number, (gate, up, down) in enumerate(experts):
        for which, whole in (("gate", gate), ("up", up)):
            filled.fill(number, which, replace(whole, levels=whole.plain_levels[part], scales=whole.scales[part]))
        filled.fill(number, "down", replace(down, levels=down.plain_levels[:, part]))
    return filled


def exact_sums(experts: list[Expert], x: Tensor, weights: Tensor, ids: Tensor, first: int) -> Tensor:
    """In float64, of the experts from `first` on."""
    exact = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            gate, up, down = (part.floats().double() for part in experts[expert])
            row = rounded(x[token : token + 1].double())
            hidden = torch.nn.functional.silu(row @ gate.T) * (row @ up.T)
            exact[token] += weight * (rounded(hidden) @ down.T)[0] * (expert >= first)
    return exact


@pytest.mark.parametrize(
    "can", [ALL_ABILITIES, UNFUSED, abilities("8.5.0", newer_ops=False)], ids=["", "unfused", "old"]
)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("first", [None, 2])
def test_experts(routing: str, can: Abilities, dtype: torch.dtype, first: int | None) -> None:
    experts, given = experts_and_rows(dtype)
    ops = AscendOps(dtype, CPU, routing, can=can)
    ours = ops.moe(*given, bank(ops, experts[first or 0 :]), first)
    assert close(ours, exact_sums(experts, *given, first or 0), dtype)


def on_two_ranks(rank: int, port: int) -> None:
    """Experts divided by expert, whose rows are gathered or exchanged, and divided along their hidden columns, which
    each rank rounds by scales of its own."""
    gloo_ranks(rank, port, 2)
    dist.init_process_group("gloo")
    ops, (experts, given) = AscendOps(BF16, CPU, "fusion_v2"), experts_and_rows(BF16)
    whole, half = ops.moe(*given, bank(ops, experts), None).double(), EXPERTS // 2
    mine, part = bank(ops, experts[rank * half :][:half]), slice(rank * INNER // 2, (rank + 1) * INNER // 2)
    split = bank(ops, experts, part)
    for sums, error in ((ops.moe(*given, mine, rank * half), 0.01), (ops.moe(*given, split, None), 0.02)):
        dist.all_reduce(sums)
        assert (sums.double() - whole).norm() < error * whole.norm()
    exchange = AscendExchange(ops, dist.new_group([0, 1]).group_name, rank, 2, EXPERTS, 8)
    rows = slice(2 * rank, 2 * rank + 2)
    x, weights, ids = (tensor[rows] for tensor in given)
    assert (exchange.mixture(x, weights, ids, mine).double() - whole[rows]).norm() < 0.01 * whole[rows].norm()
    dist.destroy_process_group()


def test_two_ranks_equal_one() -> None:
    run_gloo_ranks(on_two_ranks, 2)


@pytest.mark.parametrize("inner", [INNER, 96])  # scales of 512 bytes, and of 768, which end within a place
def test_experts_in_slots(inner: int) -> None:
    """Gathered, and so without tiles; the one that is not resident is of zeros."""
    ops, blocks = AscendOps(BF16, CPU, "fusion_v2"), BlockLayout.of(inner, HIDDEN, W8A8, BF16)
    filled = ops.expert_matrices(EXPERTS, inner, HIDDEN, W8A8, CPU)
    torch.manual_seed(0)
    for expert in range(EXPERTS):
        for which, shape in (("gate", (inner, HIDDEN)), ("up", (inner, HIDDEN)), ("down", (HIDDEN, inner))):
            filled.fill(expert, which, int8(*shape))
    memory = torch.zeros((EXPERTS + 1) * blocks.block_bytes, dtype=torch.uint8)
    slots = ArenaSlots(memory, EXPERTS * blocks.block_bytes, blocks, filled)
    places = [expert * blocks.block_bytes for expert in range(EXPERTS)]
    for expert, start in enumerate(places[1:], 1):
        views = blocks.views(memory[start:])
        planes = (filled.w13.data, filled.w13.scales, filled.w2.data, filled.w2.scales)
        for name, plane in zip(("w13", "s13", "w2", "s2"), planes, strict=True):
            assert plane is not None
            views[name].copy_(plane[expert])
    slots.prepare(EXPERTS)
    _, (x, weights, ids) = experts_and_rows(BF16)
    at = torch.tensor([slots.nowhere, *(start // PLACE for start in places[1:])], dtype=torch.int32)
    expected = ops.moe(x, torch.where(ids > 0, weights, 0), ids, filled, None)
    torch.testing.assert_close(ops.moe(x, weights, ids, slots.bank(at), None), expected, rtol=0.01, atol=0.01)

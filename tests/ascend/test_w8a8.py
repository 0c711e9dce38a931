"""Weights of eight bits by activations of eight bits: numbers of the plain ops under the real schemas, against float64
of the same integers."""

import dataclasses

import pytest
import torch
from torch import Tensor

from ops.ascend.cann import ALL_ABILITIES, Abilities, abilities
from ops.ascend.moe import ROUTINGS
from ops.ascend.ops import AscendOps
from ops.format import Format, Quantised
from tests.ascend import npu_on_cpu  # noqa: F401 (registers)

CPU, BF16 = torch.device("cpu"), torch.bfloat16
HIDDEN, INNER, EXPERTS, TOKENS, TOP_K = 128, 64, 6, 5, 3
W8A8 = Format("w8a8", group=32)
UNFUSED = dataclasses.replace(ALL_ABILITIES, fused_swiglu=False)


def int8(rows: int, columns: int) -> Quantised:
    levels = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    return Quantised(8, levels, torch.rand(rows, 1) / 500, None, int8_inputs=True)


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


def mixture(ops: AscendOps, dtype: torch.dtype, first: int | None) -> tuple[Tensor, Tensor]:
    """(ours, the exact sums) of experts of which the first `first` are on another rank."""
    torch.manual_seed(0)
    parts = [(int8(INNER, HIDDEN), int8(INNER, HIDDEN), int8(HIDDEN, INNER)) for _ in range(EXPERTS)]
    skipped = first or 0
    bank = ops.expert_matrices(EXPERTS - skipped, INNER, HIDDEN, W8A8, CPU)
    for expert, matrices in enumerate(parts[skipped:]):
        for which, part in zip(("gate", "up", "down"), matrices, strict=True):
            bank.fill(expert, which, part)
    x, weights = torch.randn(TOKENS, HIDDEN, dtype=dtype), torch.rand(TOKENS, TOP_K, dtype=dtype)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    exact = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            gate, up, down = (part.floats().double() for part in parts[expert])
            row = rounded(x[token : token + 1].double())
            hidden = torch.nn.functional.silu(row @ gate.T) * (row @ up.T)
            exact[token] += weight * (rounded(hidden) @ down.T)[0] * (expert >= skipped)
    return ops.moe(x, weights, ids, bank, first), exact


@pytest.mark.parametrize(
    "can", [ALL_ABILITIES, UNFUSED, abilities("8.5.0", newer_ops=False)], ids=["", "unfused", "old"]
)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("first", [None, 2])
def test_experts(routing: str, can: Abilities, dtype: torch.dtype, first: int | None) -> None:
    ours, exact = mixture(AscendOps(dtype, CPU, routing, can=can), dtype, first)
    assert close(ours, exact, dtype)

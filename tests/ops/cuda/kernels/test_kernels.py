"""Triton's kernels in its interpreter, on CPU tensors, against what the ops mean."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tests.ops.cuda.kernels.interpreter
from tests.ops.test_delta_net import Layer
from umbra.ops import reference
from umbra.ops.cuda import kernels
from umbra.ops.cuda.grouped import grouped
from umbra.ops.cuda.unpack import unpack
from umbra.ops.cuda.weights import BlockExperts
from umbra.ops.formats import Format
from umbra.ops.interface import SILU_EXPERTS, ExpertKind, Paged
from umbra.tools.gpu_check.blocks import FORMATS, random_blocks

assert tests.ops.cuda.kernels.interpreter
CLIPPED = ExpertKind(7.0, 1.7, True)


def compare(format: Format, x: Tensor, weights: Tensor, ids: Tensor) -> None:
    """Four experts from number 5 on, of which number 7 is not there, and the others may be of another rank."""
    inner, hidden = (32, 96) if format.group in (0, 32) else (format.group, format.group)
    kind = CLIPPED if format.kind in ("mxfp4", "bfloat16") else SILU_EXPERTS
    shape, blocks = random_blocks(4, inner, hidden, format, kind)
    experts = BlockExperts(4, inner, hidden, format, torch.device("cpu"), kind)
    experts.data.copy_(blocks)
    places = torch.where(torch.arange(4) == 2, -1, experts.places)
    x = x[:, :hidden].contiguous()
    sums = kernels.mixture(x, weights, ids, shape, blocks, places, 5)
    wanted = grouped(x, weights, torch.where(ids == 7, -1, ids), experts, 5, unpack)
    torch.testing.assert_close(sums, wanted, atol=3e-6 * float(wanted.abs().max()), rtol=0)
    assert sums.abs().max() > 0


@pytest.mark.parametrize("format", [format for format in FORMATS if not format.zeros], ids=str)
def test_a_row_of_an_expert_is_the_references(format: Format) -> None:
    torch.manual_seed(1)
    compare(format, torch.randn(1, 256), torch.rand(1, 1), torch.tensor([[6]]))


@pytest.mark.parametrize(
    "format", [pytest.param(f, marks=[] if f.kind == "float32" else pytest.mark.thorough) for f in FORMATS], ids=str
)
def test_mixtures_are_the_reference(format: Format) -> None:
    """Also with an expert of another rank, one that is not there, and one that no row has."""
    torch.manual_seed(1)
    compare(format, torch.randn(2, 256), torch.rand(2, 2), torch.tensor([[5, 7], [8, 11]]))


@pytest.mark.thorough
def test_eight_rows_share_experts() -> None:
    torch.manual_seed(2)
    shape, blocks = random_blocks(3, 32, 64, Format("q4", 32))
    experts = BlockExperts(3, 32, 64, Format("q4", 32), torch.device("cpu"), SILU_EXPERTS)
    experts.data.copy_(blocks)
    x, weights, ids = torch.randn(8, 64), torch.rand(8, 1), torch.tensor([[0], [1], [0], [2], [2], [2], [1], [0]])
    sums = kernels.mixture(x, weights, ids, shape, blocks, experts.places, 0)
    torch.testing.assert_close(sums, grouped(x, weights, ids, experts, 0, unpack), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "format",
    [pytest.param(f, marks=[] if f.kind in ("q4_k", "bfloat16") else pytest.mark.thorough) for f in FORMATS],
    ids=str,
)
def test_matrices_are_unpacked(format: Format) -> None:
    torch.manual_seed(7)
    inner, hidden = (32, 64) if format.group in (0, 32) else (format.group, format.group)
    shape, blocks = random_blocks(3, inner, hidden, format)
    starts = torch.tensor([2, 0]) * shape.block_bytes
    for name in shape.shapes:
        given = blocks, starts, shape, name, torch.float32
        torch.testing.assert_close(kernels.unpack(*given), unpack(*given), rtol=1e-6, atol=1e-6)


CASES: list[dict[str, Any]] = [
    dict(page=4, width=24, heads=(2, 6), starts=[0, 3, 4, 4, 9], lengths=[7, 1, 5, 21]),
    dict(page=4, width=16, heads=(1, 2), starts=[0, 1, 2, 3], lengths=[40, 1, 9], window=5, sinks=True),
    dict(page=64, width=64, heads=(2, 8), starts=[0, 1, 2], lengths=[1300, 530], window=600, sinks=True),
]


def cached(cache: Tensor, tables: Tensor, lengths: list[int]) -> Tensor:
    """`cache` (pages, page size, ...) of NaN with random numbers where the sequences have tokens."""
    for table, length in zip(tables, lengths, strict=True):
        for token in range(length):
            cache[table[token // cache.shape[1]], token % cache.shape[1]] = torch.randn(cache.shape[2:])
    return cache


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
def test_attention_is_the_reference(case: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    page, width, (kv_heads, heads), lengths = (case[name] for name in ("page", "width", "heads", "lengths"))
    pages = -(-max(lengths) // page) + 1
    tables = torch.randperm(len(lengths) * pages).view(len(lengths), pages)
    paged = Paged(torch.zeros(0), tables, torch.tensor(case["starts"]), torch.tensor(lengths))
    empty = torch.full((tables.numel(), page, kv_heads, width), torch.nan, dtype=dtype)
    k, v = (cached(empty.clone(), tables, lengths) for _ in range(2))
    q = torch.randn(case["starts"][-1], heads, width).to(dtype)
    sinks = torch.randn(heads) if case.get("sinks") else None
    given = q, k, v, paged, width**-0.5, case.get("window"), sinks
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(kernels.attention(*given), reference.attention(*given), atol=bound, rtol=bound)


@pytest.mark.parametrize("heads", [3, 40])
def test_attention_over_latents_is_the_reference(heads: int) -> None:
    torch.manual_seed(4)
    lengths, tables = [9, 30], torch.randperm(16).view(2, 8)
    cache = cached(torch.full((16, 4, 1, 40 + 8), torch.nan), tables, lengths)
    paged = Paged(torch.zeros(0), tables, torch.tensor([0, 3, 4]), torch.tensor(lengths))
    given = torch.randn(4, heads, 40), torch.randn(4, heads, 8), (cache,), paged, 0.2
    torch.testing.assert_close(kernels.latent_attention(*given), reference.latent_attention(*given))


@pytest.mark.parametrize(
    ("heads", "depth", "width", "decays"),
    [
        ((2, 4), 16, 16, {}),
        ((1, 2), 8, 16, {"by_row": True}),
        pytest.param((1, 3), 24, 48, {}, marks=pytest.mark.thorough),
        pytest.param((2, 2), 24, 16, {"by_row": True, "lowest": -5.0}, marks=pytest.mark.thorough),
    ],
)
def test_states_are_those_of_the_reference(
    heads: tuple[int, int], depth: int, width: int, decays: dict[str, Any]
) -> None:
    """Also where a step marks the place that it reads, keeps rows that may come to nothing, and takes some of them."""
    ours, wanted = (Layer(ops, heads, depth, width, **decays) for ops in (kernels, reference))
    steps: list[list[tuple[int, ...]]] = [
        [(5, -1, 0, 0, 0), (4, -1, 1, 2, 3), (0, 2, 2, 0, 0)],
        [(1, 0, 0, 0, 0), (2, 1, -1, 1, 1)],
        [(1, 0, 0, 0, 0), (1, 1, 1, 0, 0, 1), (1, 3, -1, 1, 4)],
    ]
    for step in steps:
        rows = ours.rows(sum(n for n, *_ in step) + 1)
        rows[-1] = torch.nan  # padding
        torch.testing.assert_close(ours.run(rows, *step), wanted.run(rows, *step), atol=1e-6, rtol=1e-5)
    assert torch.equal(ours.arena.isnan(), wanted.arena.isnan())
    torch.testing.assert_close(ours.arena.nan_to_num(), wanted.arena.nan_to_num(), atol=1e-6, rtol=1e-5)

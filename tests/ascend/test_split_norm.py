"""L2: RMS norms of vectors that are split over ranks, computed rank by rank in one process over the `npu::` schemas."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ops import reference
from ops.ascend.ops import AscendOps
from tests.ascend import npu_on_cpu  # noqa: F401 (registers)

CPU, EPS = torch.device("cpu"), 1e-6
TOKENS, DIM = 5, 128
BOTH = HEADS, KV_HEADS = 48, 8
Total = Callable[[Tensor], Tensor]


def vectors(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Queries and keys of all heads, each with a scale of its own, and their weights. The last token is zero."""
    torch.manual_seed(3)
    whole = []
    for heads in (HEADS, KV_HEADS):
        x = torch.randn(TOKENS, heads, DIM) * torch.linspace(0.1, 3, heads)[:, None] * torch.rand(TOKENS, 1, 1) * 4
        x[-1] = 0
        whole.append(x.flatten(1).to(dtype))
    return whole, [(1 + 0.3 * torch.randn(x.shape[1])).to(dtype) for x in whole]


def part(x: Tensor, heads: int, ranks: int, rank: int) -> Tensor:
    """The part of a rank, where ranks hold copies of a head if there are more ranks than heads."""
    shards = min(ranks, heads)
    return x.unflatten(-1, (shards, -1))[..., rank * shards // ranks, :]


def normalised(
    dtype: torch.dtype, ranks: int, scales: torch.dtype | None = None, heard: Total | None = None
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """(what the Ascend ops make, what the reference makes of the whole vectors in float32) of each rank's queries and
    keys. A first pass collects what the ranks would sum, `heard`, if given, changes it."""
    ops, (whole, weights) = AscendOps(dtype, CPU, "fusion_v2"), vectors(dtype)
    ops.scales_type = scales or ops.scales_type
    sums: list[Tensor] = []

    def one(rank: int, total: Total) -> tuple[Tensor, Tensor]:
        x, w = ([part(t, h, ranks, rank) for t, h in zip(ts, BOTH, strict=True)] for ts in (whole, weights))
        q, k = ops.split_rms_norm(x, w, [t.shape[1] * ranks for t in x], EPS, total)
        return q, k

    for rank in range(ranks):
        one(rank, lambda local: sums.append(local.clone()) or local)  # type: ignore[func-returns-value]
    for local in sums:  # once by each rank
        assert (local.shape, local.dtype, local.is_contiguous()) == ((2 * TOKENS,), torch.float32, True)
    assert len(sums) == ranks
    mine = [one(rank, heard or (lambda local: torch.stack(sums).sum(0))) for rank in range(ranks)]
    full = [reference.rms_norm(x.float(), w.float(), EPS) for x, w in zip(whole, weights, strict=True)]
    return mine, [(part(full[0], HEADS, ranks, r), part(full[1], KV_HEADS, ranks, r)) for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_parts_are_those_of_the_whole_norm(ranks: int) -> None:
    """Over sixteen ranks each KV head occurs twice."""
    for mine, expected in zip(*normalised(torch.float32, ranks), strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
        assert not any(x[-1].any() for x in mine)


def test_a_step_without_tokens() -> None:
    """A data-parallel group may have none."""
    ops = AscendOps(torch.float32, CPU, "fusion_v2")
    q, k = ops.split_rms_norm([torch.empty(0, 6), torch.empty(0, 4)], [torch.ones(6), torch.ones(4)], [12, 8], EPS, abs)
    assert (q.shape, k.shape) == ((0, 6), (0, 4))


def scale_error(mine: Tensor, expected: Tensor) -> float:
    """The error that a token's elements have in common, at most: that of its length."""
    common = (mine.float() * expected).sum(-1) / expected.square().sum(-1)
    return float((common[:-1] - 1).abs().max())  # without the token of zeros


def worst(dtype: torch.dtype, scales: torch.dtype | None = None) -> float:
    """Over two ranks, whose parts of a token's queries have 3072 elements: errors of their own cancel each other."""
    return max(scale_error(mine[0], expected[0]) for mine, expected in zip(*normalised(dtype, 2, scales), strict=True))


def test_elements_of_a_token_have_no_error_in_common() -> None:
    """A factor in bfloat16 is wrong by up to 2^-8, for all elements of a token alike."""
    found = worst(torch.bfloat16), worst(torch.bfloat16, torch.bfloat16)
    assert found[0] < 2**-11 < 2**-10 < found[1] < 2**-8
    assert worst(torch.float16) < 2**-11  # scales of float16 rows are float16

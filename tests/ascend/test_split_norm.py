"""L2: RMS norms of vectors that are split over ranks, computed rank by rank in one process over the `npu::` schemas."""

import pytest
import torch
from torch import Tensor

from tests.ascend import npu_on_cpu  # noqa: F401 (registers)
from umbra.ops import reference
from umbra.ops.ascend.ops import AscendOps

CPU, EPS, TOKENS, DIM = torch.device("cpu"), 1e-6, 5, 128
HEADS = 48, 8  # of queries and of keys
Parts = list[tuple[Tensor, Tensor]]


def part(x: Tensor, heads: int, ranks: int, rank: int) -> Tensor:
    """The part of a rank, where ranks hold copies of a head if there are more ranks than heads."""
    shards = min(ranks, heads)
    return x.unflatten(-1, (shards, -1))[..., rank * shards // ranks, :]


def normalised(dtype: torch.dtype, ranks: int, scales: torch.dtype | None = None) -> tuple[Parts, Parts]:
    """(what the Ascend ops make, what the reference makes of the whole vectors in float32) of each rank's queries and
    keys; each head has a scale of its own, and the last token is zero."""
    torch.manual_seed(3)
    ops, whole = AscendOps(dtype, CPU, "fusion_v2"), []
    ops.scales_type = scales or ops.scales_type
    for heads in HEADS:
        x = torch.randn(TOKENS, heads, DIM) * torch.linspace(0.1, 3, heads)[:, None] * torch.rand(TOKENS, 1, 1) * 4
        x[-1] = 0
        whole.append(x.flatten(1).to(dtype))
    weights = [(1 + 0.3 * torch.randn(x.shape[1])).to(dtype) for x in whole]
    sums: list[Tensor] = []

    def collected(local: Tensor) -> Tensor:
        assert (local.shape, local.dtype, local.is_contiguous()) == ((2 * TOKENS,), torch.float32, True)
        sums.append(local.clone())
        return local

    mine: Parts = []
    for total in (collected, lambda local: torch.stack(sums).sum(0)):
        mine = []
        for rank in range(ranks):
            parts, w = ([part(t, h, ranks, rank) for t, h in zip(ts, HEADS, strict=True)] for ts in (whole, weights))
            q, k = ops.split_rms_norm(parts, w, [t.shape[1] * ranks for t in parts], EPS, total)
            mine.append((q, k))
    assert len(sums) == ranks
    full = [reference.rms_norm(x.float(), w.float(), EPS) for x, w in zip(whole, weights, strict=True)]
    return mine, [(part(full[0], HEADS[0], ranks, r), part(full[1], HEADS[1], ranks, r)) for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 16])
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


def common_error(dtype: torch.dtype, scales: torch.dtype | None = None) -> float:
    """The error that a token's elements have in common, at most: that of its length. Over two ranks, whose parts of a
    token's queries have 3072 elements: errors of their own cancel each other."""
    pairs = zip(*normalised(dtype, 2, scales), strict=True)
    common = [(mine[0].float() * right[0]).sum(-1) / right[0].square().sum(-1) for mine, right in pairs]
    return max(float((one[:-1] - 1).abs().max()) for one in common)  # without the token of zeros


def test_elements_of_a_token_have_no_error_in_common() -> None:
    """A factor in bfloat16 is wrong by up to 2^-8, for all elements of a token alike."""
    assert common_error(torch.bfloat16) < 2**-11 < 2**-10 < common_error(torch.bfloat16, torch.bfloat16) < 2**-8

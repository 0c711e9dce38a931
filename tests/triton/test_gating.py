"""ops/triton/gating.py in Triton's interpreter beside ops/reference.py. Of equal scores the first must come first, and
torch.topk does not promise that: ids are held against a stable sort of the reference's scores."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ops import reference
from ops.triton import PROGRAMS, gating
from tests.triton.mutants import mutant

INF, NAN = float("inf"), float("nan")
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def first_of_the_largest(scores: Tensor, top_k: int) -> Tensor:
    return scores.sort(descending=True, stable=True).indices[:, :top_k].int()


def check_softmax(kernels: ModuleType, logits: Tensor, top_k: int, renormalise: bool) -> None:
    weights, ids = kernels.route_softmax(logits, top_k, renormalise)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert ids.tolist() == first_of_the_largest(logits.float().softmax(-1), top_k).tolist()
    torch.testing.assert_close(weights, reference.route_softmax(logits, top_k, renormalise)[0], rtol=1e-6, atol=1e-12)


def check_sigmoid(kernels: ModuleType, logits: Tensor, bias: Tensor | None, top_k: int, renormalise: bool) -> None:
    weights, ids = kernels.route_sigmoid(logits, bias, top_k, renormalise)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    scores = logits.float().sigmoid()
    expected = first_of_the_largest(scores if bias is None else scores + bias, top_k)
    assert ids.tolist() == expected.tolist()
    unbiased = scores.gather(-1, expected.long())  # the reference's weights, but for ties
    if renormalise:
        unbiased = unbiased / unbiased.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, unbiased, rtol=1e-6, atol=1e-12)


def spread(rows: int, experts: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Logits between -4 and 4 in any order, all of a row different where `dtype` can tell them apart."""
    torch.manual_seed(seed)
    return torch.stack([torch.randperm(experts) for _ in range(rows)]).mul(8 / experts).sub(4).to(dtype)


SIZES = [(1, 1, 1), (2, 2, 1), (3, 7, 7), (PROGRAMS + 3, 4, 2), (5, 60, 4), (1, 128, 8), (1, 256, 8), (1, 1000, 2)]


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "dtype"),
    [(*size, torch.float32) for size in SIZES] + [(3, 60, 4, dtype) for dtype in TYPES[1:]],
)
def test_beside_the_reference(rows: int, experts: int, top_k: int, dtype: torch.dtype, renormalise: bool) -> None:
    logits = spread(rows, experts, dtype)
    check_softmax(gating, logits, top_k, renormalise)
    check_sigmoid(gating, logits, None, top_k, renormalise)
    bias = torch.randn(experts)
    check_sigmoid(gating, logits, bias, top_k, renormalise)
    if len(logits.unique()) == experts:  # no ties: the reference itself
        for ours, its in zip(
            gating.route_sigmoid(logits, bias, top_k, renormalise),
            reference.route_sigmoid(logits, bias, top_k, renormalise),
            strict=True,
        ):
            torch.testing.assert_close(ours, its.to(ours.dtype), rtol=1e-6, atol=1e-12)


def test_1024_experts_and_the_bias_in_the_type_of_the_model() -> None:
    bias = torch.randn(1024).bfloat16()
    check_sigmoid(gating, spread(1, 1024, torch.float32), bias, 2, True)


# Each takes the module with the kernels, so that mutants can be given to it.
def ties(kernels: ModuleType) -> None:
    few = torch.randint(0, 3, (6, 12), generator=torch.Generator().manual_seed(1)).float()
    check_softmax(kernels, few, 5, False)
    check_sigmoid(kernels, few, None, 5, False)


def all_equal(kernels: ModuleType) -> None:
    same = torch.full((2, 6), 1.5)
    for weights, ids in (kernels.route_softmax(same, 4, True), kernels.route_sigmoid(same, None, 4, True)):
        assert ids.tolist() == [[0, 1, 2, 3]] * 2
        assert weights.tolist() == [[0.25] * 4] * 2


def minus_infinity(kernels: ModuleType) -> None:
    """Experts that are switched off are picked when nothing else is left, and no padding is, in a block of 8."""
    logits = torch.tensor([[-INF, 1.0, -INF, 2.0, -INF]])
    check_softmax(kernels, logits, 5, True)
    check_sigmoid(kernels, logits, None, 5, True)
    check_sigmoid(kernels, torch.ones(1, 5), torch.tensor([-INF, 0.5, -INF, -2.0, -INF]), 5, True)


def extremes(kernels: ModuleType) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 9990.0, 1e4], [-1e4, -1e4, -1e4, -1e4, -9995.0]])
    for dtype in TYPES:
        check_softmax(kernels, logits.to(dtype), 3, True)
        check_softmax(kernels, logits.to(dtype), 3, False)
        check_sigmoid(kernels, logits.to(dtype), torch.arange(5.0), 3, False)


def renormalised(kernels: ModuleType) -> None:
    logits = spread(3, 16, torch.float32)
    for weights, _ in (kernels.route_softmax(logits, 4, True), kernels.route_sigmoid(logits, None, 4, True)):
        torch.testing.assert_close(weights.sum(-1), torch.ones(3))


def biased(kernels: ModuleType) -> None:
    """The bias decides who is picked and adds nothing to the weights."""
    bias = torch.tensor([0.0, 0.0, 7.0, 0.0])
    weights, ids = kernels.route_sigmoid(torch.zeros(1, 4), bias, 2, False)
    assert ids.tolist() == [[2, 0]]
    assert weights.tolist() == [[0.5, 0.5]]


def strided(kernels: ModuleType) -> None:
    """Some columns of a wider tensor."""
    logits = spread(3, 24, torch.float32)[:, 5:17]
    check_softmax(kernels, logits, 3, False)
    check_sigmoid(kernels, logits, torch.zeros(12), 3, False)


def nan_is_the_largest(kernels: ModuleType) -> None:
    logits = torch.tensor([[0.0, NAN, 2.0, NAN, 1.0]])
    weights, ids = kernels.route_sigmoid(logits, None, 3, False)
    assert ids.tolist() == [[1, 3, 2]]
    assert weights.isnan().tolist() == [[True, True, False]]
    weights, ids = kernels.route_softmax(logits, 3, False)
    assert ids.tolist() == [[0, 1, 2]]  # one NaN makes all the probabilities NaN
    assert weights.isnan().all()


CASES: dict[str, Callable[[ModuleType], None]] = {
    case.__name__: case
    for case in (ties, all_equal, minus_infinity, extremes, renormalised, biased, strided, nan_is_the_largest)
}


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    CASES[case](gating)


LARGEST = 'tl.max(tl.where(order < BLOCK, scores, float("-inf")), axis=0)'


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        ("ties", "tl.min(tl.where(scores == best, order, BLOCK), axis=0)",
         "tl.max(tl.where((scores == best) & (order < BLOCK), order, -1), axis=0)"),
        ("all_equal", "order = tl.where(order == first, BLOCK, order)", "pass"),
        ("ties", LARGEST, 'tl.min(tl.where(order < BLOCK, scores, float("inf")), axis=0)'),
        ("minus_infinity", "order = tl.where(places < experts, places, BLOCK)", "order = places"),
        ("minus_infinity", LARGEST, "tl.max(tl.where(order < BLOCK, scores, 0.0), axis=0)"),
        ("extremes", "x - tl.max(x, axis=0)", "x"),
        ("renormalised", "chosen = chosen / tl.sum(chosen, axis=0)", "pass"),
        ("biased", "pick(scores, weights,", "pick(scores, scores,"),
        ("biased", "scores += tl.load", "scores -= tl.load"),
        ("strided", "row * stride", "row * experts"),
        ("nan_is_the_largest", "scores = tl.where(scores == scores, scores, float(\"inf\"))", "pass"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mutant_is_caught(case: str, old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        CASES[case](mutant(gating, old, new, tmp_path))


@pytest.mark.parametrize("seed", range(4))
def test_moving_the_experts_moves_the_ids(seed: int) -> None:
    logits = spread(3, 20, torch.float32, seed)
    order = torch.randperm(20)
    weights, ids = gating.route_softmax(logits, 5, False)
    moved_weights, moved = gating.route_softmax(logits[:, order].contiguous(), 5, False)
    assert order[moved.long()].tolist() == ids.tolist()
    torch.testing.assert_close(moved_weights, weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_ids_differ_and_weights_fall(seed: int) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(seed)).bfloat16() * 3
    for weights, ids in (gating.route_softmax(logits, 20, False), gating.route_sigmoid(logits, None, 20, False)):
        assert ids.sort().values.tolist() == [list(range(20))] * 3
        assert (weights.diff() <= 0).all()


def test_no_tokens() -> None:
    weights, ids = gating.route_softmax(torch.empty(0, 8), 2, True)
    assert (weights.shape, ids.shape) == ((0, 2), (0, 2))


@pytest.mark.parametrize(("experts", "top_k"), [(4, 5), (4, 0), (1025, 1)])
def test_sizes_that_are_refused(experts: int, top_k: int) -> None:
    with pytest.raises(ValueError, match=f"the top {top_k} of {experts} experts"):
        gating.route_softmax(torch.zeros(1, experts), top_k, False)


def test_layouts_that_are_refused() -> None:
    with pytest.raises(ValueError, match="side by side"):
        gating.route_softmax(torch.zeros(4, 2).T, 1, False)
    for bias in (torch.zeros(3), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match="must be 4 values side by side"):
            gating.route_sigmoid(torch.zeros(1, 4), bias, 1, False)

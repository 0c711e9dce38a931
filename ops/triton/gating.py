"""Which experts a token goes to, and with what weights: `route_softmax` and `route_sigmoid` of ops/interface.py.

A program takes a row of logits whole, (BLOCK) float32 with BLOCK >= E, and picks k times the largest score that is
left. Among equal scores the first expert wins. NaN counts as the largest, as in torch.topk, so that ids are always k
different experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.triton import PROGRAMS

MOST_EXPERTS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def pick(
    scores: tl.tensor,
    weights: tl.tensor,
    order: tl.tensor,
    weights_out: tl.tensor,
    ids_out: tl.tensor,
    row: int,
    top_k: int,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """The top k <= SLOTS of `scores` (BLOCK), weighted by `weights` (BLOCK). `order` (BLOCK) is an expert's own number,
    or BLOCK where there is none to pick: in the padding and, as we go, for those that are taken."""
    slots = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.float32)
    ids = tl.zeros((SLOTS,), tl.int32)
    scores = tl.where(scores == scores, scores, float("inf"))
    for i in range(top_k):
        best = tl.max(tl.where(order < BLOCK, scores, float("-inf")), axis=0)
        first = tl.min(tl.where(scores == best, order, BLOCK), axis=0)
        weight = tl.sum(tl.where(order == first, weights, 0.0), axis=0)
        chosen = tl.where(slots == i, weight, chosen)
        ids = tl.where(slots == i, first, ids)
        order = tl.where(order == first, BLOCK, order)
    if RENORMALISE:
        chosen = chosen / tl.sum(chosen, axis=0)
    tl.store(weights_out + row * top_k + slots, chosen, mask=slots < top_k)
    tl.store(ids_out + row * top_k + slots, ids, mask=slots < top_k)


@triton.jit  # type: ignore[untyped-decorator]
def softmax_kernel(
    logits: tl.tensor,
    weights_out: tl.tensor,
    ids_out: tl.tensor,
    rows: int,
    stride: int,
    experts: int,
    top_k: int,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    places = tl.arange(0, BLOCK)
    order = tl.where(places < experts, places, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(logits + row * stride + places, mask=places < experts, other=float("-inf")).to(tl.float32)
        powers = tl.exp(x - tl.max(x, axis=0))
        scores = powers / tl.sum(powers, axis=0)
        pick(scores, scores, order, weights_out, ids_out, row, top_k, RENORMALISE, BLOCK, SLOTS)


@triton.jit  # type: ignore[untyped-decorator]
def sigmoid_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    weights_out: tl.tensor,
    ids_out: tl.tensor,
    rows: int,
    stride: int,
    experts: int,
    top_k: int,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """`bias` may be None."""
    places = tl.arange(0, BLOCK)
    order = tl.where(places < experts, places, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(logits + row * stride + places, mask=places < experts, other=0.0).to(tl.float32)
        weights = tl.sigmoid(x)
        scores = weights
        if bias is not None:
            scores += tl.load(bias + places, mask=places < experts, other=0.0).to(tl.float32)
        pick(scores, weights, order, weights_out, ids_out, row, top_k, RENORMALISE, BLOCK, SLOTS)


def route_softmax(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Softmax over all experts (T, E), then the top k. -> weights (T, k) float32, ids (T, k) int32"""
    return _launch(softmax_kernel, logits, (), top_k, renormalise)


def route_sigmoid(logits: Tensor, bias: Tensor | None, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The top k of sigmoid(logits) + bias (E), weighted by the sigmoid alone. -> as route_softmax"""
    if bias is not None and (bias.shape != logits.shape[1:] or not bias.is_contiguous()):
        raise ValueError(f"routing: a bias of {tuple(bias.shape)}: must be {logits.shape[1]} values side by side")
    return _launch(sigmoid_kernel, logits, (bias,), top_k, renormalise)


def _launch(
    kernel: triton.JITFunction, logits: Tensor, bias: tuple[Tensor | None, ...], top_k: int, renormalise: bool
) -> tuple[Tensor, Tensor]:
    rows, experts = logits.shape
    if not 1 <= top_k <= experts <= MOST_EXPERTS:
        raise ValueError(f"routing: the top {top_k} of {experts} experts: at least 1, at most all, of {MOST_EXPERTS}")
    if logits.stride(1) != 1:
        raise ValueError("routing: a row of logits must stand side by side in memory")
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    if rows:  # a grid of no programs is an error on some devices
        kernel[(min(rows, PROGRAMS),)](
            logits, *bias, weights, ids, rows, logits.stride(0), experts, top_k, RENORMALISE=renormalise,
            BLOCK=triton.next_power_of_2(experts), SLOTS=triton.next_power_of_2(top_k),
        )  # fmt: skip
    return weights, ids

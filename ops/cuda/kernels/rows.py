"""The work on each row between the products of a decoder layer: norms, rotation, the choice of experts, activations.

A program computes one row, or one head of a row. As in ops/reference.py, all is computed in float32 and rounded to the
type of the rows where an op ends."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from umbra.ops import reference
from umbra.ops.interface import Groups, Heads

BLOCK = 1024  # elements of a program of `silu_mul`


@triton.jit
def _norm(
    x, residual, weight, bias, out, total, row_stride, head_stride, residual_stride, heads, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """out (rows, heads, WIDTH), and with ADDED total, the sum of `x` and `residual`, of which the norm is taken."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, PADDED)
    mask = i < WIDTH
    wide = tl.load(x + row * row_stride + head * head_stride + i, mask=mask, other=0).to(tl.float32)
    if ADDED:
        wide += tl.load(residual + row * residual_stride + i, mask=mask, other=0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + i, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps) * tl.load(weight + i, mask=mask, other=0).to(tl.float32)
    if BIASED:
        wide += tl.load(bias + i, mask=mask, other=0).to(tl.float32)
    tl.store(out + (row * heads + head) * WIDTH + i, wide.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    return _normed(x, None, weight, eps, bias)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if x.dtype != residual.dtype or x.ndim != 2:
        return reference.add_rms_norm(x, residual, weight, eps, bias)
    return _normed(x, residual, weight, eps, bias)


def _normed(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """-> the norm, and the sum of which it is taken"""
    width = x.shape[-1]
    if x.ndim > 3 or x.stride(-1) != 1:
        x = x.contiguous().view(-1, width)
    if residual is not None and residual.stride(-1) != 1:
        residual = residual.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    heads = x.shape[1] if x.ndim == 3 else 1
    if out.numel():
        added = x if residual is None else residual
        _norm[(x.shape[0] if x.ndim > 1 else 1, heads)](
            x, added, weight, weight if bias is None else bias, out, total, x.stride(0) if x.ndim > 1 else 0,
            x.stride(1) if x.ndim == 3 else 0, added.stride(0), heads, eps, WIDTH=width,
            PADDED=triton.next_power_of_2(width), ADDED=residual is not None, BIASED=bias is not None,
            num_warps=1 if width <= 256 else 4 if width <= 2048 else 8,
        )  # fmt: skip
    return out, total


@triton.jit
def _norm_rope_write(
    qkv, q_weight, k_weight, cos, sin, out, k_cache, v_cache, slots, q_heads, kv_heads, eps, row_stride,
    k_page, k_token, k_head, v_page, v_token, v_head, PAGE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One head of a row: of queries to `out` (rows, q_heads, 2 HALF), of keys and values to their caches."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, PADDED)
    mask = i < HALF
    at = qkv + row * row_stride + head * 2 * HALF + i
    first, second = tl.load(at, mask=mask, other=0), tl.load(at + HALF, mask=mask, other=0)
    slot = tl.load(slots + row).to(tl.int64)
    page, token = slot // PAGE, slot % PAGE
    if head >= q_heads + kv_heads:
        to = v_cache + page * v_page + token * v_token + (head - q_heads - kv_heads) * v_head + i
        tl.store(to, first.to(v_cache.dtype.element_ty), mask=mask)
        tl.store(to + HALF, second.to(v_cache.dtype.element_ty), mask=mask)
    else:
        a, b = first.to(tl.float32), second.to(tl.float32)
        factor = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / (2 * HALF) + eps)
        if head < q_heads:
            of_a, of_b = tl.load(q_weight + i, mask=mask, other=0), tl.load(q_weight + HALF + i, mask=mask, other=0)
        else:
            of_a, of_b = tl.load(k_weight + i, mask=mask, other=0), tl.load(k_weight + HALF + i, mask=mask, other=0)
        a = (a * factor * of_a.to(tl.float32)).to(first.dtype).to(tl.float32)
        b = (b * factor * of_b.to(tl.float32)).to(first.dtype).to(tl.float32)
        angles = row * 2 * HALF + i
        cos_a, cos_b = tl.load(cos + angles, mask=mask, other=0), tl.load(cos + angles + HALF, mask=mask, other=0)
        sin_a, sin_b = tl.load(sin + angles, mask=mask, other=0), tl.load(sin + angles + HALF, mask=mask, other=0)
        turned_a = (a * cos_a.to(tl.float32) - b * sin_a.to(tl.float32)).to(first.dtype)
        turned_b = (b * cos_b.to(tl.float32) + a * sin_b.to(tl.float32)).to(first.dtype)
        if head < q_heads:
            to = out + (row * q_heads + head) * 2 * HALF + i
            tl.store(to, turned_a, mask=mask)
            tl.store(to + HALF, turned_b, mask=mask)
        else:
            to = k_cache + page * k_page + token * k_token + (head - q_heads) * k_head + i
            tl.store(to, turned_a.to(k_cache.dtype.element_ty), mask=mask)
            tl.store(to + HALF, turned_b.to(k_cache.dtype.element_ty), mask=mask)


def norm_rope_write(
    qkv: Tensor, heads: Heads, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, out: Tensor | None
) -> Tensor:
    dim, kv = len(heads.q_weight), heads.kv_heads
    q_heads = qkv.shape[1] // dim - 2 * kv
    q = torch.empty(len(qkv), q_heads, dim, dtype=qkv.dtype, device=qkv.device)
    if len(qkv):
        _norm_rope_write[(len(qkv), q_heads + 2 * kv)](
            qkv, heads.q_weight, heads.k_weight, heads.cos.contiguous(), heads.sin.contiguous(), q, k_cache, v_cache,
            slot_mapping, q_heads, kv, heads.eps, qkv.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
            PAGE=k_cache.shape[1], HALF=dim // 2, PADDED=triton.next_power_of_2(dim // 2), num_warps=1,
        )  # fmt: skip
    return q


@triton.jit
def _route(
    logits, bias, weights, ids, row_stride, scale, EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """The largest of a row in turn, of equal ones the first."""
    row = tl.program_id(0).to(tl.int64)
    i, k = tl.arange(0, PADDED), tl.arange(0, PADDED_K)
    free = i < EXPERTS
    logit = tl.load(logits + row * row_stride + i, mask=free, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-logit))
        ordered = scores
        if BIASED:
            ordered += tl.load(bias + i, mask=free, other=0).to(tl.float32)
    else:
        parts = tl.exp(logit - tl.max(logit))
        scores = parts / tl.sum(parts)
        ordered = logit
    chosen, of_chosen = tl.zeros((PADDED_K,), tl.int32), tl.zeros((PADDED_K,), tl.float32)
    for number in tl.static_range(TOP_K):
        largest = tl.max(tl.where(free, ordered, float("-inf")))
        expert = tl.minimum(tl.min(tl.where(free & (ordered == largest), i, EXPERTS)), EXPERTS - 1)
        score = tl.sum(tl.where(i == expert, scores, 0.0))
        chosen = tl.where(k == number, expert, chosen)
        of_chosen = tl.where(k == number, score, of_chosen)
        free = free & (i != expert)
    if RENORMALISE:
        of_chosen = of_chosen / tl.sum(of_chosen)
    tl.store(weights + row * TOP_K + k, of_chosen * scale, mask=k < TOP_K)
    tl.store(ids + row * TOP_K + k, chosen.to(tl.int64), mask=k < TOP_K)


def route_softmax(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    scale: float = 1.0,
    groups: Groups | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if groups:
        return reference.route_softmax(logits, top_k, renormalise, scale, groups, factors)
    weights, ids = _routed(logits, None, top_k, renormalise, scale, False)
    return weights if factors is None else weights * factors[ids], ids


def route_sigmoid(
    logits: Tensor, bias: Tensor | None, top_k: int, renormalise: bool, scale: float = 1.0, groups: Groups | None = None
) -> tuple[Tensor, Tensor]:
    if groups:
        return reference.route_sigmoid(logits, bias, top_k, renormalise, scale, groups)
    return _routed(logits, bias, top_k, renormalise, scale, True)


def _routed(
    logits: Tensor, bias: Tensor | None, top_k: int, renormalise: bool, scale: float, sigmoid: bool
) -> tuple[Tensor, Tensor]:
    rows, experts = logits.shape
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    if rows:
        _route[(rows,)](
            logits, logits if bias is None else bias, weights, ids, logits.stride(0), scale, EXPERTS=experts,
            PADDED=triton.next_power_of_2(experts), TOP_K=top_k, PADDED_K=triton.next_power_of_2(top_k),
            SIGMOID=sigmoid, BIASED=bias is not None, RENORMALISE=renormalise, num_warps=1 if experts <= 256 else 4,
        )  # fmt: skip
    return weights, ids


@triton.jit
def _silu_mul(x, out, width, row_stride, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    gate = tl.load(x + row * row_stride + i, mask=mask, other=0).to(tl.float32)
    up = tl.load(x + row * row_stride + width + i, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * width + i, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)


def silu_mul(x: Tensor) -> Tensor:
    if x.ndim != 2 or x.stride(1) != 1:
        return reference.silu_mul(x)
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if out.numel():
        _silu_mul[(rows, triton.cdiv(width, BLOCK))](x, out, width, x.stride(0), BLOCK=BLOCK, num_warps=4)
    return out

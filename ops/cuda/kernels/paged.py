"""Attention over pages: a program takes one row, the query heads that share a KV head, and one span of its keys.

Its result is a weighted mean of the span's values with the largest score and the sum of weights, which a second kernel
joins over all spans: exp(score - largest) is taken in float32, products by the type of the cache with float32 sums.
A row sees the keys up to its own, or the last `window` of these; spans outside of them add nothing. The last of the
keys and all spans' number follow from tables on the device and from the width of the block tables, so a captured
launch fits every length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from umbra.ops.interface import LatentCache, Paged

KEYS = 32  # keys at a time
SPANS = 64, 128, 256, 512  # keys of a program
PROGRAMS = 200  # that keep a GPU busy
AT_ONCE = 16  # spans whose means are loaded together
LEAST = 16  # rows and columns that a product of tiles takes
MOST_LATENT_HEADS = 32  # heads of a program over latents, whose keys it reads once for all of them


@triton.jit
def _attend(
    q, rotated, k_cache, v_cache, tables, starts, lengths, means, peaks, weights, scale, sequences, heads, group,
    table_width, q_row, q_head, r_row, r_head, k_page, k_token, k_head, v_page, v_token, v_head,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr, PADDED_ROTARY: tl.constexpr,
    OUT: tl.constexpr, PADDED_OUT: tl.constexpr, HEADS: tl.constexpr, SEQUENCES: tl.constexpr, SPAN: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, LATENTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Heads of a program: those from program_id(1) * group on, at most HEADS of them. means (spans, T, heads, OUT)
    float32, peaks and weights (spans, T, heads). WIDE: products are of float32."""
    TYPE: tl.constexpr = tl.float32 if WIDE else k_cache.dtype.element_ty
    row, shared, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    numbers = tl.arange(0, SEQUENCES)
    firsts = tl.load(starts + numbers, mask=numbers < sequences, other=2147483647)
    s = tl.sum((firsts <= row).to(tl.int32)) - 1
    position = tl.load(lengths + s) - tl.load(starts + s + 1) + row
    begin, end = span * SPAN, tl.minimum(span * SPAN + SPAN, position + 1)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(position + 1 - WINDOW, 0)
        begin = tl.maximum(begin, lowest // KEYS * KEYS)
    n, d, o = tl.arange(0, KEYS), tl.arange(0, PADDED), tl.arange(0, PADDED_OUT)
    h = tl.arange(0, HEADS)
    head = shared * group + h
    mine = (h < group) & (head < heads)
    kv = tl.where(LATENTS, 0, shared)
    query = tl.load(
        q + row * q_row + head[:, None] * q_head + d[None, :], mask=mine[:, None] & (d < WIDTH)[None, :], other=0
    ).to(TYPE)
    if ROTARY > 0:
        turn = tl.arange(0, PADDED_ROTARY)
        turned = tl.load(
            rotated + row * r_row + head[:, None] * r_head + turn[None, :],
            mask=mine[:, None] & (turn < ROTARY)[None, :], other=0,
        ).to(TYPE)  # fmt: skip
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    mean = tl.zeros((HEADS, PADDED_OUT), tl.float32)
    for first in range(begin, end, KEYS):
        key = first + n
        seen = (key < end) & (key >= lowest)
        page = tl.load(tables + s * table_width + key // PAGE, mask=seen, other=0).to(tl.int64)
        token = page * k_page + key % PAGE * k_token + kv * k_head
        keys = tl.load(k_cache + token[:, None] + d[None, :], mask=seen[:, None] & (d < WIDTH)[None, :], other=0).to(
            TYPE
        )
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if ROTARY > 0:
            of_rotary = tl.load(
                k_cache + token[:, None] + WIDTH + turn[None, :], mask=seen[:, None] & (turn < ROTARY)[None, :], other=0
            ).to(TYPE)
            scores += tl.dot(turned, tl.trans(of_rotary), input_precision="ieee")
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        new = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        factor, parts = tl.exp(peak - safe), tl.exp(scores - safe[:, None])
        weight = weight * factor + tl.sum(parts, 1)
        if LATENTS:
            values = keys
        else:
            token = page * v_page + key % PAGE * v_token + kv * v_head
            values = tl.load(
                v_cache + token[:, None] + o[None, :], mask=seen[:, None] & (o < OUT)[None, :], other=0
            ).to(TYPE)
        mean = mean * factor[:, None] + tl.dot(parts.to(TYPE), values, input_precision="ieee")
        peak = new
    at = (span * tl.num_programs(0) + row) * heads + head
    tl.store(peaks + at, peak, mask=mine)
    tl.store(weights + at, weight, mask=mine)
    kept = (mine & (begin < end))[:, None] & (o < OUT)[None, :]
    tl.store(means + at[:, None].to(tl.int64) * OUT + o[None, :], mean, mask=kept)


@triton.jit
def _join(
    means, peaks, weights, sinks, out, spans, OUT: tl.constexpr, PADDED_OUT: tl.constexpr, SINKS: tl.constexpr,
    SPANS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """out (T, heads, OUT): one head of one row. Spans without keys that the row sees have no means."""
    row, head = tl.program_id(0), tl.program_id(1)
    rows, heads = tl.num_programs(0), tl.num_programs(1)
    o, n, some = tl.arange(0, PADDED_OUT), tl.arange(0, SPANS), tl.arange(0, AT_ONCE)
    at = (n * rows + row) * heads + head
    peak = tl.load(peaks + at, mask=n < spans, other=float("-inf"))
    top = tl.max(peak)
    if SINKS:
        top = tl.maximum(top, tl.load(sinks + head).to(tl.float32))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.load(weights + at, mask=n < spans, other=0) * tl.exp(peak - top))
    if SINKS:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - top)
    mean = tl.zeros((PADDED_OUT,), tl.float32)
    for first in range(0, spans, AT_ONCE):
        span = first + some
        means_at = (span * rows + row) * heads + head
        factor = tl.exp(tl.load(peaks + means_at, mask=span < spans, other=float("-inf")) - top)
        mask = (factor > 0)[:, None] & (o < OUT)[None, :]
        part = tl.load(means + means_at[:, None].to(tl.int64) * OUT + o[None, :], mask=mask, other=0)
        mean += tl.sum(part * factor[:, None], 0)
    mean = mean / tl.where(total > 0, total, 1.0)
    tl.store(out + (row * heads + head) * OUT + o, mean.to(out.dtype.element_ty), mask=o < OUT)


def span_of(programs: int, tokens: int, latents: bool) -> int:
    """The keys of a program: the most with which there are enough programs. `programs` take the same keys, of `tokens`
    at most. The means of latents are large, so shorter spans of them would cost more than they bring."""
    least = SPANS[1 if latents else 0]
    return max(least, *(span for span in SPANS if programs * triton.cdiv(tokens, span) >= PROGRAMS), 0)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    paged: Paged,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    return _attention(q, None, k_cache, v_cache, paged, scale, window or 0, sinks)


def latent_attention(q: Tensor, q_rotary: Tensor, cache: LatentCache, paged: Paged, scale: float) -> Tensor:
    return _attention(q, q_rotary, cache[0], cache[0], paged, scale, 0, None)


def _attention(
    q: Tensor,
    rotated: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    paged: Paged,
    scale: float,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    rows, heads, width = q.shape
    page, kv_heads = k_cache.shape[1:3]
    latents = rotated is not None
    out_width = width if latents else v_cache.shape[3]
    group = min(heads, MOST_LATENT_HEADS) if latents else heads // kv_heads
    _, tables, starts, lengths = paged
    if not (isinstance(starts, Tensor) and isinstance(lengths, Tensor)):
        raise TypeError("lengths must be tensors, as `paging` makes them")
    out = q.new_empty(rows, heads, out_width)
    if not rows:
        return out
    span = span_of(rows * triton.cdiv(heads, group), tables.shape[1] * page, latents)
    spans = triton.cdiv(tables.shape[1] * page, span)
    means = torch.empty(spans, rows, heads, out_width, dtype=torch.float32, device=q.device)
    peaks, weights = (torch.empty(spans, rows, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    turned = q if rotated is None else rotated
    rotary = 0 if rotated is None else rotated.shape[2]
    padded_out = max(LEAST, triton.next_power_of_2(out_width))
    _attend[(rows, triton.cdiv(heads, group), spans)](
        q, turned, k_cache, v_cache, tables, starts, lengths, means, peaks, weights, scale, len(lengths), heads, group,
        tables.stride(0), q.stride(0), q.stride(1), turned.stride(0), turned.stride(1), *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        PAGE=page, WIDTH=width, PADDED=max(LEAST, triton.next_power_of_2(width)), ROTARY=rotary,
        PADDED_ROTARY=max(LEAST, triton.next_power_of_2(max(rotary, 1))), OUT=out_width, PADDED_OUT=padded_out,
        HEADS=max(LEAST, triton.next_power_of_2(group)), SEQUENCES=triton.next_power_of_2(len(lengths)), SPAN=span,
        KEYS=KEYS, WINDOW=window, LATENTS=latents,
        WIDE=k_cache.dtype == torch.float32 or k_cache.device.type == "cpu",  # Triton's interpreter has no others
        num_warps=8 if padded_out > 256 else 4,  # means stay in registers
    )  # fmt: skip
    _join[(rows, heads)](
        means, peaks, weights, out if sinks is None else sinks, out, spans,
        OUT=out_width, PADDED_OUT=padded_out, SINKS=sinks is not None, SPANS=triton.next_power_of_2(spans),
        AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return out

"""The CPU platform's ops: thin wrappers that pass addresses to the native module (csrc/). Activations are float32.

Calls into the native module are positional here: keywords cost half a microsecond more in each, a tenth of a small op.
"""

import functools
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops import composed, reference
from umbra.ops.cpu import ngrams, recurrent, selected, streams
from umbra.ops.cpu.engine import TYPES, native, pointer, strided
from umbra.ops.cpu.layout import cache_shape, latent_shape
from umbra.ops.cpu.matrix import NativeExperts, NativeHeads, NativeMatrix, NativeStack
from umbra.ops.cpu.matrix import fill_table as fill_table
from umbra.ops.cpu.memory import table as table
from umbra.ops.cpu.memory import zeros
from umbra.ops.cpu.paged import INT, tables_of, write_tokens
from umbra.ops.interface import Groups, Heads, LatentCache, LatentNorm, Paged
from umbra.ops.sampling import Choice

vector_type, paging, rounding_norm = reference.vector_type, reference.paging, reference.rounding_norm
latent_prolog = reference.latent_prolog
matrix = NativeMatrix
stack = NativeStack
expert_matrices = NativeExperts
head_matrices = NativeHeads
latent_parts, keys_in_pairs, heads_in_q8, selects = 1, False, True, True
ALL_EXPERTS = Groups(1, 1, 1)
P = ParamSpec("P")
R = TypeVar("R")


def traced(op: Callable[P, R]) -> Callable[P, R]:
    """Gives the op its name in a profiler's trace. Without a profiler this costs a tenth of a microsecond."""

    @functools.wraps(op)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._autograd._profiler_enabled():
            return op(*args, **kwargs)
        with torch.profiler.record_function(f"umbra::{op.__name__}"):
            return op(*args, **kwargs)

    return call


@traced
def embedding(ids: Tensor, table: Tensor | NativeMatrix, first_id: int | None) -> Tensor:
    if isinstance(table, NativeMatrix):
        out = torch.empty(len(ids), table.columns)
        native.embedding_of(
            table.packed.handle, pointer(ids, INT), pointer(out), len(ids), table.rows, table.columns, first_id or 0
        )
        return out
    out = torch.empty(len(ids), table.shape[1])
    rows, hidden = table.shape
    native.embedding(
        pointer(ids, INT),
        pointer(table, table.dtype),
        pointer(out),
        len(ids),
        rows,
        hidden,
        first_id or 0,
        TYPES[table.dtype],
    )
    return out


@traced
def linear(x: Tensor, weight: NativeMatrix | NativeStack, bias: Tensor | None) -> Tensor:
    out = torch.empty(len(x), weight.rows)
    scratch = torch.empty(native.linear_scratch(len(x), weight.columns) if weight.quantised else 64, dtype=torch.uint8)
    row = 0
    for part in weight.parts:
        native.linear(
            part.packed.handle,
            pointer(x),
            pointer(bias) + 4 * row if bias is not None else 0,
            pointer(out) + 4 * row,
            pointer(scratch, torch.uint8),
            len(x),
            part.rows,
            weight.rows,
        )
        row += part.rows
    return out


@traced
def head_linear(x: Tensor, weights: NativeHeads) -> Tensor:
    tokens, heads, columns = x.shape
    out = torch.empty(tokens, heads, weights.rows)
    scratch = torch.empty(native.head_linear_scratch(tokens * heads, columns), dtype=torch.uint8)
    native.head_linear(
        weights.packed.handle,
        strided(x),
        pointer(out),
        pointer(scratch, torch.uint8),
        tokens,
        heads,
        weights.rows,
        x.stride(0),
    )
    return out


@traced
def rms_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    return _norm(x, None, weight, eps, bias)[0]


@traced
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _norm(x, residual, weight, eps, bias)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = x if x.dim() == 3 else x[:, None]  # (T, heads, width), tokens at any stride
    tokens, heads, width = rows.shape
    out = torch.empty(x.shape)
    total = out if residual is None else torch.empty(x.shape)
    native.rms_norm(
        strided(rows),
        pointer(residual),
        pointer(weight),
        pointer(bias),
        pointer(out),
        0 if residual is None else pointer(total),
        tokens,
        heads,
        width,
        rows.stride(0),
        eps,
    )
    return out, total


@traced
def split_rms_norm(
    parts: Sequence[Tensor],
    weights: Sequence[Tensor],
    counts: Sequence[int],
    eps: float,
    total: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    squares, outs = torch.empty(len(parts), len(parts[0])), [torch.empty(x.shape) for x in parts]
    for x, row in zip(parts, squares.unbind(), strict=True):
        native.square_sums(strided(x[:, None]), pointer(row), len(x), x.shape[1], x.stride(0))
    total(squares)
    for x, row, weight, out, count in zip(parts, squares.unbind(), weights, outs, counts, strict=True):
        native.scale_by_squares(
            strided(x[:, None]),
            pointer(row),
            pointer(weight),
            pointer(out),
            len(x),
            x.shape[1],
            x.stride(0),
            count,
            eps,
        )
    return outs


@traced
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, of_queries: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    return _rotate(q, *(of_queries or (cos, sin))), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    tokens, heads, width = x.shape
    native.rope(strided(x), pointer(cos), pointer(sin), pointer(out), tokens, heads, width, x.stride(0))
    return out


def kv_cache(pages: int, page_size: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if width > native.most_width:
        raise UserError(f"head_dim: {width} is above {native.most_width}, the widest head of the cpu's attention")
    if width % 2 or page_size % 2:
        raise UserError(f"head_dim: {width}, page_size: {page_size}: the cpu keeps keys and values in pairs")
    return zeros(cache_shape(pages, page_size, kv_heads, width, dtype), dtype)


@traced
def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    write_tokens(native.write_kv, k, v, k_cache, v_cache, slot_mapping, k_cache.shape[3])


def norm_rope_write(
    qkv: Tensor, heads: Heads, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, out: Tensor | None
) -> Tensor:
    own: Any = sys.modules[__name__]
    return composed.norm_rope_write(own, qkv, heads, k_cache, v_cache, slot_mapping)


@traced
def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    paged: Paged,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    block_tables, query_starts, kv_lens = tables_of(paged)
    out = torch.empty(q.shape)
    tokens, heads, width = q.shape
    _, kv_heads, _, page_size = k_cache.shape
    dtype = k_cache.dtype
    native.attention(
        pointer(q),
        pointer(k_cache, dtype),
        pointer(v_cache, dtype),
        pointer(block_tables, INT),
        pointer(query_starts, INT),
        pointer(kv_lens, INT),
        pointer(out),
        len(kv_lens),
        heads,
        kv_heads,
        width,
        page_size,
        block_tables.shape[1],
        tokens,
        scale,
        TYPES[dtype],
        window or 0,
        pointer(sinks),
    )
    return out


def latent_cache(
    part: int, pages: int, page_size: int, width: int, rotary: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if width > native.most_latent or rotary > native.most_rotary:
        raise UserError(
            f"kv_lora_rank: {width}, qk_rope_head_dim: {rotary}: the cpu's attention takes latents of at most "
            f"{native.most_latent} and {native.most_rotary} columns"
        )
    if width % 2 or rotary % 2:
        raise UserError(f"kv_lora_rank: {width}, qk_rope_head_dim: {rotary}: the cpu keeps latents in pairs")
    return zeros(latent_shape(pages, page_size, width, rotary, dtype), dtype)


@traced
def write_latents(latents: Tensor, keys: Tensor, cache: LatentCache, slot_mapping: Tensor) -> None:
    tokens, width = latents.shape
    (rows,) = cache
    native.write_latents(
        strided(latents[:, None]),
        strided(keys[:, None]),
        pointer(rows, rows.dtype),
        pointer(slot_mapping, INT),
        tokens,
        width,
        keys.shape[1],
        rows.shape[2],
        latents.stride(0),
        keys.stride(0),
        TYPES[rows.dtype],
    )


def rope_write_latents(q: Tensor, rows: Tensor, norm: LatentNorm, cache: LatentCache, slot_mapping: Tensor) -> Tensor:
    own: Any = sys.modules[__name__]
    return composed.rope_write_latents(own, q, rows, norm, cache, slot_mapping)


@traced
def latent_attention(q: Tensor, q_rotary: Tensor, cache: LatentCache, paged: Paged, scale: float) -> Tensor:
    block_tables, query_starts, kv_lens = tables_of(paged)
    (rows,) = cache
    out = torch.empty(q.shape)
    tokens, heads, width = q.shape
    native.latent_attention(
        pointer(q),
        pointer(q_rotary),
        pointer(rows, rows.dtype),
        pointer(block_tables, INT),
        pointer(query_starts, INT),
        pointer(kv_lens, INT),
        pointer(out),
        len(kv_lens),
        heads,
        width,
        q_rotary.shape[2],
        rows.shape[2],
        block_tables.shape[1],
        tokens,
        scale,
        TYPES[rows.dtype],
    )
    return out


@traced
def expanded_attention(
    q: Tensor, q_rotary: Tensor, cache: LatentCache, keys: NativeHeads, values: NativeHeads, paged: Paged, scale: float
) -> Tensor:
    tokens, heads, key = q.shape
    (rows,), width, value = cache, keys.rows, values.rows
    if max(key, value) > native.most_width:
        raise UserError(
            f"qk_nope_head_dim: {key}, v_head_dim: {value}: the cpu's attention takes heads of at most "
            f"{native.most_width} columns"
        )
    block_tables, query_starts, kv_lens = tables_of(paged)
    out, peaks = torch.empty(tokens, heads, value), torch.empty(tokens, heads, 2)
    op = native.ExpandedAttention(
        keys.packed.handle,
        values.packed.handle,
        strided(q),
        pointer(q_rotary),
        pointer(rows, rows.dtype),
        pointer(block_tables, INT),
        pointer(query_starts, INT),
        pointer(kv_lens, INT),
        pointer(out),
        pointer(peaks),
        len(kv_lens),
        heads,
        width,
        q_rotary.shape[2],
        key,
        value,
        rows.shape[2],
        block_tables.shape[1],
        tokens,
        q.stride(0),
        scale,
        TYPES[rows.dtype],
    )
    memory = torch.empty(op.memory_bytes, dtype=torch.uint8)
    native.expanded_attention(op, pointer(memory, torch.uint8))
    return out


@traced
def silu_mul(x: Tensor) -> Tensor:
    tokens, both = x.shape
    out = torch.empty(tokens, both // 2)
    native.silu_mul(pointer(x), pointer(out), tokens, both // 2)
    return out


@traced
def gelu_mul(x: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = x.chunk(2, -1) if up is None else (x, up)
    tokens, width = gate.shape
    out = torch.empty(tokens, width)
    rows = (strided(gate[:, None]), strided(up[:, None]), pointer(out))
    native.gelu_mul(*rows, tokens, width, gate.stride(0), up.stride(0))
    return out


@traced
def softcap(x: Tensor, cap: float) -> Tensor:
    native.softcap(pointer(x), x.numel(), cap)
    return x


@traced
def scale_by(x: Tensor, factor: Tensor) -> Tensor:
    native.scale_by(pointer(x), pointer(factor), x.numel())
    return x


@traced
def add_gated(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    native.add_gated(pointer(x), pointer(y), pointer(gate), *x.shape)
    return x


@traced
def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    tokens, width = x.shape
    native.sigmoid_mul(pointer(x), strided(gate[:, None]), tokens, width, gate.stride(0))
    return x


@traced
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
    out = torch.empty(x.shape)
    tokens, heads, width = x.shape
    native.gated_rms_norm(
        pointer(x), strided(gate), pointer(weight), pointer(out), tokens, heads, width, gate.stride(0), eps, sigmoid
    )
    return out


causal_conv, gated_delta_rule = traced(recurrent.causal_conv), traced(recurrent.gated_delta_rule)
row_cache, norm_rotate, write_rows = selected.row_cache, traced(selected.norm_rotate), traced(selected.write_rows)
write_index, choose_blocks = traced(selected.write_index), traced(selected.choose_blocks)
selected_attention = traced(selected.selected_attention)
ngram_rows, agreeing_values = traced(ngrams.ngram_rows), traced(ngrams.agreeing_values)
spread, stream_norm, scaled_silu = traced(streams.spread), traced(streams.stream_norm), traced(streams.scaled_silu)
gated_read, gated_write = traced(streams.gated_read), traced(streams.gated_write)
sinkhorn_read, sinkhorn_write = traced(streams.sinkhorn_read), traced(streams.sinkhorn_write)


@traced
def route_softmax(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    scale: float = 1.0,
    groups: Groups | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _route(logits, None, top_k, False, renormalise, scale, groups, factors)


@traced
def route_sigmoid(
    logits: Tensor, bias: Tensor | None, top_k: int, renormalise: bool, scale: float = 1.0, groups: Groups | None = None
) -> tuple[Tensor, Tensor]:
    return _route(logits, bias, top_k, True, renormalise, scale, groups)


def _route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    renormalise: bool,
    scale: float,
    groups: Groups | None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    groups = groups or ALL_EXPERTS
    if groups.number > native.most_groups:
        raise UserError(f"n_group: {groups.number} is above {native.most_groups}, the most groups of the cpu's routing")
    tokens, experts = logits.shape
    weights, ids, scratch = (
        torch.empty(tokens, top_k),
        torch.empty(tokens, top_k, dtype=INT),
        torch.empty(tokens, experts),
    )
    native.route(
        pointer(logits),
        pointer(bias),
        pointer(weights),
        pointer(ids, INT),
        pointer(scratch),
        tokens,
        experts,
        top_k,
        sigmoid,
        renormalise,
        scale,
        *groups,
        pointer(factors),
    )
    return weights, ids


@traced
def argmax(x: Tensor) -> Tensor:
    rows, width = x.shape
    out, best = torch.empty(rows, dtype=INT), torch.empty(rows, native.argmax_chunks(width), dtype=torch.int32)
    native.argmax(pointer(x), pointer(out, INT), pointer(best, torch.int32), rows, width)
    return out


@traced
def sample(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    rows, width = logits.shape
    out, scratch = torch.empty(rows, dtype=INT), torch.empty(native.sample_scratch(width))
    biases = {row: _bias(choice) for row, choice in enumerate(choices) if choice.settings.logit_bias}
    packed = b"".join([_packed(choice, *biases.get(row, NO_BIAS)) for row, choice in enumerate(choices)])
    native.sample(pointer(logits), packed, pointer(out, INT), pointer(scratch), rows, width)
    return out


CHOICE = struct.Struct("6d10q")  # `Choice` in csrc/kernels/ops.h
LARGEST = (1 << 63) - 1
NO_BIAS: "tuple[array[int], array[float]]" = (array("q"), array("d"))


def _bias(choice: Choice) -> "tuple[array[int], array[float]]":
    return array("q", choice.settings.logit_bias), array("d", choice.settings.logit_bias.values())


def _packed(choice: Choice, tokens: "array[int]", biases: "array[float]") -> bytes:
    settings, allowed = choice.settings, choice.allowed
    return CHOICE.pack(
        settings.temperature,
        settings.top_p,
        settings.min_p,
        settings.presence_penalty,
        settings.frequency_penalty,
        settings.repetition_penalty,
        min(settings.top_k or 0, LARGEST),
        choice.seed,
        choice.ids.buffer_info()[0],
        choice.prompt,
        choice.position,
        tokens.buffer_info()[0],
        biases.buffer_info()[0],
        len(tokens),
        0 if allowed is None else np.frombuffer(allowed, np.uint8).ctypes.data,
        len(allowed or b""),
    )


@traced
def moe(x: Tensor, weights: Tensor, ids: Tensor, experts: NativeExperts, first_expert: int | None) -> Tensor:
    tokens, top_k = ids.shape
    out = torch.empty(tokens, experts.hidden)
    sizes = tokens, top_k, experts.count
    scratch = torch.empty(native.moe_scratch(*sizes, experts.hidden, experts.inner), dtype=torch.uint8)
    native.moe(
        experts.w13.handle,
        experts.w2.handle,
        pointer(x),
        pointer(weights),
        pointer(ids, INT),
        pointer(out),
        pointer(scratch, torch.uint8),
        *sizes,
        first_expert or 0,
        experts.hidden,
        experts.inner,
        experts.kind.limit,
        experts.kind.alpha,
        experts.kind.gelu,
        0,
    )
    return out

"""Attention over chosen blocks of tokens, computed by csrc/kernels/selected.cpp, and the index that they are chosen by;
selected.h says how caches lie."""

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops import selected
from umbra.ops.cpu.engine import TYPES, native, pointer, strided
from umbra.ops.cpu.memory import zeros
from umbra.ops.cpu.paged import INT, tables_of, write_tokens
from umbra.ops.interface import Paged, Pooling


def row_cache(pages: int, rows: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if width > native.most_width:
        raise UserError(f"head_dim: {width} is above {native.most_width}, the widest head of the cpu's attention")
    shape = selected.row_cache(0, rows, heads, width, dtype, device).shape[1:]
    return zeros((pages, *shape), dtype)


def norm_rotate(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, heads, width = x.shape
    out = torch.empty(x.shape)
    native.norm_rotate(
        strided(x),
        pointer(weight),
        strided(cos[:, None]),
        strided(sin[:, None]),
        pointer(out),
        tokens,
        heads,
        width,
        x.stride(0),
        cos.stride(0),
        eps,
    )
    return out


def write_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    write_tokens(native.write_rows, k, v, k_cache, v_cache, slot_mapping, k_cache.shape[2])


def write_index(keys: Tensor, pooling: Pooling, cache: Tensor, slot_mapping: Tensor) -> None:
    tokens, width = keys.shape
    native.write_index(
        strided(keys[:, None]),
        pointer(pooling.weight),
        strided(pooling.cos[:, None]),
        strided(pooling.sin[:, None]),
        pointer(pooling.back_cos),
        pointer(pooling.back_sin),
        pointer(cache, cache.dtype),
        pointer(slot_mapping, INT),
        tokens,
        width,
        _page_size(cache, pooling.ratio),
        pooling.ratio,
        keys.stride(0),
        pooling.cos.stride(0),
        pooling.eps,
        TYPES[cache.dtype],
    )


def _page_size(cache: Tensor, ratio: int) -> int:
    return cache.shape[2] * ratio // (ratio + 1)


def choose_blocks(q: Tensor, weights: Tensor | None, cache: Tensor, paged: Paged, ratio: int, top: int) -> Tensor:
    block_tables, query_starts, kv_lens = tables_of(paged)
    (tokens, heads, width), (sequences, most_pages) = q.shape, block_tables.shape
    size = _page_size(cache, ratio)
    together = min(tokens, native.blocks_together), most_pages * (size // ratio)
    out, scores = torch.empty(tokens, top, dtype=torch.int32), torch.empty(*together)
    order = torch.empty(*together, dtype=torch.int32)
    native.choose_blocks(
        pointer(q),
        pointer(weights),
        pointer(cache, cache.dtype),
        pointer(block_tables, INT),
        pointer(query_starts, INT),
        pointer(kv_lens, INT),
        pointer(out, torch.int32),
        pointer(scores),
        pointer(order, torch.int32),
        tokens,
        sequences,
        heads,
        width,
        size,
        ratio,
        top,
        most_pages,
        TYPES[cache.dtype],
    )
    return out


def selected_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, paged: Paged, blocks: Tensor, ratio: int, scale: float
) -> Tensor:
    if ratio > native.most_block:
        raise UserError(f"indexer_compress_ratio: {ratio} is above {native.most_block}, the longest block of the cpu's")
    block_tables, query_starts, kv_lens = tables_of(paged)
    (tokens, heads, width), (_, kv_heads, size, _), dtype = q.shape, k_cache.shape, k_cache.dtype
    out = torch.empty(q.shape)
    native.selected_attention(
        pointer(q),
        pointer(k_cache, dtype),
        pointer(v_cache, dtype),
        pointer(block_tables, INT),
        pointer(query_starts, INT),
        pointer(kv_lens, INT),
        pointer(blocks, torch.int32),
        pointer(out),
        tokens,
        len(block_tables),
        heads,
        kv_heads,
        width,
        size,
        ratio,
        blocks.shape[1],
        block_tables.shape[1],
        scale,
        TYPES[dtype],
    )
    return out

"""The meaning of attention over chosen blocks of tokens, and of the index that they are chosen by, as reference.py has
that of other ops.

Tokens of a sequence are in blocks of `ratio`, from its first token on. A query sees those blocks whose last token is
not behind it, of which some are chosen, and behind them always the tokens up to its own that fill no block. A block's
key never changes, so results do not depend on how a prompt is cut.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops.interface import Paged, Pooling


def row_cache(pages: int, rows: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.int8:
        raise UserError("cache_config.kv_dtype: int8: attention over chosen blocks of tokens keeps keys in floats")
    return torch.zeros(pages, heads, rows, width, dtype=dtype, device=device)


def norm_rotate(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    wide, half = x.float(), x.shape[-1] // 2
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return _rotated(normed, cos[:, None, :half].float(), sin[:, None, :half].float()).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def write_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    size = k_cache.shape[2]
    for rows, cache in ((k, k_cache), (v, v_cache)):
        cache[slot_mapping // size, :, slot_mapping % size] = rows.to(cache.dtype)


def write_index(keys: Tensor, pooling: Pooling, cache: Tensor, slot_mapping: Tensor) -> None:
    ratio, width = pooling.ratio, keys.shape[1]
    size, half = _page_size(cache, ratio), width // 2
    pages, offsets = slot_mapping // size, slot_mapping % size
    cache[pages, 0, offsets] = keys.to(cache.dtype)
    last = offsets % ratio == ratio - 1
    pages, offsets = pages[last], offsets[last]
    block = cache[pages[:, None], 0, offsets[:, None] - torch.arange(ratio - 1, -1, -1, device=keys.device)]
    pooled = block.float().mean(1).to(cache.dtype).float()
    normed = pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + pooling.eps) * pooling.weight.float()
    cos, sin, back_cos, back_sin = (
        angles[..., :half].float()
        for angles in (pooling.cos[last], pooling.sin[last], pooling.back_cos, pooling.back_sin)
    )
    turned = _rotated(normed, cos * back_cos + sin * back_sin, sin * back_cos - cos * back_sin)
    cache[pages, 0, size + offsets // ratio] = turned.to(cache.dtype)


def _page_size(cache: Tensor, ratio: int) -> int:
    """The tokens of a page of an index, which has a row for each and one for each block."""
    return cache.shape[2] * ratio // (ratio + 1)


def _queries(paged: Paged) -> Iterator[tuple[int, int, int]]:
    """The row, the sequence and the visible tokens of each query."""
    starts, lengths = (torch.as_tensor(x).tolist() for x in (paged.query_starts, paged.kv_lens))
    for sequence, length in enumerate(lengths):
        for row in range(starts[sequence], starts[sequence + 1]):
            yield row, sequence, length - starts[sequence + 1] + row + 1


def choose_blocks(q: Tensor, weights: Tensor | None, cache: Tensor, paged: Paged, ratio: int, top: int) -> Tensor:
    size = _page_size(cache, ratio)
    out = torch.full((len(q), top), -1, dtype=torch.int32, device=q.device)
    for row, sequence, seen in _queries(paged):
        complete = seen // ratio
        pages = paged.block_tables[sequence, : -(-complete * ratio // size)]
        keys = cache[pages, 0, size:].flatten(0, 1)[:complete].float()
        scores = F.relu(q[row].float() @ keys.T)
        total = scores.sum(0) if weights is None else weights[row].float() @ scores
        # Unlike topk, a stable sort puts the first of equal ones first.
        chosen = total.sort(descending=True, stable=True).indices[:top].sort().values
        out[row, : len(chosen)] = chosen.to(torch.int32)
    return out


def selected_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, paged: Paged, blocks: Tensor, ratio: int, scale: float
) -> Tensor:
    heads, size = k_cache.shape[1:3]
    out, group = torch.zeros(q.shape, dtype=q.dtype, device=q.device), q.shape[1] // heads
    for row, sequence, seen in _queries(paged):
        chosen = blocks[row][blocks[row] >= 0].long()
        inside = (chosen[:, None] * ratio + torch.arange(ratio, device=q.device)).flatten()
        at = torch.cat((inside, torch.arange(seen // ratio * ratio, seen, device=q.device)))
        pages = paged.block_tables[sequence, at // size]
        k, v = (cache[pages, :, at % size].float().repeat_interleave(group, 1) for cache in (k_cache, v_cache))
        scores = torch.einsum("hd,khd->hk", q[row].float(), k) * scale
        out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v).to(q.dtype)
    return out

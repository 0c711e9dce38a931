"""Attention over the paged KV cache."""

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layers.base import Layer, Piece
from umbra.models.layers.linear import MergedLinear, RowLinear, Source, grouped
from umbra.models.layers.norm import RMSNorm
from umbra.models.layers.rotary import RotaryTable, head_order
from umbra.models.rope import RopeConfig
from umbra.ops.interface import Heads, Rows, fixed
from umbra.ops.parallel.groups import Shard


def kv_shard(attn_tp: Shard, kv_heads: int) -> Shard:
    """The part of the KV heads that a rank of `attn_tp` holds. If there are more ranks than KV heads, neighbouring
    ranks hold copies of the same head."""
    size = min(attn_tp.size, kv_heads)
    return Shard(attn_tp.rank * size // attn_tp.size, size)


class PagedCache(nn.Module):
    """A layer that keeps something of every token in pages: `tensors` caches, as `new_cache` makes them, whose pages
    have the same numbers. The engine makes them, for layers of all sets whose `sizes` are the same, and passes them to
    `bind`."""

    tensors: int
    sizes: tuple[int, int]
    window: int | None  # tokens, up to itself, that a token sees; None: all
    layers: int  # number of the set of layers that this one is in, whose pages `Batch.paged` has
    aside = False  # whether its caches lie apart from those of the other layers, whatever sizes these have

    def new_cache(self, part: int, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        raise NotImplementedError

    def bind(self, *caches: nn.Parameter, layers: int = 0) -> None:
        raise NotImplementedError

    @property
    def caches(self) -> tuple[Tensor, ...]:
        raise NotImplementedError


class PagedAttention(PagedCache):
    """Attention over the paged KV cache, of all tokens before a token or of the last `window` ones. `scale` is that of
    the scores, by default the root of 1 / head_dim."""

    tensors = 2
    k_cache: Tensor  # ops.kv_cache(...)
    v_cache: Tensor

    def __init__(
        self,
        build: Build,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        self.ops, self.heads, self.head_dim = build.ops, heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.kv_heads, self.sizes, self.window = kv_heads, (kv_heads, head_dim), window

    def new_cache(self, part: int, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.ops.kv_cache(pages, page_size, *self.sizes, dtype, device)

    def bind(self, *caches: nn.Parameter, layers: int = 0) -> None:
        (self.k_cache, self.v_cache), self.layers = caches, layers

    @property
    def caches(self) -> tuple[Tensor, ...]:
        return self.k_cache, self.v_cache

    def keep_queries(self, rows: int) -> None:
        """Makes the place of the queries of steps of `rows` tokens: a graph has kernels that write into a tensor, and
        such a tensor has to be one of its inputs."""
        if not hasattr(self, name := f"queries_{rows}"):  # of a step of another kind
            self.register_parameter(name, fixed(self.k_cache.new_empty(rows, self.heads * self.head_dim)))

    def normed(self, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        """Attention of queries and keys whose heads are first normalised and rotated.
        qkv (T, (heads + 2 kv_heads) D) has queries, keys and values side by side. -> (T, heads * D)"""
        heads = Heads(self.kv_heads, q_norm.eps, q_norm.weight, k_norm.weight, cos, sin)
        out = getattr(self, f"queries_{len(qkv)}", None)
        slot_mapping = batch.paged[self.layers].slot_mapping
        q = self.ops.norm_rope_write(qkv, heads, self.k_cache, self.v_cache, slot_mapping, out)
        return self.attend(q, batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, sinks: Tensor | None = None) -> Tensor:
        """q (T, heads, D), k and v (T, kv_heads, D); sinks (heads), as of `Ops.attention`. -> (T, heads * D)"""
        self.ops.write_kv(k, v, self.k_cache, self.v_cache, batch.paged[self.layers].slot_mapping)
        return self.attend(q, batch, sinks)

    def attend(self, q: Tensor, batch: Batch, sinks: Tensor | None = None) -> Tensor:
        """Attention over what has been written. q (T, heads, D) -> (T, heads * D)"""
        paged = batch.paged[self.layers]
        return self.ops.attention(q, self.k_cache, self.v_cache, paged, self.scale, self.window, sinks).flatten(1)


class CacheReader(nn.Module):
    """Attention over what another layer keeps of tokens."""

    def __init__(self, source: PagedAttention):
        super().__init__()
        self.sources = (source,)  # which is no module of this one

    def forward(self, q: Tensor, batch: Batch) -> Tensor:
        """q (T, heads, D) -> (T, heads * D)"""
        return self.sources[0].attend(q, batch)


class Sinks(Layer):
    """A number for each head. The checkpoint tensor has the name of this layer's path."""

    def __init__(self, build: Build, heads: int):
        super().__init__()
        self.heads, self.part = heads, build.parallel.attn_tp.part(heads)
        self.values = build.vector(self.part.stop - self.part.start)
        self.elements, self.nbytes = len(self.values), self.values.nbytes

    def pieces(self, path: str) -> Iterator[Piece]:
        yield Piece(path, (self.heads,), (self.part,), self.values.copy_)


class AttentionConfig(Protocol):
    """The part of a family's config that grouped-query attention reads."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def rope(self) -> RopeConfig: ...


class GroupedAttention(nn.Module):
    """Grouped-query attention with rotary embedding of a whole head or of its first columns. `bias`: of the projections
    to queries, keys and values; `out_bias`: of that back; `normed`: each head of queries and keys has a norm. With
    `window` a token sees so many tokens up to itself; with `sinks` each head has a score that takes part in the softmax
    and no value; if `gated`, the rows of a gate of its result follow its rows of the projection to queries. `inputs` is
    the width of what it projects, if that is not the hidden size."""

    def __init__(
        self,
        config: AttentionConfig,
        build: Build,
        bias: bool,
        out_bias: bool,
        normed: bool,
        window: int | None = None,
        sinks: bool = False,
        gated: bool = False,
        inputs: int = 0,
    ):
        super().__init__()
        dim, tp, hidden = config.head_dim, build.parallel.attn_tp, config.hidden_size
        q_rows, kv_rows = config.num_attention_heads * dim, config.num_key_value_heads * dim
        kv_part = kv_shard(tp, config.num_key_value_heads).part(kv_rows)
        order = head_order(config.rope, dim)
        q_part, heads = tp.part(q_rows), config.num_attention_heads
        queries, *gates = grouped("q_proj", [(q_rows, q_part)] * (1 + gated), heads if gated else 1)
        sources = [
            *(dataclasses.replace(source, order=order) for source in queries),
            Source("k_proj", kv_rows, kv_part, order),
            Source("v_proj", kv_rows, kv_part),
        ]
        self.ops, self.head_dim = build.ops, dim
        self.sizes = [part.stop - part.start for part in (q_part, kv_part, kv_part)]
        self.qkv_proj = MergedLinear(build, inputs or hidden, [*sources, *(s for of in gates for s in of)], bias)
        if normed:
            self.q_norm = RMSNorm(build, dim, config.rms_norm_eps, order)
            self.k_norm = RMSNorm(build, dim, config.rms_norm_eps, order)
        self.normed, self.gated = normed, gated
        self.query_rotary: RotaryTable | None = None  # set by a model whose queries grow with their position
        self.attention = PagedAttention(build, self.sizes[0] // dim, self.sizes[1] // dim, dim, window)
        self.sinks = Sinks(build, heads) if sinks else None
        self.o_proj = RowLinear(build, "o_proj", q_rows, hidden, out_bias)

    def forward(self, x: Rows, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv_proj(x, batch)
        if not self.gated:
            return self.o_proj(self._attend(qkv, cos, sin, batch), batch)
        qkv, gate = qkv.split([sum(self.sizes), self.sizes[0]], 1)
        return self.o_proj(self.ops.sigmoid_mul(self._attend(qkv, cos, sin, batch), gate), batch)

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        if self.normed:
            return self.attention.normed(qkv, self.q_norm, self.k_norm, cos, sin, batch)
        q, k, v = (part.unflatten(1, (-1, self.head_dim)) for part in qkv.split(self.sizes, 1))  # (T, heads, D)
        of_queries = self.query_rotary(batch.positions) if self.query_rotary else None
        q, k = self.ops.rope(q, k, cos, sin, of_queries)
        sinks = self.sinks.values if self.sinks else None
        return self.attention(q, k, v, batch, sinks)

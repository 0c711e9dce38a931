"""Attention over latents: multi-head latent attention (arXiv 2405.04434).

The cache has one row of each token and layer, which all heads share: a latent, of which each head's key and value are
products, and a rotated key. In the absorbed form the products are not made: a head's query is multiplied by its key
matrix in place of the latents, attention takes the latents as keys and values, and its result is multiplied by the
head's value matrix. The expanded form makes them of all tokens that a step reads, and takes less for each pair of
tokens. `Batch.expanded` says which rows take it: those of long enough prompts (`models.config.Expansion`), whatever
else a step computes, so that a row's bits depend on no other row.

Checkpoints rotate neighbouring columns, and `Ops.rope` rotates halves, so rows of the projections are reordered when
they are loaded. There are two exceptions: keys stay as they are if `Ops.keys_in_pairs`, and everything does if
`Ops.latent_prolog` is used; the expanded form then reorders queries. Under tensor parallelism each rank has its heads
and all latents.
"""

import dataclasses
from collections.abc import Iterator
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layers.attention import PagedCache
from umbra.models.layers.base import ALL, Layer, Piece
from umbra.models.layers.linear import MergedLinear, RowLinear, Source, grouped
from umbra.models.layers.norm import RMSNorm
from umbra.models.rope import RopeConfig
from umbra.ops.formats import FORMATS
from umbra.ops.formats.quantised import Quantised, floats
from umbra.ops.interface import HeadMatrices, LatentCache, LatentNorm, LatentProlog, Paged, PrologWeights, Rows

LATENT_EPS = 1e-6  # of norms of latents, whatever the config says of others


def pairs_of(columns: int) -> tuple[int, ...]:
    """The order in which columns that rotate in pairs of neighbours are kept: the first ones of all pairs, then the
    second ones."""
    return (*range(0, columns, 2), *range(1, columns, 2))


class LatentConfig(Protocol):
    """The part of a family's config that attention over latents reads."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def q_lora_rank(self) -> int:
        """Width of the queries' own latents; 0: they have none."""

    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def rope(self) -> RopeConfig: ...


class PagedLatents(PagedCache):
    """Attention over the paged cache of latents."""

    window = None

    def __init__(self, build: Build, width: int, rotary: int, scale: float):
        super().__init__()
        self.ops, self.sizes, self.scale, self.tensors = build.ops, (width, rotary), scale, build.ops.latent_parts

    def new_cache(self, part: int, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.ops.latent_cache(part, pages, page_size, *self.sizes, dtype, device)

    def bind(self, *caches: nn.Parameter, layers: int = 0) -> None:
        for i, cache in enumerate(caches):
            self.register_parameter(f"cache_{i}", cache)
        self.layers = layers

    @property
    def caches(self) -> LatentCache:
        return tuple(getattr(self, f"cache_{i}") for i in range(self.tensors))

    def forward(
        self, q: Tensor, q_rotary: Tensor, rows: Tensor, norm: LatentNorm, heads: "KeysAndValues", batch: Batch
    ) -> Tensor:
        """q (T, heads, key); the others, of the new tokens, as of `Ops.rope_write_latents`. -> (T, heads, value)"""
        paged = batch.paged[self.layers]
        q_rotary = self.ops.rope_write_latents(q_rotary, rows, norm, self.caches, paged.slot_mapping)
        if not batch.expanded:
            return self._absorbed(q, q_rotary, heads, paged)
        if not batch.absorbed:
            return self._expanded(q, q_rotary, heads, paged)
        out = q.new_empty(*q.shape[:2], heads.value)
        for of, attend in ((batch.expanded, self._expanded), (batch.absorbed, self._absorbed)):
            out[of.rows] = attend(q[of.rows], q_rotary[of.rows], heads, of.paged[self.layers])
        return out

    def after(
        self,
        prolog: LatentProlog,
        x: Tensor,
        weights: PrologWeights,
        norm: LatentNorm,
        heads: "KeysAndValues",
        batch: Batch,
    ) -> Tensor:
        """The absorbed form for all rows x (T, H). -> (T, heads, value)"""
        paged = batch.paged[self.layers]
        q, q_rotary = prolog(x, weights, norm, self.caches, paged.slot_mapping)
        return heads.results(self.ops.latent_attention(q, q_rotary, self.caches, paged, self.scale))

    def _absorbed(self, q: Tensor, q_rotary: Tensor, heads: "KeysAndValues", paged: Paged) -> Tensor:
        sums = self.ops.latent_attention(heads.queries(q), q_rotary, self.caches, paged, self.scale)
        return heads.results(sums)

    def _expanded(self, q: Tensor, q_rotary: Tensor, heads: "KeysAndValues", paged: Paged) -> Tensor:
        return self.ops.expanded_attention(q, q_rotary, self.caches, heads.keys, heads.values, paged, self.scale)


class KeysAndValues(Layer):
    """Each head's key and value matrices, whose rows follow one another in the checkpoint's tensor. Products with a key
    matrix are over its rows, so that no quantisation of the checkpoint can be kept: where linear layers are quantised,
    both have eight bits, or floats (`Ops.heads_in_q8`)."""

    def __init__(self, build: Build, heads: int, latent: int, key: int, value: int):
        super().__init__()
        part, self.ops = build.parallel.attn_tp.part(heads), build.ops
        self.rows, self.part = heads * (key + value), slice(part.start * (key + value), part.stop * (key + value))
        self.heads, self.latent, self.key, self.value = part.stop - part.start, latent, key, value
        q8, plain = FORMATS["q8"], build.formats.plain
        quantised = build.ops.heads_in_q8 and build.linear(["kv_b_proj"]).quantised

        def matrices(rows: int, columns: int) -> HeadMatrices:
            kept = q8 if quantised and columns % q8.group == 0 else plain
            return build.ops.head_matrices(self.heads, rows, columns, kept, build.device)

        self.keys, self.values = matrices(latent, key), matrices(value, latent)
        self.elements = self.heads * (key + value) * latent
        self.nbytes = self.keys.nbytes + self.values.nbytes

    def queries(self, x: Tensor) -> Tensor:
        """Queries of keys (T, heads, key) -> queries of latents (T, heads, latent)"""
        return self.ops.head_linear(x, self.keys)

    def results(self, x: Tensor) -> Tensor:
        """Sums of latents (T, heads, latent) -> sums of values (T, heads, value)"""
        return self.ops.head_linear(x, self.values)

    def fill(self, part: Tensor | Quantised) -> bool | None:
        whole = []
        for head, own in enumerate(floats(part).unflatten(0, (self.heads, -1))):
            whole += [self.keys.fill(head, own[: self.key].T.contiguous()), self.values.fill(head, own[self.key :])]
        return None if None in whole else all(whole)

    def pieces(self, path: str) -> Iterator[Piece]:
        yield Piece(f"{path}.weight", (self.rows, self.latent), (self.part, ALL), self.fill, linear=True)


def prolog_of(config: LatentConfig, build: Build) -> LatentProlog | None:
    """`Ops.latent_prolog` of matrices in one format, without biases."""
    names, heads = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"), config.num_attention_heads
    biased = any(build.stored.biased(build.at(name).path) for name in (*names, "q_a_layernorm", "kv_a_layernorm"))
    formats = {build.linear([name]) for name in names} if config.q_lora_rank and not biased else ()
    if len(formats) != 1:
        return None
    kept, part = (*formats,), build.parallel.attn_tp.part(heads)
    sizes = config.hidden_size, config.q_lora_rank, part.stop - part.start, config.qk_nope_head_dim
    return build.ops.latent_prolog(*sizes, kept[0])


class LatentAttention(nn.Module):
    def __init__(self, config: LatentConfig, build: Build):
        super().__init__()
        heads, tp, rank = config.num_attention_heads, build.parallel.attn_tp, config.q_lora_rank
        latent, still, turning = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
        order, both, whole = pairs_of(turning), latent + turning, heads * (still + turning)
        parts = [(heads * width, tp.part(heads * width)) for width in (still, turning)]
        plain, turned = grouped("q_b_proj" if rank else "q_proj", parts, heads)
        queries = [*plain, *(dataclasses.replace(source, order=order) for source in turned)]
        compressed = [Source("q_a_proj", rank, slice(0, rank))]
        first = compressed if rank else queries
        self.ops, self.parallel, self.compressed = build.ops, build.parallel, rank > 0
        self.sizes, self.head_parts = [sum(source.kept for source in first), both], [still, turning]
        self.of_queries = [sum(source.kept for source in of) for of in (plain, turned)]
        self.prolog = prolog_of(config, build)
        if self.prolog:
            queries = [Source("q_b_proj", whole, tp.part(whole))]
            latents = [Source("kv_a_proj_with_mqa", both, slice(0, both))]
            self.q_a_proj = MergedLinear(build, config.hidden_size, compressed)
            self.kv_a_proj = MergedLinear(build, config.hidden_size, latents)
        else:
            latents = [
                Source("kv_a_proj_with_mqa", both, slice(0, latent)),
                Source("kv_a_proj_with_mqa", both, slice(latent, both), None if build.ops.keys_in_pairs else order),
            ]
            self.qkv_proj = MergedLinear(build, config.hidden_size, [*first, *latents])
        if rank:
            self.q_a_layernorm = RMSNorm(build.at("q_a_layernorm"), rank, LATENT_EPS)
            self.q_b_proj = MergedLinear(build, rank, queries)
        self.kv_a_layernorm = RMSNorm(build.at("kv_a_layernorm"), latent, LATENT_EPS)
        self.kv_b_proj = KeysAndValues(build, heads, latent, still, config.v_head_dim)
        scale = (still + turning) ** -0.5 * config.rope.softmax_factor
        self.attention = PagedLatents(build, latent, turning, scale)
        self.o_proj = RowLinear(build, "o_proj", heads * config.v_head_dim, config.hidden_size)

    def forward(self, x: Rows, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        norm = LatentNorm(self.kv_a_layernorm.eps, self.kv_a_layernorm.weight, cos, sin)
        if self.prolog:
            values = self._with_prolog(self.prolog, cast(Tensor, x), norm, batch)  # only `qkv_proj` has rounded rows
        else:
            q, rows = self.qkv_proj(x, batch).split(self.sizes, 1)
            if self.compressed:
                q = self.q_b_proj.of_all_rows(self.q_a_layernorm(q))
            still, turning = (part.unflatten(1, (self.kv_b_proj.heads, -1)) for part in q.split(self.of_queries, 1))
            values = self.attention(still, turning, rows, norm, self.kv_b_proj, batch)
        return self.o_proj(values.flatten(1), batch)

    def _with_prolog(self, prolog: LatentProlog, x: Tensor, norm: LatentNorm, batch: Batch) -> Tensor:
        x, q_a, kv_a = batch.rows(self.parallel).gather(x), self.q_a_proj, self.kv_a_proj
        if not batch.expanded:
            weights = PrologWeights(
                q_a.weight, self.q_a_layernorm.weight, self.q_b_proj.weight, kv_a.weight, self.kv_b_proj.keys
            )
            return self.attention.after(prolog, x, weights, norm, self.kv_b_proj, batch)
        q = self.q_b_proj.of_all_rows(self.q_a_layernorm(q_a.of_all_rows(x)))
        still, turning = q.unflatten(1, (self.kv_b_proj.heads, -1)).split(self.head_parts, 2)
        turning = turning.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        return self.attention(still, turning, kv_a.of_all_rows(x), norm, self.kv_b_proj, batch)

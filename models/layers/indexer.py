"""Attention over chosen blocks of tokens. An index of each token's key, and of a pooled key of each block, lies beside
the KV cache; each query chooses the blocks that it attends to by it, and nothing else of the KV cache is read.

The index is the third cache of its layer, so that its pages have the numbers of those of keys and values, and prefixes,
preemption and drafts treat them as one. It is whole on every rank that shares attention: all choose the same blocks.
"""

import torch
from torch import Tensor, nn

from umbra.base.errors import UserError
from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layer_sizes import IndexSizes
from umbra.models.layers.attention import AttentionConfig, GroupedAttention, PagedCache
from umbra.models.layers.linear import MergedLinear, Source
from umbra.models.layers.norm import RMSNorm
from umbra.models.layers.rotary import head_order, rotary_angles
from umbra.models.rope import RopeConfig
from umbra.ops.interface import Paged, Pooling, Rounded, Rows, fixed


class SelectedAttention(PagedCache):
    """Attention over the tokens of chosen blocks, with caches of keys and values in rows, and the index."""

    tensors = 3
    window = None
    k_cache: Tensor  # ops.row_cache(...)
    v_cache: Tensor
    index: Tensor

    def __init__(self, build: Build, kv_heads: int, head_dim: int, index: IndexSizes):
        super().__init__()
        if not build.ops.selects:
            raise UserError("model_path: attention over chosen blocks of tokens is only computed on the cpu as yet")
        self.ops, self.sizes, self.index_sizes = build.ops, (kv_heads, head_dim), index

    def new_cache(self, part: int, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        own = self.index_sizes
        if part < 2:
            return self.ops.row_cache(pages, page_size, *self.sizes, dtype, device)
        if page_size % own.ratio:
            raise UserError(
                f"cache_config.page_size: {page_size} is no multiple of {own.ratio}, the tokens of a block of the index"
            )
        return self.ops.row_cache(pages, page_size + page_size // own.ratio, 1, own.width, dtype, device)

    def bind(self, *caches: nn.Parameter, layers: int = 0) -> None:
        (self.k_cache, self.v_cache, self.index), self.layers = caches, layers

    @property
    def caches(self) -> tuple[Tensor, ...]:
        return self.k_cache, self.v_cache, self.index

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, paged: Paged) -> Tensor:
        """q (T, heads, D), k and v (T, kv_heads, D), blocks (T, top). -> (T, heads * D)"""
        self.ops.write_rows(k, v, self.k_cache, self.v_cache, paged.slot_mapping)
        scale, ratio = self.sizes[1] ** -0.5, self.index_sizes.ratio
        return self.ops.selected_attention(q, self.k_cache, self.v_cache, paged, blocks, ratio, scale).flatten(1)


class Indexer(nn.Module):
    """The index's queries and keys, which are projected together; only queries are normalised and rotated before keys
    are pooled."""

    def __init__(self, build: Build, hidden: int, sizes: IndexSizes, rope: RopeConfig, eps: float):
        super().__init__()
        self.ops, self.sizes, rows = build.ops, sizes, (sizes.heads + 1) * sizes.width
        order = head_order(rope, sizes.width)
        self.qk_proj = MergedLinear(build, hidden, [Source("index_qk_proj", rows, slice(0, rows), order)], floats=True)
        self.q_layernorm = RMSNorm(build.at("q_layernorm"), sizes.width, eps, order)
        self.k_layernorm = RMSNorm(build.at("k_layernorm"), sizes.width, eps, order)
        dtype = build.ops.vector_type(build.dtype)
        angles = rotary_angles(rope, sizes.width, sizes.ratio)
        self.back_cos, self.back_sin = (fixed(of[-1].to(build.device, dtype)) for of in angles)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, index: Tensor, paged: Paged) -> Tensor:
        """Writes the keys of x (T, H), all rows of the group, to `index`. -> the blocks of each query, (T, top)"""
        sizes, norm = self.sizes, self.k_layernorm
        queries, keys = self.qk_proj.of_all_rows(x).split([sizes.heads * sizes.width, sizes.width], 1)
        pooling = Pooling(sizes.ratio, norm.eps, norm.weight, cos, sin, self.back_cos, self.back_sin)
        self.ops.write_index(keys, pooling, index, paged.slot_mapping)
        by_head = queries.unflatten(1, (sizes.heads, sizes.width))
        q = self.ops.norm_rotate(by_head, self.q_layernorm.weight, self.q_layernorm.eps, cos, sin)
        return self.ops.choose_blocks(q, None, index, paged, sizes.ratio, sizes.top)


class IndexedAttention(GroupedAttention):
    """Gated grouped-query attention, of normed heads, over the blocks that an indexer chooses. The indexer reads what
    `qkv_proj` reads, so rows must not be rounded for that alone."""

    def __init__(self, config: AttentionConfig, build: Build, index: IndexSizes):
        super().__init__(config, build, bias=False, out_bias=False, normed=True, gated=True)
        self.parallel, own = build.parallel, self.sizes[1] // self.head_dim
        del self.attention  # of all tokens
        self.selected = SelectedAttention(build, own, self.head_dim, index)
        self.indexer = Indexer(build.at("indexer"), config.hidden_size, index, config.rope, config.rms_norm_eps)

    def forward(self, x: Rows, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        if isinstance(x, Rounded):
            raise AssertionError("rows that were rounded for one of two readers")
        x, paged = batch.rows(self.parallel).gather(x), batch.paged[self.selected.layers]
        blocks = self.indexer(x, cos, sin, self.selected.index, paged)
        parts = self.qkv_proj.of_all_rows(x).split([*self.sizes, self.sizes[0]], 1)
        q, k, v = (part.unflatten(1, (-1, self.head_dim)) for part in parts[:3])
        q, k = (self.ops.rms_norm(of, norm.weight, norm.eps) for of, norm in ((q, self.q_norm), (k, self.k_norm)))
        q, k = self.ops.rope(q, k, cos, sin)
        return self.o_proj(self.ops.sigmoid_mul(self.selected(q, k, v, blocks, paged), parts[3]), batch)

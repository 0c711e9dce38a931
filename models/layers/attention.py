"""Attention over the paged KV cache."""

from torch import Tensor, nn

from models.batch import Batch
from models.build import Build
from models.layers.norm import RMSNorm
from ops.interface import Heads, fixed
from ops.parallel.groups import Shard


def kv_shard(attn_tp: Shard, kv_heads: int) -> Shard:
    """The part of the KV heads that a rank of `attn_tp` holds. If there are more ranks than KV heads, neighbouring
    ranks hold copies of the same head."""
    size = min(attn_tp.size, kv_heads)
    return Shard(attn_tp.rank * size // attn_tp.size, size)


class PagedAttention(nn.Module):
    """Attention over the paged KV cache. The engine allocates the cache and passes it to `bind`."""

    k_cache: Tensor  # ops.kv_cache(...)
    v_cache: Tensor

    def __init__(self, build: Build, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.ops, self.heads, self.kv_heads, self.head_dim = build.ops, heads, kv_heads, head_dim

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        self.k_cache, self.v_cache = fixed(k_cache), fixed(v_cache)

    def keep_queries(self, rows: int) -> None:
        """Makes the place of the queries of steps of `rows` tokens: a graph has kernels that write into a tensor, and
        such a tensor has to be one of its inputs."""
        shape = rows, self.heads * self.head_dim
        self.register_parameter(f"queries_{rows}", fixed(self.k_cache.new_empty(shape)))

    def normed(self, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        """Attention of queries and keys whose heads are first normalised and rotated.
        qkv (T, (heads + 2 kv_heads) D) has queries, keys and values side by side. -> (T, heads * D)"""
        heads = Heads(self.kv_heads, q_norm.eps, q_norm.weight, k_norm.weight, cos, sin)
        out = getattr(self, f"queries_{len(qkv)}", None)
        q = self.ops.norm_rope_write(qkv, heads, self.k_cache, self.v_cache, batch.paged.slot_mapping, out)
        return self._attend(q, batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """q (T, heads, D), k and v (T, kv_heads, D). -> (T, heads * D)"""
        self.ops.write_kv(k, v, self.k_cache, self.v_cache, batch.paged.slot_mapping)
        return self._attend(q, batch)

    def _attend(self, q: Tensor, batch: Batch) -> Tensor:
        return self.ops.attention(q, self.k_cache, self.v_cache, batch.paged, self.head_dim**-0.5).flatten(1)

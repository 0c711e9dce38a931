"""Ops made of several others, for implementations without a kernel of their own for them."""

from torch import Tensor

from umbra.ops.interface import Heads, LatentCache, LatentNorm, Ops


def norm_rope_write(
    ops: Ops, qkv: Tensor, heads: Heads, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    by_head = qkv.unflatten(1, (-1, len(heads.q_weight)))  # (T, query heads + 2 kv_heads, D)
    q, k, v = by_head.split([by_head.shape[1] - 2 * heads.kv_heads, heads.kv_heads, heads.kv_heads], 1)
    q, k = ops.rms_norm(q, heads.q_weight, heads.eps), ops.rms_norm(k, heads.k_weight, heads.eps)
    q, k = ops.rope(q, k, heads.cos, heads.sin)
    ops.write_kv(k, v, k_cache, v_cache, slot_mapping)
    return q


def rope_write_latents(
    ops: Ops, q: Tensor, rows: Tensor, norm: LatentNorm, cache: LatentCache, slot_mapping: Tensor
) -> Tensor:
    latents, keys = rows.split([len(norm.weight), rows.shape[1] - len(norm.weight)], 1)
    q, key = ops.rope(q, keys[:, None], norm.cos, norm.sin)
    ops.write_latents(ops.rms_norm(latents, norm.weight, norm.eps), key[:, 0], cache, slot_mapping)
    return q

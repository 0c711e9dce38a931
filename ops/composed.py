"""Ops made of several others, for implementations without a kernel of their own for them."""

from torch import Tensor

from ops.interface import Ops


def norm_rope_write(
    ops: Ops,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    places: Tensor,
) -> Tensor:
    heads = qkv.unflatten(1, (-1, len(q_weight)))  # (T, heads + 2 kv_heads, D)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    q, k = ops.rope(ops.rms_norm(q, q_weight, eps), ops.rms_norm(k, k_weight, eps), cos, sin)
    ops.write_kv(k, v, k_cache, v_cache, places)
    return q

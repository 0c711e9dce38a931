"""Ops of the reference that only platforms without their own use."""

import pytest
import torch

from ops import reference

EPS = 1e-6


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_norm_rope_write_is_its_parts(heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    tokens, dim, page = 5, 8, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    q_weight, k_weight = torch.rand(dim), torch.rand(dim)
    angles = torch.rand(tokens, dim // 2)
    cos, sin = (torch.cat([part, part], 1) for part in (angles.cos(), angles.sin()))
    places = torch.tensor([6, 1, 9, 2, 4])

    def caches() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(3, page, kv_heads, dim), torch.zeros(3, page, kv_heads, dim)

    k_cache, v_cache = caches()
    arguments = (qkv, q_weight, k_weight, EPS, cos, sin, kv_heads)
    found = reference.norm_rope_write(*arguments, k_cache, v_cache, places, None)
    q = qkv[:, : heads * dim].view(tokens, heads, dim)
    k = qkv[:, heads * dim : (heads + kv_heads) * dim].view(tokens, kv_heads, dim)
    v = qkv[:, (heads + kv_heads) * dim :].view(tokens, kv_heads, dim)
    q, k = reference.rope(reference.rms_norm(q, q_weight, EPS), reference.rms_norm(k, k_weight, EPS), cos, sin)
    wanted = caches()
    reference.write_kv(k, v, *wanted, places)
    assert torch.equal(found, q)
    assert torch.equal(k_cache, wanted[0])
    assert torch.equal(v_cache, wanted[1])
    assert k_cache.count_nonzero() == v_cache.count_nonzero() == tokens * kv_heads * dim

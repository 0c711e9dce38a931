"""Heads kept in another order of columns, so that an op that rotates whole heads rotates only their first columns."""

import pytest
import torch
from torch import Tensor

from models.layers.rotary import head_order, rotary_angles
from models.rope import RopeConfig, YarnConfig
from ops.reference import rope

YARN = YarnConfig(4.0, 16, beta_fast=32.0, beta_slow=1.0, attention_factor=1.5, truncate=True)


def rotated(x: Tensor, config: RopeConfig) -> Tensor:
    """Row t of each head (T, heads, head_dim) turned by the angles of position t, in the checkpoint's order."""
    angles = torch.arange(len(x))[:, None, None] * torch.tensor(config.inverse_frequencies())
    scale = config.yarn.attention_factor if config.yarn else 1.0
    cos, sin = angles.cos() * scale, angles.sin() * scale
    a, b = x[..., : config.dim].chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., config.dim :]), dim=-1)


@pytest.mark.parametrize("yarn", [None, YARN])
@pytest.mark.parametrize(("head_dim", "dim"), [(8, 8), (8, 4), (20, 6), (128, 64), (32, 2)])
def test_first_columns_rotate(head_dim: int, dim: int, yarn: YarnConfig | None) -> None:
    config = RopeConfig(5e6, dim, yarn)
    order = list(head_order(config, head_dim) or range(head_dim))
    assert sorted(order) == list(range(head_dim))
    torch.manual_seed(5)
    q, k = torch.randn(7, 3, head_dim), torch.randn(7, 1, head_dim)
    ours_q, ours_k = rope(q[..., order], k[..., order], *rotary_angles(config, head_dim, len(q)))
    torch.testing.assert_close(ours_q, rotated(q, config)[..., order])
    torch.testing.assert_close(ours_k, rotated(k, config)[..., order])
    scores = torch.einsum("qhd,kd->hqk", rotated(q, config), rotated(k, config)[:, 0])
    torch.testing.assert_close(torch.einsum("qhd,kd->hqk", ours_q, ours_k[:, 0]), scores)


def test_whole_heads_keep_the_checkpoints_order() -> None:
    assert head_order(RopeConfig(1e4, 128, None), 128) is None
    assert head_order(RopeConfig(1e4, 4, None), 8) == (0, 1, 4, 5, 2, 3, 6, 7)

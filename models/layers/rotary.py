"""Rotary position embedding: a table of the angles at every position."""

import torch
from torch import Tensor, nn

from models.build import Build
from models.rope import RopeConfig
from ops.fixed import fixed


def rotary_angles(config: RopeConfig, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles at positions 0 .. `positions` - 1, each (positions, dim) float32."""
    scale = config.yarn.attention_factor if config.yarn else 1.0
    frequencies = torch.tensor(config.inverse_frequencies(), dtype=torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies.repeat(2)
    return angles.cos() * scale, angles.sin() * scale


class RotaryTable(nn.Module):
    """cos and sin for each position that a sequence of the case can reach, each (positions, dim)."""

    def __init__(self, build: Build, config: RopeConfig):
        super().__init__()
        self.ops = build.ops
        dtype = build.ops.vector_type(build.dtype)
        self.cos, self.sin = (fixed(t.to(build.device, dtype)) for t in rotary_angles(config, build.max_positions))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.embedding(positions, self.cos, None), self.ops.embedding(positions, self.sin, None)

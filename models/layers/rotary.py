"""Rotary position embedding: a table of the angles at every position.

`Ops.rope` rotates all of a head: column i with column i + head_dim / 2. Where only the first columns of a head rotate,
the query and key heads are kept in another order of columns, so that the pairs are these; columns that do not rotate
have the angle zero. Products of queries and keys, and sums of squares, do not depend on the order.
"""

import torch
from torch import Tensor, nn

from umbra.models.build import Build
from umbra.models.rope import RopeConfig
from umbra.ops.interface import fixed


def rotary_angles(config: RopeConfig, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles at positions 0 .. `positions` - 1, each (positions, head_dim) float32, for heads in
    `head_order`."""
    turning, frequencies, scales = config.dim // 2, torch.zeros(head_dim // 2), torch.ones(head_dim // 2)
    frequencies[:turning] = torch.tensor(config.inverse_frequencies())
    scales[:turning] = config.yarn.attention_factor if config.yarn else 1.0
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies.repeat(2)
    return angles.cos() * scales.repeat(2), angles.sin() * scales.repeat(2)


def head_order(config: RopeConfig, head_dim: int) -> tuple[int, ...] | None:
    """The order in which a query or key head's columns are kept; None: as in the checkpoint. For head_dim 8 of which 4
    columns rotate: 0 1 4 5 2 3 6 7."""
    turning, half = range(config.dim), config.dim // 2
    still = range(config.dim, head_dim)
    if not still:
        return None
    return (*turning[:half], *still[: len(still) // 2], *turning[half:], *still[len(still) // 2 :])


def query_scales(config: RopeConfig, positions: int) -> Tensor:
    """The factors (positions) by which queries at positions 0 .. `positions` - 1 grow."""
    if not config.yarn or not config.query_beta:
        return torch.ones(positions)
    lengths = torch.arange(positions) // config.yarn.original_length
    return 1 + config.query_beta * lengths.float().log1p()


class RotaryTable(nn.Module):
    """cos and sin for each position that a sequence of the case can reach, each (positions, head_dim); those of
    `queries` grow with the position, if the model's do."""

    def __init__(self, build: Build, config: RopeConfig, head_dim: int, queries: bool = False):
        super().__init__()
        self.ops = build.ops
        dtype, positions = build.ops.vector_type(build.dtype), build.max_positions
        scales = query_scales(config, positions) if queries else torch.ones(positions)
        angles = rotary_angles(config, head_dim, positions)
        self.cos, self.sin = (fixed((t * scales[:, None]).to(build.device, dtype)) for t in angles)

    @classmethod
    def of_queries(cls, build: Build, config: RopeConfig, head_dim: int) -> "RotaryTable | None":
        """The table of queries; None: they do not grow within the positions of the case."""
        grows = config.query_beta and config.yarn and build.max_positions > config.yarn.original_length
        return cls(build, config, head_dim, queries=True) if grows else None

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.embedding(positions, self.cos, None), self.ops.embedding(positions, self.sin, None)

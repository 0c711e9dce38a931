"""A mixture of experts on torch's product of bfloat16 activations and int4 weights, as one writes it in Python."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.moe_weights import GROUP, Weights, routed
from ops.format import Quantised

Packed = tuple[Tensor, Tensor]  # weights in the product's own order; scales and zero points (K / group, m, 2)


class TorchInt4Moe:
    def __init__(self, weights: Weights):
        self.gate_up = [_packed(gate, up) for gate, up in zip(weights["gate"], weights["up"], strict=True)]
        self.down = [_packed(down) for down in weights["down"]]

    def prepared(self, x: Tensor, weights: Tensor, ids: Tensor) -> Callable[[], Tensor]:
        """A call that computes the layer for `x` (tokens, hidden)."""
        x = x.to(torch.bfloat16)
        return lambda: routed(x, weights, ids, self._expert)

    def _expert(self, e: int, x: Tensor) -> Tensor:
        gate, up = _product(x, self.gate_up[e]).chunk(2, dim=1)
        return _product(functional.silu(gate) * up, self.down[e])


def _packed(*parts: Quantised) -> Packed:
    levels = torch.cat([part.plain_levels for part in parts]).int()
    scales = torch.cat([part.in_groups(GROUP)[0] for part in parts]).T  # (K / group, m); w = (level - 8) * scale + zero
    both = torch.stack([scales, torch.zeros_like(scales)], dim=-1).to(torch.bfloat16)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1), both


def _product(x: Tensor, packed: Packed) -> Tensor:
    levels, scales = packed
    out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, levels, GROUP, scales)
    return out

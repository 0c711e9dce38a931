"""The CPU platform's ops. So far PyTorch's own CPU kernels where they beat the reference, and the reference elsewhere.

`linear` multiplies in the storage type with float32 accumulation inside oneDNN, instead of widening every weight first:
14 to 30 times faster for bfloat16 decode shapes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.reference import add_rms_norm, attention, embedding, rms_norm, rope, route_softmax, silu_mul, write_kv

__all__ = [
    "add_rms_norm",
    "attention",
    "embedding",
    "linear",
    "moe",
    "rms_norm",
    "rope",
    "route_softmax",
    "silu_mul",
    "write_kv",
]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def moe(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, first_expert: int) -> Tensor:
    # Sort the T * k assignments by expert once, so that each expert is one slice and not one search.
    experts, order = (ids.flatten() - first_expert).sort(stable=True)
    tokens = order // ids.shape[1]
    scale = weights.flatten()[order, None].float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    present, counts = experts.unique_consecutive(return_counts=True)
    start = 0
    for expert, count in zip(present.tolist(), counts.tolist(), strict=True):
        rows = slice(start, start + count)
        start += count
        if 0 <= expert < len(w13):
            hidden = silu_mul(F.linear(x[tokens[rows]], w13[expert]))
            out.index_add_(0, tokens[rows], F.linear(hidden, w2[expert]).float() * scale[rows])
    return out.to(x.dtype)

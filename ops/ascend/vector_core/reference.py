"""The ops of `schemas.py` in plain PyTorch, under the same names.

They compute in float32 and return the type of x; `half_sums` has no effect. With `precise` they compute and return
float64, with which results of the kernels are compared.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from ops.ascend.vector_core.blocks import PLACE, WORD, BlockLayout


def fused_moe_w4a16(
    x: Tensor,
    w13: Tensor,
    s13: Tensor,
    z13: Tensor | None,
    w2: Tensor,
    s2: Tensor,
    z2: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    half_sums: bool = False,
    precise: bool = False,
) -> Tensor:
    gate, up = _grouped(x.to(_inside(precise)), w13, s13, z13, ids).flatten(0, 1).chunk(2, -1)  # (T k, I) each
    rows = _grouped(silu(gate) * up, w2, s2, z2, ids.reshape(-1, 1))  # (T k, 1, H)
    y = (rows.view(*ids.shape, -1) * weights[..., None].to(rows.dtype)).sum(1)
    return y if precise else y.to(x.dtype)


def fused_moe_slots_w4a16(
    x: Tensor,
    arena: Tensor,
    places: Tensor,
    ids: Tensor,
    weights: Tensor,
    inner: int,
    group: int,
    group2: int,
    zeros: bool,
    half_sums: bool = False,
    precise: bool = False,
) -> Tensor:
    layout = BlockLayout(inner, x.shape[1], x.dtype, group, group2, zeros)
    chosen = [e for e in ids.unique().tolist() if 0 <= e < len(places) and places[e] >= 0]
    if not chosen:
        return x.new_zeros(x.shape, dtype=torch.float64 if precise else x.dtype)
    begins = [int(places[expert]) * PLACE for expert in chosen]
    blocks = [layout.views(arena[begin : begin + layout.block_bytes]) for begin in begins]
    w13, s13, w2, s2 = (torch.stack([block[name] for block in blocks]) for name in ("w13", "s13", "w2", "s2"))
    z13, z2 = (torch.stack([block[name] for block in blocks]) if zeros else None for name in ("z13", "z2"))
    local = torch.full_like(ids, -1)
    for number, expert in enumerate(chosen):
        local[ids == expert] = number
    return fused_moe_w4a16(x, w13, s13, z13, w2, s2, z2, local, weights, precise=precise)


def gemv_w4a16(
    x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor | None, half_sums: bool = False, precise: bool = False
) -> Tensor:
    y = x.to(_inside(precise)) @ unpacked(w, scales, zeros, _inside(precise))
    return y if precise else y.to(x.dtype)


def unpacked(w: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Unpacks words (K, N / 8) into values (K, N)."""
    shifts = torch.arange(0, 32, 32 // WORD, dtype=torch.int32, device=w.device)
    nibbles = (((w[..., None] >> shifts) & 15) ^ 8) - 8  # (K, N / 8, 8), signed
    group = len(w) // len(scales)
    values = nibbles.flatten(1).to(dtype)
    if zeros is not None:
        values += zeros.to(dtype).repeat_interleave(group, 0)
    return values * scales.to(dtype).repeat_interleave(group, 0)


def _grouped(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor | None, ids: Tensor) -> Tensor:
    """(R, k, N) in the type of x."""
    y = x.new_zeros(*ids.shape, w.shape[-1] * WORD)
    for expert in ids.unique().tolist():
        if 0 <= expert < len(w):
            rows, places = (ids == expert).nonzero(as_tuple=True)
            own = None if zeros is None else zeros[expert]
            y[rows, places] = x[rows] @ unpacked(w[expert], scales[expert], own, x.dtype)
    return y


def _inside(precise: bool) -> torch.dtype:
    return torch.float64 if precise else torch.float32

"""The ops of `schemas.py` in plain PyTorch, under the same names.

They compute in float32 and return the type of x; `float_sums` has no effect. With `precise` they compute and return
float64, with which results of the kernels are compared.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from umbra.ops.ascend.vector_core.blocks import PLACE, BlockLayout
from umbra.ops.ascend.vector_core.planes import PAIRS, Planes, planes_of
from umbra.ops.ascend.vector_core.schemas import TILE
from umbra.ops.reference import route_sigmoid, route_softmax


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
    group: int,
    group2: int,
    float_sums: bool = False,
    precise: bool = False,
) -> Tensor:
    first = planes_of(x.shape[1], group)
    second = planes_of(w13.shape[-2] // 2, group2, ordered=True)
    x = x[:, first.order().to(x.device)]
    columns = _grouped(x.to(_inside(precise)), w13, s13, z13, ids, first).flatten(0, 1)  # (T k, 2 I)
    gate, up = columns.unflatten(-1, (-1, 2, PAIRS)).unbind(-2)
    rows = _grouped((silu(gate) * up).flatten(-2), w2, s2, z2, ids.reshape(-1, 1), second)  # (T k, 1, H)
    y = (rows.view(*ids.shape, -1) * weights[..., None].to(rows.dtype)).sum(1)
    return y if precise else y.to(x.dtype)


def fused_moe_scores_w4a16(
    x: Tensor,
    w13: Tensor,
    s13: Tensor,
    z13: Tensor | None,
    w2: Tensor,
    s2: Tensor,
    z2: Tensor | None,
    scores: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    first_expert: int,
    group: int,
    group2: int,
    float_sums: bool = False,
    precise: bool = False,
) -> Tensor:
    route = partial(route_sigmoid, bias=bias) if sigmoid else route_softmax
    weights, ids = route(scores, top_k=top_k, renormalise=True)
    return fused_moe_w4a16(x, w13, s13, z13, w2, s2, z2, ids - first_expert, weights, group, group2, precise=precise)


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
    float_sums: bool = False,
    precise: bool = False,
) -> Tensor:
    layout = BlockLayout(inner, x.shape[1], x.dtype, group, group2, zeros, in_planes=True)
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
    return fused_moe_w4a16(x, w13, s13, z13, w2, s2, z2, local, weights, group, group2, precise=precise)


def gemv_w4a16(
    x: Tensor,
    w: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    float_sums: bool = False,
    precise: bool = False,
) -> Tensor:
    planes = planes_of(x.shape[1], group)
    weights = values(w, scales, zeros, planes, _inside(precise))
    y = x[:, planes.order().to(x.device)].to(weights.dtype) @ weights.T
    return y if precise else y.to(x.dtype)


def unpack_w4a16(w: Tensor, scales: Tensor, zeros: Tensor | None, group: int, ordered: bool, pairs: bool) -> Tensor:
    planes = planes_of(w.shape[1] * w.shape[3] * 2, group, ordered)
    y = values(w, scales, zeros, planes, torch.float32).to(scales.dtype)
    return y.unflatten(1, (-1, 2, PAIRS)).transpose(1, 2).flatten(1, 3) if pairs else y


def unpack_tiles_w4a16(
    w: Tensor, scales: Tensor, zeros: Tensor | None, group: int, ordered: bool, pairs: bool, bank: Tensor
) -> None:
    bank.copy_(unpack_w4a16(w, scales, zeros, group, ordered, pairs))


def tiles(values: Tensor) -> Tensor:
    """The memory of values (E, N, K) in FRACTAL_NZ: (E, K / 16, N, 16)."""
    return values.unflatten(-1, (-1, TILE)).transpose(1, 2).contiguous()


def values(w: Tensor, scales: Tensor, zeros: Tensor | None, planes: Planes, dtype: torch.dtype) -> Tensor:
    """The values (..., N, K) of words, K in the order of planes."""
    nibbles = planes.unpack(w).to(dtype)
    if zeros is not None:
        nibbles += planes.each(zeros).to(dtype)
    return nibbles * planes.each(scales).to(dtype)


def _grouped(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor | None, ids: Tensor, planes: Planes) -> Tensor:
    """(R, k, N) in the type of x, whose K is in the order of planes."""
    y = x.new_zeros(*ids.shape, w.shape[-2])
    for expert in ids.unique().tolist():
        if 0 <= expert < len(w):
            rows, places = (ids == expert).nonzero(as_tuple=True)
            own = None if zeros is None else zeros[expert]
            y[rows, places] = x[rows] @ values(w[expert], scales[expert], own, planes, x.dtype).T
    return y


def _inside(precise: bool) -> torch.dtype:
    return torch.float64 if precise else torch.float32

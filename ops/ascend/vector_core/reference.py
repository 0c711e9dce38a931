"""The ops of `schemas.py` in plain PyTorch, under the same names.

They take objects of signatures.py, compute in float32 and return the type of x; `float_sums` has no effect. With
`precise` they compute and return float64, with which results of the kernels are compared.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from umbra.ops.ascend.vector_core.blocks import PLACE, BlockLayout
from umbra.ops.ascend.vector_core.planes import PAIRS, Planes, planes_of
from umbra.ops.ascend.vector_core.schemas import TILE
from umbra.ops.ascend.vector_core.signatures import CALLS, BlockSizes, ExpertChoice, InPlanes
from umbra.ops.reference import route_sigmoid, route_softmax


def fused_moe_w4a16(
    x: Tensor, up: InPlanes, down: InPlanes, ids: Tensor, weights: Tensor, precise: bool = False
) -> Tensor:
    first = planes_of(x.shape[1], up.group)
    second = planes_of(up.words.shape[-2] // 2, down.group, ordered=True)
    x = x[:, first.order().to(x.device)]
    columns = _grouped(x.to(_inside(precise)), up, ids, first).flatten(0, 1)  # (T k, 2 I)
    gate, up_columns = columns.unflatten(-1, (-1, 2, PAIRS)).unbind(-2)
    rows = _grouped((silu(gate) * up_columns).flatten(-2), down, ids.reshape(-1, 1), second)  # (T k, 1, H)
    y = (rows.view(*ids.shape, -1) * weights[..., None].to(rows.dtype)).sum(1)
    return y if precise else y.to(x.dtype)


def fused_moe_scores_w4a16(
    x: Tensor,
    up: InPlanes,
    down: InPlanes,
    scores: Tensor,
    bias: Tensor | None,
    choice: ExpertChoice,
    precise: bool = False,
) -> Tensor:
    route = partial(route_sigmoid, bias=bias) if choice.sigmoid else route_softmax
    weights, ids = route(scores, top_k=choice.top_k, renormalise=True)
    return fused_moe_w4a16(x, up, down, ids - choice.first_expert, weights, precise)


def fused_moe_slots_w4a16(
    x: Tensor, arena: Tensor, places: Tensor, ids: Tensor, weights: Tensor, sizes: BlockSizes, precise: bool = False
) -> Tensor:
    inner, group, group2, zeros = sizes
    layout = BlockLayout(inner, x.shape[1], x.dtype, group, group2, zeros, in_planes=True)
    chosen = [e for e in ids.unique().tolist() if 0 <= e < len(places) and places[e] >= 0]
    if not chosen:
        return x.new_zeros(x.shape, dtype=torch.float64 if precise else x.dtype)
    begins = [int(places[expert]) * PLACE for expert in chosen]
    blocks = [layout.views(arena[begin : begin + layout.block_bytes]) for begin in begins]
    planes = {name: torch.stack([block[name] for block in blocks]) for name in layout.planes}
    up = InPlanes(planes["w13"], planes["s13"], planes.get("z13"), group)
    down = InPlanes(planes["w2"], planes["s2"], planes.get("z2"), group2)
    local = torch.full_like(ids, -1)
    for number, expert in enumerate(chosen):
        local[ids == expert] = number
    return fused_moe_w4a16(x, up, down, local, weights, precise)


def gemv_w4a16(x: Tensor, weight: InPlanes, precise: bool = False) -> Tensor:
    planes = planes_of(x.shape[1], weight.group)
    matrix = values(*weight[:3], planes, _inside(precise))
    y = x[:, planes.order().to(x.device)].to(matrix.dtype) @ matrix.T
    return y if precise else y.to(x.dtype)


def unpack_w4a16(weight: InPlanes, ordered: bool, pairs: bool) -> Tensor:
    w, scales, zeros, group = weight
    planes = planes_of(w.shape[1] * w.shape[3] * 2, group, ordered)
    y = values(w, scales, zeros, planes, torch.float32).to(scales.dtype)
    return y.unflatten(1, (-1, 2, PAIRS)).transpose(1, 2).flatten(1, 3) if pairs else y


def unpack_tiles_w4a16(weight: InPlanes, ordered: bool, pairs: bool, bank: Tensor) -> None:
    bank.copy_(unpack_w4a16(weight, ordered, pairs))


OPS: dict[str, Callable[..., Tensor | None]] = {
    op.__name__: op
    for op in (
        fused_moe_w4a16,
        fused_moe_scores_w4a16,
        fused_moe_slots_w4a16,
        gemv_w4a16,
        unpack_w4a16,
        unpack_tiles_w4a16,
    )
}


def compute(name: str, *given: Any, precise: bool = False) -> Any:
    """Returns the result of the torch op `name` for its arguments."""
    return OPS[name](**CALLS[name].objects(*given), **({"precise": True} if precise else {}))


def tiles(values: Tensor) -> Tensor:
    """The memory of values (E, N, K) in FRACTAL_NZ: (E, K / 16, N, 16)."""
    return values.unflatten(-1, (-1, TILE)).transpose(1, 2).contiguous()


def values(w: Tensor, scales: Tensor, zeros: Tensor | None, planes: Planes, dtype: torch.dtype) -> Tensor:
    """The values (..., N, K) of words, K in the order of planes."""
    nibbles = planes.unpack(w).to(dtype)
    if zeros is not None:
        nibbles += planes.spread(zeros).to(dtype)
    return nibbles * planes.spread(scales).to(dtype)


def _grouped(x: Tensor, weight: InPlanes, ids: Tensor, planes: Planes) -> Tensor:
    """Returns the products (R, k, N) of rows x (R, K) by the matrices of `ids` (R, k), in the type of x, whose K is in
    the order of planes."""
    w, scales, zeros, _ = weight
    y = x.new_zeros(*ids.shape, w.shape[-2])
    for expert in ids.unique().tolist():
        if 0 <= expert < len(w):
            rows, places = (ids == expert).nonzero(as_tuple=True)
            own = None if zeros is None else zeros[expert]
            y[rows, places] = x[rows] @ values(w[expert], scales[expert], own, planes, x.dtype).T
    return y


def _inside(precise: bool) -> torch.dtype:
    return torch.float64 if precise else torch.float32

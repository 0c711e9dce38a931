"""The experts of one layer with weights that several formats of 4 bits hold without rounding: levels from -7 to 7, and
one scale for a whole row whose products with them are exact in bfloat16."""

from collections.abc import Callable

import torch
from torch import Tensor

from ops.format import Quantised

GROUP = 32  # columns with a scale of their own, in the formats that have groups
Weights = dict[str, list[Quantised]]  # gate, up (inner, hidden) and down (hidden, inner) of each expert


def random_weights(experts: int, inner: int, hidden: int) -> Weights:
    def matrix(rows: int, columns: int) -> Quantised:
        levels = torch.randint(1, 16, (rows, columns), dtype=torch.uint8)
        levels[:, 0] = 15  # a format with one scale a row finds this one: its largest weight is 7 times the scale
        return Quantised(4, levels, torch.randint(16, 32, (rows, 1)) / 4096, None)

    return {
        "gate": [matrix(inner, hidden) for _ in range(experts)],
        "up": [matrix(inner, hidden) for _ in range(experts)],
        "down": [matrix(hidden, inner) for _ in range(experts)],
    }


def routed(x: Tensor, weights: Tensor, ids: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The weighted sum (tokens, hidden) of each token's experts; `expert(e, x)` is one expert's output for its rows."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for e in ids.unique().tolist():
        rows, places = (ids == e).nonzero(as_tuple=True)
        out.index_add_(0, rows, expert(e, x[rows]) * weights[rows, places, None])
    return out

"""The router of a mixture-of-experts layer: what its choice of experts is computed from."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from umbra.models.build import Build
from umbra.models.layers.base import ALL, Layer, Piece, Vector, nbytes_of
from umbra.ops.formats import Format


class Router(Layer):
    """A score for each expert: the product x W^T, computed whole on every rank. Its weight is never quantised; it is
    kept in the format `kind`, or in that of other small matrices. A `selection_bias` may belong to it in the
    checkpoint, or a `bias`, which is part of the scores."""

    def __init__(
        self,
        build: Build,
        hidden: int,
        experts: int,
        kind: Format | None = None,
        selection_bias: bool = False,
        bias: bool = False,
    ):
        super().__init__()
        self.ops = build.ops
        self.weight = build.matrix(experts, hidden, kind or build.formats.plain)
        self.score_bias = build.vector(experts) if bias else None
        self.elements, self.nbytes = experts * (hidden + bias), nbytes_of(self.weight, self.score_bias)
        self.e_score_correction_bias = SelectionBias(build, experts) if selection_bias else None

    @property
    def bias(self) -> Tensor | None:
        """The bias that is added to the scores when experts are chosen; None: there is none."""
        return self.e_score_correction_bias.values if self.e_score_correction_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x (T, hidden). -> scores (T, experts), in float32 if the weight is, else in the type of `x`"""
        return self.ops.linear(x, self.weight, self.score_bias)

    def pieces(self, path: str) -> Iterator[Piece]:
        shape, fill = (self.weight.rows, self.weight.columns), partial(self.weight.fill, 0)
        yield Piece(f"{path}.weight", shape, (ALL, ALL), fill, linear=True, router=True)
        if self.score_bias is not None:
            yield Piece(f"{path}.bias", shape[:1], (ALL,), self.score_bias.copy_)


class SelectionBias(Vector):
    """A float32 number for each expert, added to its score when experts are chosen."""

    def __init__(self, build: Build, experts: int):
        super().__init__(build.vector(experts, torch.float32))


class ExpertFactors(Vector):
    """A float32 number for each expert, by which its weight is multiplied once experts are chosen."""

    def __init__(self, build: Build, experts: int):
        super().__init__(build.vector(experts, torch.float32), mean=1.0)

"""Normalisation."""

from collections.abc import Iterator

from torch import Tensor

from models.build import Build
from models.layers.base import ALL, Layer, Piece


class RMSNorm(Layer):
    def __init__(self, build: Build, size: int, eps: float):
        super().__init__()
        self.ops, self.eps = build.ops, eps
        self.weight = build.vector(size)
        self.elements, self.nbytes = size, self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, sum) of `x` and `residual`; `residual` is None in the first layer, whose sum is `x`."""
        if residual is None:
            return self(x), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def pieces(self, path: str) -> Iterator[Piece]:
        yield Piece(f"{path}.weight", tuple(self.weight.shape), (ALL,), self.weight.copy_)

"""Normalisation."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from umbra.models.build import Build
from umbra.models.layers.base import ALL, Layer, Piece
from umbra.models.layers.linear import Source
from umbra.ops.parallel.groups import Group


class RMSNorm(Layer):
    """`build` is at the norm's path if the norm may have a bias. `order` is the order of the columns, if it is not the
    checkpoint's (models/layers/rotary.py). The checkpoint has the weight less `base`, by default `build.norm_base`."""

    def __init__(
        self, build: Build, size: int, eps: float, order: tuple[int, ...] | None = None, base: float | None = None
    ):
        super().__init__()
        self.base = build.norm_base if base is None else base
        self.ops, self.eps, self.source = build.ops, eps, Source("", size, slice(0, size), order)
        # One plus a small number would be rounded to 16 bits; norms take float32 beside these.
        self.weight = build.vector(size, torch.float32 if self.base else None)
        self.bias = build.vector(size) if build.stored.biased(build.path) else None
        self.elements = size if self.bias is None else 2 * size
        self.nbytes = self.elements * self.weight.itemsize

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps, self.bias)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, sum) of `x` and `residual`; `residual` is None in the first layer, whose sum is `x`."""
        if residual is None:
            return self(x), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, self.bias)

    def pieces(self, path: str) -> Iterator[Piece]:
        shape = (self.source.rows,)
        fill = self.source.fills(lambda part: self.weight.copy_(part.float() + self.base))
        yield Piece(f"{path}.weight", shape, (ALL,), fill, mean=1 - self.base)
        if self.bias is not None:
            yield Piece(f"{path}.bias", shape, (ALL,), self.source.fills(self.bias.copy_))


class ScaledNorm(RMSNorm):
    """RMSNorm whose weight is `factor` times the checkpoint's tensor of this layer's path with `suffix`."""

    def __init__(self, build: Build, size: int, eps: float, factor: float, suffix: str = ""):
        super().__init__(build, size, eps, base=0.0)
        self.factor, self.suffix = factor, suffix

    def pieces(self, path: str) -> Iterator[Piece]:
        name, shape = path + self.suffix, (len(self.weight),)
        yield Piece(name, shape, (ALL,), lambda part: self.weight.copy_(part.float() * self.factor), mean=1)


class WeightlessNorm(RMSNorm):
    """RMSNorm of which a checkpoint has no weight."""

    def __init__(self, build: Build, size: int, eps: float):
        super().__init__(build, size, eps, base=0.0)
        self.weight.fill_(1.0)
        self.elements = 0

    def pieces(self, path: str) -> Iterator[Piece]:
        yield from ()


class SplitRMSNorm(Layer):
    """RMSNorm of several vectors, each of which is split over the ranks of `group`: the mean square is that of the
    whole vector. One all-reduce serves all vectors. A vector's parts overlap where ranks hold copies of the same KV
    head; all elements then occur equally often, so the mean is that of the vector."""

    def __init__(self, build: Build, group: Group, sources: Sequence[Source], eps: float):
        super().__init__()
        self.ops, self.group, self.sources, self.eps = build.ops, group, sources, eps
        self.weights = [build.vector(source.kept) for source in sources]
        self.counts = [source.kept * group.size for source in sources]  # elements that each sum of squares has
        self.elements = sum(source.kept for source in sources)
        self.nbytes = sum(weight.nbytes for weight in self.weights)

    def forward(self, *parts: Tensor) -> list[Tensor]:
        """This rank's part (T, kept) of each vector. -> these parts of the normalised vectors"""
        if self.group.size == 1:
            return [self.ops.rms_norm(x, w, self.eps) for x, w in zip(parts, self.weights, strict=True)]
        return self.ops.split_rms_norm(parts, self.weights, self.counts, self.eps, self.group.all_reduce)

    def storages(self) -> Iterator[Tensor]:
        yield from self.weights

    def pieces(self, path: str) -> Iterator[Piece]:
        parent = path.rpartition(".")[0]
        for source, weight in zip(self.sources, self.weights, strict=True):
            fill = source.fills(weight.copy_)
            yield Piece(f"{parent}.{source.name}.weight", (source.rows,), (source.part,), fill, mean=1.0)

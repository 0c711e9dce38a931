"""`Layer`: a module that owns weights and names the checkpoint tensors that fill them.

A layer also takes its shard of a split model and sums or gathers what the split leaves on different ranks, so that
a model file contains none of that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from umbra.ops.interface import Matrix

ALL = slice(None)


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor of `shape`. This rank keeps the range `part` of it and stores that by calling `fill`; `fill`
    is None if other ranks keep the tensor.

    `fill` may return whether all values are finite numbers.

    `linear` marks the weight of a linear module, which may be quantised in the checkpoint; `fill` then takes a
    `Quantised` as well as a tensor. `router` marks a router's weight, which quantised checkpoints usually leave in
    floating point even if their config does not say so; also another small matrix of which that is true. With
    `by_input` the tensor (experts, rows, columns) is stored as (experts, columns, rows) if it is not quantised. `mean`
    and `spread` are those of random values in place of a checkpoint's.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[slice, ...] = ()
    fill: Callable[[Any], object] | None = None
    linear: bool = False
    router: bool = False
    by_input: bool = False
    mean: float = 0.0
    spread: float = 0.02

    @property
    def kept_shape(self) -> tuple[int, ...]:
        sizes = zip(self.part, self.shape, strict=True)
        return tuple(len(range(*part.indices(size))) for part, size in sizes)

    @property
    def kept_elements(self) -> int:
        return prod(self.kept_shape) if self.fill else 0


class Layer(nn.Module):
    """A module with weights of its own: `elements` values, which its pieces fill exactly, in `nbytes` of memory."""

    elements: int
    nbytes: int
    mapped = False  # whether it keeps its pieces where the checkpoint's files are mapped

    def pieces(self, path: str) -> Iterator[Piece]:
        """The checkpoint tensors that fill this layer, whose path in the model and the checkpoint is `path`."""
        raise NotImplementedError

    def storages(self) -> Iterator[Tensor]:
        """Every tensor that holds weights of this layer, in the layout of the ops implementation."""
        yield from self.parameters(recurse=False)
        for value in vars(self).values():
            yield from getattr(value, "storages", ())


class Vector(Layer):
    """Numbers that the checkpoint has under the name of this layer's path; `mean` is that of random ones."""

    def __init__(self, values: Tensor, mean: float = 0.0):
        super().__init__()
        self.values, self.mean = values, mean
        self.elements, self.nbytes = values.numel(), values.nbytes

    def pieces(self, path: str) -> Iterator[Piece]:
        yield Piece(path, tuple(self.values.shape), (ALL,), self.values.copy_, mean=self.mean)


class Separate(nn.Module):
    """A part of a model with a checkpoint of its own."""


def nbytes_of(weight: Matrix, bias: Tensor | None) -> int:
    return weight.nbytes + (0 if bias is None else bias.nbytes)


def layers_of(model: nn.Module) -> list[tuple[str, Layer]]:
    """(path, layer) of every layer of `model`, in the order in which the model defines them."""
    return [(path, layer) for path, layer in model.named_modules() if isinstance(layer, Layer)]

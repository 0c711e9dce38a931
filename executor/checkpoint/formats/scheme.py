"""What a format says of a matrix: the tensors that hold it, and how to read a part of it from them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from errors import UserError
from ops.format import GROUP_SIZES, Format, Quantised

FLOATS = ("BF16", "F16", "F32")


class Fetch(Protocol):
    """Parts of a checkpoint's tensors by name."""

    def __call__(self, name: str, *part: slice) -> Tensor: ...

    def __contains__(self, name: str) -> bool: ...


@dataclass(frozen=True)
class Needed:
    """A tensor of the checkpoint by its shape and the types that it may have, in safetensors' words."""

    shape: tuple[int, ...]
    types: tuple[str, ...] = FLOATS
    optional: bool = False


@dataclass(frozen=True)
class Stored:
    """One weight of the model: `read(fetch, *part)` gives a part of it."""

    tensors: dict[str, Needed]
    read: Callable[..., Tensor | Quantised] = field(repr=False)


def plain(name: str, shape: tuple[int, ...]) -> Stored:
    """A float tensor under its own name."""
    return Stored({name: Needed(shape)}, lambda fetch, *part: fetch(name, *part))


def check_sizes(module: str, *rules: tuple[str, int, str, int]) -> None:
    """(what, its size, of what it must be a multiple, that size)"""
    for what, size, unit, multiple in rules:
        if size % multiple:
            raise UserError(f"{module}: {size} {what} are no multiple of {unit}: {multiple}")


class Scheme(ABC):
    """How a checkpoint is quantised."""

    title: str  # for people
    format: Format | None  # keeps its weights as they are; None: nothing does, they become floats
    bits: int  # of a weight; 0: unquantised
    group: int  # columns that share a scale; -1: all of a row
    zeros: bool  # whether it has zero points

    @abstractmethod
    def quantised(self, module: str) -> bool:
        """Whether this linear module, such as "model.layers.0.self_attn.q_proj", is."""

    @abstractmethod
    def stored(self, module: str, rows: int, columns: int) -> Stored:
        """Where the weight (rows, columns) of a quantised module lies."""


def kept_as(bits: int, group: int, zeros: bool) -> Format | None:
    """The format that keeps integers of 4 or 8 bits; `group` -1: one scale a row, which all smaller groups have too."""
    if zeros and bits == 8:
        return None
    return Format({4: "q4", 8: "q8"}[bits], group if group > 0 else GROUP_SIZES[-1], zeros)


def in_words(bits: int, group: int, zeros: bool) -> str:
    groups = f"groups of {group}" if group > 0 else "one group a row"
    return f"{bits} bits in {groups}, {'with zero points' if zeros else 'symmetric'}"


class Unquantised(Scheme):
    title, format = "unquantised", None
    bits, group, zeros = 0, 0, False

    def quantised(self, module: str) -> bool:
        return False

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        return plain(f"{module}.weight", (rows, columns))

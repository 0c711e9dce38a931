"""The interface of a checkpoint format: which tensors store a matrix, and how to read a part of it from them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from errors import UserError
from ops.format import GROUP_SIZES, Format, Quantised

FLOATS = ("BF16", "F16", "F32")


class Fetch(Protocol):
    """Reads parts of a checkpoint's tensors by name."""

    def __call__(self, name: str, *part: slice) -> Tensor: ...

    def __contains__(self, name: str) -> bool: ...


@dataclass(frozen=True)
class Needed:
    """The shape that a tensor of the checkpoint must have, and the types that it may have, by safetensors' names."""

    shape: tuple[int, ...]
    types: tuple[str, ...] = FLOATS
    optional: bool = False


@dataclass(frozen=True)
class Stored:
    """How the checkpoint stores one weight of the model: `read(fetch, *part)` returns a part of the weight."""

    tensors: dict[str, Needed]
    read: Callable[..., Tensor | Quantised] = field(repr=False)


def plain(name: str, shape: tuple[int, ...]) -> Stored:
    """A weight that is stored as a tensor of floats under its own name."""
    return Stored({name: Needed(shape)}, lambda fetch, *part: fetch(name, *part))


def check_sizes(module: str, *rules: tuple[str, int, str, int]) -> None:
    """Refuse sizes of `module` that break a rule: (name of the size, size, name of its unit, size of the unit), where
    the first size must be a multiple of the second."""
    for what, size, unit, multiple in rules:
        if size % multiple:
            raise UserError(f"{module}: {size} {what} are no multiple of {unit}: {multiple}")


class Scheme(ABC):
    """How a checkpoint is quantised."""

    title: str  # name of the format in messages
    format: Format | None  # the format that keeps the weights bit for bit; None: there is none, they become floats
    bits: int  # bits of a weight; 0: unquantised
    group: int  # columns that share a scale; -1: all of a row
    zeros: bool  # whether it has zero points

    @abstractmethod
    def quantised(self, module: str) -> bool:
        """Whether the linear module of this path, such as "model.layers.0.self_attn.q_proj", is quantised."""

    @abstractmethod
    def stored(self, module: str, rows: int, columns: int) -> Stored:
        """How the weight (rows, columns) of a quantised module is stored."""


def kept_as(bits: int, group: int, zeros: bool) -> Format | None:
    """The format that keeps integers of 4 or 8 bits unchanged. `group` -1: a row has one scale, which smaller groups
    then share."""
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

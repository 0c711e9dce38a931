"""The interface of a checkpoint format: which matrices are quantised, which tensors store one, and how to read a part
of it from them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from umbra.base.errors import UserError
from umbra.executor.checkpoint.formats.patterns import Matches
from umbra.executor.checkpoint.index import renamed
from umbra.ops.formats import FORMATS, GROUP_SIZES, INTEGERS, Format
from umbra.ops.formats.quantised import Quantised
from umbra.ops.formats.rows import Alternating

FLOATS = ("BF16", "F16", "F32")


class Fetch(Protocol):
    """Reads parts of a checkpoint's tensors by name."""

    file_of: dict[str, Path]  # the file that each tensor is in

    def __call__(self, name: str, *part: slice) -> Tensor: ...

    def __contains__(self, name: str) -> bool: ...


@dataclass(frozen=True)
class Needed:
    """The shape that a tensor of the checkpoint must have, and the types that it may have, by safetensors' names. A
    single number may also have none. One of `zeros` has no meaning, unless it is also a weight of its own; all of its
    values must then be zero."""

    shape: tuple[int, ...]
    types: tuple[str, ...] = FLOATS
    optional: bool = False
    zeros: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape == self.shape or (self.shape == (1,) and shape == ())


@dataclass(frozen=True)
class Stored:
    """The storage of one weight of the model in the checkpoint: `read(fetch, *part)` returns a part of the weight."""

    tensors: dict[str, Needed]
    read: Callable[..., Tensor | Quantised | Alternating] = field(repr=False)


def plain(name: str, shape: tuple[int, ...]) -> Stored:
    """A weight that is stored as a tensor of floats under its own name."""
    return Stored({name: Needed(shape)}, lambda fetch, *part: fetch(name, *part))


def by_input(name: str, experts: int, rows: int, columns: int) -> Stored:
    """A weight (experts, rows, columns) that is stored as floats (experts, columns, rows)."""
    shape = experts, columns, rows
    return Stored(
        {name: Needed(shape)}, lambda fetch, one, outputs, inputs: fetch(name, one, inputs, outputs).mT.contiguous()
    )


def check_sizes(module: str, *rules: tuple[str, int, str, int]) -> None:
    """Refuse sizes of `module` that break a rule: (name of the size, size, name of its unit, size of the unit), where
    the first size must be a multiple of the second."""
    for what, size, unit, multiple in rules:
        if size % multiple:
            raise UserError(f"{module}: {size} {what} are no multiple of {unit}: {multiple}")


class Encoding(ABC):
    """One way to store the weights of quantised modules."""

    title: str  # its name in messages
    format: Format | None  # the format that the weights are kept in; None: there is none, they become floats
    exact = True  # whether `format` keeps them bit for bit
    bits: int  # bits of a weight
    group: int  # columns that share a scale; -1: all of a row
    zeros: bool  # whether it has zero points
    signs: tuple[str, ...]  # last names of tensors: a module that has them all is stored in this way

    @abstractmethod
    def stored(self, module: str, rows: int, columns: int, /) -> Stored:
        """Returns the storage of a quantised module's weight (rows, columns)."""

    def stacked(self, module: str, experts: int, rows: int, columns: int, /) -> Stored:
        """Returns the storage of a weight (experts, rows, columns), of which one expert is read at a time."""
        raise UserError(f"{module}: a tensor of all experts is not read from {self.title}")

    def tensors(self, module: str) -> tuple[str, ...]:
        """The names of the tensors that `signs` stand for."""
        return tuple(f"{module}.{sign}" for sign in self.signs)


class Scheme(ABC):
    """The quantisation of a checkpoint: which modules, and how each of them. A module here is a linear one, named by
    its path in the model, such as "model.layers.0.self_attn.q_proj"."""

    title: str  # name of the format in messages
    encodings: tuple[Encoding, ...]  # the ways in which modules are stored, the main one first
    only_experts = False  # whether it is for experts and no other modules
    # The checkpoint's tensors: the model's name of each, with the name that it has in the files. None: no files.
    names: Mapping[str, str] | None = None
    aliases: Mapping[str, str] = MappingProxyType({})  # parts of names in the files, each with the model's

    @abstractmethod
    def said(self, *spellings: str) -> Encoding | None:
        """Returns the encoding that the config gives the module of which these are spellings; None: floats."""

    def encoding(self, module: str) -> Encoding | None:
        """Returns the encoding of the module; None: floats. The names of the files' tensors decide. If there are no
        files, or they do not hold the module, the config does."""
        said = self.said(*self._spellings(module))
        if self.names is None:
            return said
        for encoding in (said, *self.encodings):
            if encoding and all(tensor in self.names for tensor in encoding.tensors(module)):
                return encoding
        return None if f"{module}.weight" in self.names or module in self.names else said

    def weight(self, name: str, shape: tuple[int, ...], linear: bool) -> Stored | None:
        """Returns the storage of any weight, not only of a linear module, where the files alone say it. None: those of
        linear modules are stored as their encodings say, the others as floats."""
        return None

    def biased(self, path: str) -> bool:
        """Returns whether the module or norm at `path` has a bias although its family has none there."""
        return False

    def holds(self, module: str) -> bool:
        """Returns whether the files hold the module, in floats or quantised."""
        signs = ("weight", *(encoding.signs[0] for encoding in self.encodings))
        return any(name in (self.names or ()) for name in (module, *(f"{module}.{sign}" for sign in signs)))

    def lacks(self, module: str) -> bool:
        """Returns whether there are files and none holds the module."""
        return self.names is not None and not self.holds(module)

    def contradicts(self, module: str) -> bool:
        """Returns whether the files store the module otherwise than the config says."""
        return self.encoding(module) is not self.said(*self._spellings(module))

    def kept(self, module: str) -> Format | None:
        """The format that keeps the module's weights bit for bit; None: there is none, or they are floats."""
        encoding = self.encoding(module)
        return encoding.format if encoding else None

    def table(self, module: str) -> Format | None:
        """The format that keeps an embedding's rows bit for bit; None: they are floats."""
        return None

    def _spellings(self, module: str) -> tuple[str, str]:
        """The module's path in the model, and with the parts that names in the files may have instead."""
        return module, renamed(module, ((ours, theirs) for theirs, ours in self.aliases.items()))


class Ruled(Scheme):
    """Every module of the decoder, and the head if `with_head`, is stored as the first of `rules` says that matches it,
    and as `main` if none does. Encodings with the same title are one."""

    def __init__(self, main: Encoding, rules: Iterable[tuple[Matches, Encoding | None]], with_head: bool = False):
        encodings = {main.title: main}
        self.rules = [(matches, e and encodings.setdefault(e.title, e)) for matches, e in rules]
        self.encodings, self.with_head = tuple(encodings.values()), with_head
        self.title = ", ".join(encodings)

    def said(self, *spellings: str) -> Encoding | None:
        if not (".layers." in spellings[0] or (self.with_head and spellings[0] == "lm_head")):
            return None
        matching = (encoding for matches, encoding in self.rules if any(map(matches, spellings)))
        return next(matching, self.encodings[0])


def kept_as(bits: int, group: int, zeros: bool, ordered: bool = False) -> Format | None:
    """The format that keeps integers of 4 or 8 bits unchanged. `group` -1: a row has one scale, which smaller groups
    then share. `ordered`: the columns of a group are not neighbours, so that 4 bits are rounded to 8."""
    if ordered:
        return FORMATS[INTEGERS[8].name] if bits == 4 else None
    if zeros and bits == 8:
        return None
    return Format(INTEGERS[bits].name, group if group > 0 else GROUP_SIZES[-1], zeros)


def in_words(bits: int, group: int, zeros: bool, ordered: bool = False) -> str:
    groups = f"groups of {group}" if group > 0 else "one group a row"
    order = " in activation order" if ordered else ""
    return f"{bits} bits in {groups}{order}, {'with zero points' if zeros else 'symmetric'}"


class Unquantised(Scheme):
    title, encodings = "unquantised", ()

    def said(self, *spellings: str) -> None:
        return None

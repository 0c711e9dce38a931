"""`Build`: everything that layers are made from, such as ops, formats, and this rank's position in the splits."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.models.eagle3_config import Eagle3Config
from umbra.ops.formats import FORMATS, GROUP_SIZES, LARGEST_GROUP, Format
from umbra.ops.interface import Exchange, ExpertKind, ExpertMatrices, Matrix, Ops, fixed
from umbra.ops.parallel.groups import Parallel


@dataclass(frozen=True)
class Formats:
    """The formats that weights are kept in: `linear` for linear modules and experts, `head` for the output head, and
    `plain` for routers, which are small, and for the embedding, of which a token reads one row."""

    plain: Format
    linear: Format
    head: Format
    # Set if `linear` is the checkpoint's own quantisation: the format that keeps the quantised weights of the module at
    # a path as they are, or None for a module that becomes `rest`.
    own: Callable[[str], Format | None] | None = None
    rest: Format | None = None  # beside `own`: the format of the other linear modules; None: `plain`
    table: Format | None = None  # of an embedding that is kept quantised, as the checkpoint has it; None: `plain`
    mixed: bool = False  # whether rows of a matrix, and the matrices of an expert, may be in several formats


class MixtureExperts(ExpertMatrices, Protocol):
    """One layer's experts, which compute their mixture. All are in the host's memory, some on the device as well."""

    def mixture(self, x: Tensor, weights: Tensor, ids: Tensor, first_expert: int | None) -> Tensor:
        """Returns the same as `Ops.moe`, whichever experts are in the device's memory."""


class Shadows(Protocol):
    """Makes the experts of layers that have shadows."""

    def experts(
        self, path: str, here: slice, inner: int, hidden: int, format: Format, kind: ExpertKind
    ) -> MixtureExperts | None:
        """Makes the experts in the range `here` of the layer at `path`. Returns None if the layer has no shadows; its
        experts then stay in the device's memory."""


@dataclass(frozen=True)
class DraftParts:
    """The parts of a model for speculative decoding."""

    tokens: int = 0  # most drafted tokens of a sequence in a step
    mtp: bool = False  # whether the model's own layer for multi-token prediction is made
    eagle3: Eagle3Config | None = None  # the head that is made


@dataclass(frozen=True)
class StoredModules:
    """Answers questions about the checkpoint's module at a path: no to all, where there is no checkpoint."""

    biased: Callable[[str], bool] = lambda path: False  # whether it has a bias, even if its family has none
    holds: Callable[[str], bool] = lambda path: False  # whether it is there, where files of a family differ
    lacks: Callable[[str], bool] = lambda path: False  # whether there are weights, but not of the module


@dataclass(frozen=True)
class Build:
    """The parts and settings that layers are made from."""

    ops: Ops
    parallel: Parallel
    formats: Formats
    dtype: torch.dtype  # type of the embedding and the KV cache
    device: torch.device
    max_positions: int  # tokens of the longest sequence that the case allows
    drafts: DraftParts = DraftParts()
    shadows: Shadows | None = None
    exchange: Exchange | None = None  # over all ranks, where a rank has its own tokens and whole experts
    path: str = ""  # path of the module that is being made, as in the checkpoint
    stored: StoredModules = StoredModules()
    norm_base: float = 0.0  # added to norm weights at load (1.0 where checkpoints store weight - 1)

    @property
    def of_head(self) -> "Build":
        """The Build of a head for drafts, whose weights are floats in a checkpoint of its own. They become 8 bits where
        the output head does."""
        plain, format = self.formats.plain, self.formats.head
        format = format if format == FORMATS["q8"] else dataclasses.replace(plain, tiled=True)
        formats = Formats(plain, format, format)
        return Build(self.ops, self.parallel, formats, self.dtype, self.device, self.max_positions)

    def at(self, name: str) -> "Build":
        """Returns this Build for the child module `name`."""
        return dataclasses.replace(self, path=f"{self.path}.{name}" if self.path else name)

    def linear(self, names: Sequence[str], *columns: tuple[int, int]) -> Format:
        """The format of a matrix that holds the linear modules `names`. Each of `columns` is (input columns of a
        module, ranks that they are split over), since quantisation groups must not cross the borders between ranks."""
        if self.formats.own is None:
            return self.formats.linear
        own = {self.formats.own(f"{self.path}.{name}") for name in names}
        format = own.pop()
        if own or format is None:  # a matrix has one format
            return self.formats.rest or dataclasses.replace(self.formats.plain, tiled=True)
        # Part of a quantisation group is a smaller group with the same scale.
        for group in (LARGEST_GROUP, *reversed(GROUP_SIZES)):
            if format.group % group == 0 and all(count // parts % group == 0 for count, parts in columns):
                return dataclasses.replace(format, group=group)
        count, parts = next((count, parts) for count, parts in columns if count // parts % GROUP_SIZES[0])
        fine = [n for n in range(1, count + 1) if count % n == 0 and count // n % GROUP_SIZES[0] == 0]
        raise UserError(
            f"{self.path}.{names[0]}: {count} quantised columns over {parts} ranks are {count // parts} on each, no "
            f"multiple of {GROUP_SIZES[0]}: split them over {', '.join(map(str, fine)) or 'none, with method: none'}"
        )

    def expert_format(self, wide: Sequence[str], tall: Sequence[str], *columns: tuple[int, int]) -> Format:
        """The format of experts with the modules `wide`, their gates and ups, and `tall`, their downs, whose `columns`
        are as of `linear`."""
        if not self.formats.mixed:
            return self.linear([*wide, *tall], *columns)
        format, down = (self.linear(names, own) for names, own in zip((wide, tall), columns, strict=True))
        return format if down == format else dataclasses.replace(format, down=down)

    def matrix(self, rows: int, columns: int, format: Format) -> Matrix:
        return self.ops.matrix(rows, columns, format, self.device)

    def stack(self, modules: Sequence[tuple[str, int]], columns: int) -> Matrix:
        """A matrix of linear modules, (name, rows) of each, one below the other."""
        if not self.formats.mixed:
            format = self.linear([name for name, _ in modules], (columns, 1))
            return self.matrix(sum(rows for _, rows in modules), columns, format)
        formats = [(rows, self.linear([name], (columns, 1))) for name, rows in modules]
        runs = [(sum(rows for rows, _ in run), format) for format, run in groupby(formats, key=itemgetter(1))]
        if runs[1:]:
            return self.ops.stack(runs, columns, self.device)
        return self.matrix(runs[0][0], columns, runs[0][1])

    def table(self, rows: int, columns: int) -> Tensor:
        """Allocates a table of which each token reads one row."""
        return fixed(self.ops.table(rows, columns, self.dtype, self.device))

    def embedding(self, rows: int, columns: int) -> Tensor | Matrix:
        kept = self.formats.table
        return self.matrix(rows, columns, kept) if kept else self.table(rows, columns)

    def vector(self, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocates a norm's weight or a bias, by default in the type that the ops take best."""
        return fixed(torch.empty(size, dtype=dtype or self.ops.vector_type(self.dtype), device=self.device))

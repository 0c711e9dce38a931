"""Rows of a quantised matrix: levels, scales and zero points, and the weights that they stand for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING

from umbra.ops.formats.spec import Format, FormatSpec

if TYPE_CHECKING:
    from torch import Tensor

    from umbra.ops.words import Words


@dataclass(frozen=True)
class Quantised:
    """m rows of a quantised matrix, K columns: w = (value of the level - zero) * scale."""

    spec: FormatSpec
    levels: "Tensor | Words"  # (m, K) uint8, below 2^bits; int8, less 128; or float8_e4m3fn
    scales: "Tensor"  # (m, K / group), floating
    zeros: "Tensor | Words | None"  # (m, K / group) uint8; None: the format's `middle` everywhere

    @property
    def shape(self) -> tuple[int, ...]:
        return self.levels.shape

    @property
    def group(self) -> int:
        return self.levels.shape[1] // self.scales.shape[1]

    @property
    def finite(self) -> bool:
        """Says whether no scale is NaN or infinite."""
        return bool(self.scales.float().isfinite().all())

    @property
    def plain_levels(self) -> "Tensor":
        """The levels (m, K) in uint8 or float8_e4m3fn."""
        return _plain(self.levels)

    @property
    def plain_zeros(self) -> "Tensor | None":
        """The zero points (m, K / group) in uint8."""
        return None if self.zeros is None else _plain(self.zeros)

    def fits(self, format: Format) -> bool:
        """Returns whether a matrix kept in `format` stores these levels unchanged."""
        whole = format.group and self.group % format.group == 0
        return bool(format.kind == self.spec.name and whole and (self.zeros is None or format.zeros))

    def in_groups(self, group: int) -> "tuple[Tensor, Tensor | None]":
        """The scales and zero points for smaller groups: each repeats those of the larger group that contains it."""
        times = self.group // group
        zeros = self.plain_zeros
        zeros = None if zeros is None else zeros.repeat_interleave(times, dim=1)
        return self.scales.repeat_interleave(times, dim=1), zeros

    def values(self) -> "Tensor":
        """The values (m, K) that the levels stand for, in float32, before zero points are subtracted."""
        levels = self.plain_levels
        if self.spec.codes:
            return levels.new_tensor(self.spec.codes, dtype=self.scales.float().dtype)[levels.int()]
        return levels.float()

    def floats(self) -> "Tensor":
        """The dequantised weights, (m, K) float32."""
        zeros = self.plain_zeros
        points = self.spec.middle if zeros is None else zeros.float()[..., None]
        groups = self.values().unflatten(1, (-1, self.group))  # (m, K / group, group)
        return ((groups - points) * self.scales.float()[..., None]).flatten(1)


@dataclass(frozen=True)
class Nested(Quantised):
    """m rows in one of the formats whose scales have scales: w = (d * scale) * (value of the level - middle)
    - dmin * minimum, all in float32. `scales` are bytes, one for each `columns` of the format's `Nesting`, unsigned
    with minimums and else signed, or e4m3 floats. `zeros` are the minimums, uint8 (m, K / 32). d and dmin are the same
    for `group` columns, which `columns` makes smaller where it cuts."""

    d: "Tensor"  # (m, K / group) float16; of e4m3 floats (m, 1) float32
    dmin: "Tensor | None" = None

    @property
    def group(self) -> int:
        return self.levels.shape[1] // self.d.shape[1]

    @property
    def finite(self) -> bool:
        floats = self.d, self.dmin, self.scales.float()
        return all(bool(x.isfinite().all()) for x in floats if x is not None)

    def fits(self, format: Format) -> bool:
        return format.kind == self.spec.name and self.group % format.group == 0

    def floats(self) -> "Tensor":
        values = self.values() - self.spec.middle
        groups = values.unflatten(1, (self.scales.shape[1], -1)) * _times(self.d, self.scales)[..., None]
        if self.dmin is not None and self.plain_zeros is not None:
            groups -= _times(self.dmin, self.plain_zeros)[..., None]
        return groups.flatten(1)

    def rows(self, rows: "slice | list[int]") -> "Nested":
        """These rows, in this order."""
        zeros, dmin = (None if x is None else x[rows] for x in (self.plain_zeros, self.dmin))
        return replace(
            self, levels=self.plain_levels[rows], scales=self.scales[rows], zeros=zeros, d=self.d[rows], dmin=dmin
        )

    def columns(self, first: int, end: int) -> "Nested":
        """Columns `first` to `end` of a rank's share, both multiples of 32, in the largest groups that divide both and
        the group."""
        unit = gcd(first, end)
        return self.units(range(first // unit, end // unit), unit)

    def units(self, numbers: "Sequence[int]", unit: int) -> "Nested":
        """The columns of these units in turn, each of `unit` columns, a multiple of 32, in the largest groups that
        divide both."""
        group, all = gcd(self.group, unit), self.levels.shape[1]

        def cut(x: "Tensor", shared: int) -> "Tensor":  # an element for each so many columns
            x = x.repeat_interleave(all // x.shape[1] // shared, 1)
            return x.unflatten(1, (-1, unit // shared))[:, list(numbers)].flatten(1)

        zeros, dmin = self.plain_zeros, self.dmin
        return replace(
            self,
            levels=cut(self.plain_levels, 1),
            scales=cut(self.scales, all // self.scales.shape[1]),
            zeros=None if zeros is None else cut(zeros, 32),
            d=cut(self.d, group),
            dmin=None if dmin is None else cut(dmin, group),
        )


def floats(part: "Tensor | Quantised") -> "Tensor":
    """`part` as a float tensor: dequantised if it is quantised, otherwise unchanged."""
    return part.floats() if isinstance(part, Quantised) else part


def _times(halves: "Tensor", bytes_: "Tensor") -> "Tensor":
    """Each byte times the float of its group."""
    return halves.float().repeat_interleave(bytes_.shape[1] // halves.shape[1], 1) * bytes_.float()


def _plain(levels: "Tensor | Words") -> "Tensor":
    import torch

    if not isinstance(levels, torch.Tensor):
        return levels.unpacked()
    return levels.view(torch.uint8) ^ 128 if levels.dtype == torch.int8 else levels

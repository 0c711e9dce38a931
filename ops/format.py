"""The formats of matrices, and weights as a quantised checkpoint stores them.

The launcher reads GROUP_SIZES and must start quickly, so this file does not import torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from torch import Tensor

    from umbra.ops.words import Words

GROUP_SIZES = (32, 64, 128)  # columns of a row that may share a scale: the sizes of a quantisation group
LARGEST_GROUP = 256  # of formats with nested scales


@dataclass(frozen=True)
class Format:
    """The storage format of a matrix: a float type, or quantised (`q8`, `q4`) as integers with one float16 scale for
    every `group` columns of a row and, with `zeros`, a zero point with each scale, or quantised as floats: of eight
    bits (`f8`, e4m3) with a float32 scale, or of four bits (`mxfp4`, e2m1) with a power of two (e8m0). `w8a8` is of
    eight bits with a float32 scale for every row, and a device with products of integers (Ascend) rounds its
    activations to eight bits with a scale for every token. GGUF's `q4_k`, `q5_k`, `q6_k` and `iq4` have scales of
    scales, for every `group` columns (`Nested`). With `tiled` the device may store a float matrix in its own tile order
    (Ascend's FRACTAL_NZ). Of experts it is the format of all matrices, or beside `down` of gate and up."""

    kind: str
    group: int = 0
    zeros: bool = False
    tiled: bool = False
    down: "Format | None" = None

    @property
    def quantised(self) -> bool:
        return self.group > 0


FORMATS = {kind: Format(kind) for kind in ("float32", "bfloat16", "float16")}
FORMATS |= {kind: Format(kind, group=32) for kind in ("q8", "q4")}
F8 = Format("f8", group=128)
LARGEST_F8 = 448.0
MXFP4 = Format("mxfp4", group=32)
W8A8 = Format("w8a8", group=128)
NESTED = {kind: Format(kind, group=LARGEST_GROUP) for kind in ("q4_k", "q5_k", "q6_k", "iq4")}
# The value of each code of four bits, and of iq4's.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Quantised:
    """m rows of a quantised matrix, K columns: w = (level - zero) * scale, or level * scale if levels are floats, which
    they are in mxfp4: levels of four bits are the codes of e2m1 floats if the scales are float8_e8m0fnu."""

    bits: int  # 4 or 8
    levels: "Tensor | Words"  # (m, K) uint8, below 2^bits; int8, less 128; or float8_e4m3fn
    scales: "Tensor"  # (m, K / group), floating
    # (m, K / group) uint8; None: 2^(bits - 1) everywhere, or none at all for floats
    zeros: "Tensor | Words | None"
    # Made for activations of eight bits: w8a8, levels in int8, one float32 scale a row.
    int8_inputs: bool = field(default=False, kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.levels.shape

    @property
    def group(self) -> int:
        return self.levels.shape[1] // self.scales.shape[1]

    @property
    def finite(self) -> bool:
        """Whether no scale is NaN or infinite."""
        return bool(self.scales.float().isfinite().all())

    @property
    def float8(self) -> bool:
        return self.levels.is_floating_point()

    @property
    def float4(self) -> bool:
        return self.scales.dtype.itemsize == 1

    @property
    def middle(self) -> int:
        """Every zero point, where there are none."""
        return 0 if self.float8 or self.float4 else 1 << (self.bits - 1)

    @property
    def plain_levels(self) -> "Tensor":
        """The levels (m, K) in uint8 or float8_e4m3fn."""
        return _plain(self.levels)

    @property
    def plain_zeros(self) -> "Tensor | None":
        """The zero points (m, K / group) in uint8."""
        return None if self.zeros is None else _plain(self.zeros)

    def fits(self, format: Format) -> bool:
        """Whether a matrix kept in `format` stores these levels unchanged."""
        kind = "f8" if self.float8 else "mxfp4" if self.float4 else {4: "q4", 8: "q8"}[self.bits]
        kind = "w8a8" if self.int8_inputs else kind
        whole = format.group and self.group % format.group == 0
        return bool(format.kind == kind and whole and (self.zeros is None or format.zeros))

    def in_groups(self, group: int) -> "tuple[Tensor, Tensor | None]":
        """The scales and zero points for smaller groups: each repeats those of the larger group that contains it."""
        times = self.group // group
        zeros = self.plain_zeros
        zeros = None if zeros is None else zeros.repeat_interleave(times, dim=1)
        return self.scales.repeat_interleave(times, dim=1), zeros

    def floats(self) -> "Tensor":
        """The dequantised weights, (m, K) float32."""
        zeros, levels = self.plain_zeros, self.plain_levels
        points = self.middle if zeros is None else zeros.float()[..., None]
        levels = (
            levels.new_tensor(E2M1, dtype=self.scales.float().dtype)[levels.int()] if self.float4 else levels.float()
        )
        groups = levels.unflatten(1, (-1, self.group))  # (m, K / group, group)
        return ((groups - points) * self.scales.float()[..., None]).flatten(1)


@dataclass(frozen=True)
class Nested(Quantised):
    """m rows in one of GGUF's formats whose scales have scales: w = (d * scale) * level - dmin * minimum in q4_k and
    q5_k, d * scale * (level - 32) in q6_k, and d * scale * IQ4[level] in iq4, all in float32. `levels` are uint8 of 4,
    5, 6 and 4 `bits`. `scales` are bytes (m, K / 32), int8 in iq4 and in q6_k, where they are (m, K / 16). `zeros` are
    the minimums, uint8 (m, K / 32). d and dmin are the same for `group` columns, which `columns` makes smaller where it
    cuts.

    Of GGUF's types Q4_K, Q5_K, Q6_K and IQ4_XS are such, with groups of 256. With groups of 32 so are IQ4_NL, with
    scales of 1; Q4_1 as q4_k and Q5_1 as q5_k, with scales and minimums of 1 and dmin = -m; Q5_0 as q5_k, with scales
    of 1, minimums of 16 and dmin = d."""

    d: "Tensor"  # (m, K / group) float16
    dmin: "Tensor | None" = None

    @property
    def kind(self) -> str:
        if self.dmin is not None:
            return "q4_k" if self.bits == 4 else "q5_k"
        return "q6_k" if self.bits == 6 else "iq4"

    @property
    def group(self) -> int:
        return self.levels.shape[1] // self.d.shape[1]

    @property
    def finite(self) -> bool:
        return all(bool(x.isfinite().all()) for x in (self.d, self.dmin) if x is not None)

    def fits(self, format: Format) -> bool:
        return format.kind == self.kind and self.group % format.group == 0

    def floats(self) -> "Tensor":
        values = self.plain_levels.float()
        if self.kind == "iq4":
            values = values.new_tensor(IQ4)[self.plain_levels.int()]
        elif self.kind == "q6_k":
            values -= 32
        groups = values.unflatten(1, (self.scales.shape[1], -1)) * _times(self.d, self.scales)[..., None]
        if self.dmin is not None and self.plain_zeros is not None:
            groups -= _times(self.dmin, self.plain_zeros)[..., None]
        return groups.flatten(1)

    def rows(self, rows: "slice | list[int]") -> "Nested":
        zeros, dmin = (None if x is None else x[rows] for x in (self.plain_zeros, self.dmin))
        return replace(
            self, levels=self.plain_levels[rows], scales=self.scales[rows], zeros=zeros, d=self.d[rows], dmin=dmin
        )

    def columns(self, first: int, end: int) -> "Nested":
        """Those of a rank, from a multiple of 32 to another, in the largest groups that divide all three."""
        unit = gcd(first, end)
        return self.units(range(first // unit, end // unit), unit)

    def units(self, numbers: "Sequence[int]", unit: int) -> "Nested":
        """The columns of these units in turn, each of `unit` columns, a multiple of 32, in the largest groups that
        divide both."""
        group, all = gcd(self.group, unit), self.levels.shape[1]

        def cut(x: "Tensor", each: int) -> "Tensor":  # an element for each so many columns
            x = x.repeat_interleave(all // x.shape[1] // each, 1)
            return x.unflatten(1, (-1, unit // each))[:, list(numbers)].flatten(1)

        zeros, dmin = self.plain_zeros, self.dmin
        return replace(
            self,
            levels=cut(self.plain_levels, 1),
            scales=cut(self.scales, all // self.scales.shape[1]),
            zeros=None if zeros is None else cut(zeros, 32),
            d=cut(self.d, group),
            dmin=None if dmin is None else cut(dmin, group),
        )


@dataclass(frozen=True)
class Undecoded:
    """m rows in the blocks of one of ggml's types, as a GGUF file has them."""

    type: int  # ggml's number
    data: "Tensor"  # (m, blocks of a row, bytes of a block) uint8
    skipped: int  # columns that come before these in the first block, a multiple of 32
    columns: int
    kept: Format | None  # the format that keeps them
    decode: "Callable[[Tensor], Tensor | Quantised]"  # all columns of blocks, as levels or as floats

    @cached_property
    def decoded(self) -> "Tensor | Quantised":
        values, end = self.decode(self.data), self.skipped + self.columns
        if isinstance(values, Nested) and (self.skipped, end) != (0, values.levels.shape[1]):
            return values.columns(self.skipped, end)
        return values if isinstance(values, Quantised) else values[:, self.skipped : end]


class Blocks(Quantised):
    """Rows that the CPU's packing reads as they are, and that others decode."""

    of: Undecoded

    def __init__(self, of: Undecoded):
        vars(self)["of"] = of  # the fields of a frozen class cannot be set otherwise

    @property
    def _levels(self) -> Quantised:
        if not isinstance(self.of.decoded, Quantised):
            raise AssertionError("a type that no format keeps has floats only")
        return self.of.decoded

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.of.data), self.of.columns

    bits = property(lambda self: self._levels.bits)
    levels = property(lambda self: self._levels.levels)
    scales = property(lambda self: self._levels.scales)
    zeros = property(lambda self: self._levels.zeros)

    @property
    def finite(self) -> bool:
        decoded = self.of.decoded
        return decoded.finite if isinstance(decoded, Quantised) else bool(decoded.isfinite().all())

    def fits(self, format: Format) -> bool:
        kept = self.of.kept
        return bool(kept and kept.kind == format.kind and kept.group % format.group == 0 and not format.zeros)

    def floats(self) -> "Tensor":
        return floats(self.of.decoded)

    def rows(self, rows: "list[int]") -> "Blocks":
        return Blocks(replace(self.of, data=self.of.data[rows]))


class Alternating(NamedTuple):
    """A part (m, ...) that is stored in two: the rows 0, 2, 4 ... and the rows 1, 3, 5 ..."""

    even: "Tensor | Quantised"
    odd: "Tensor | Quantised"


def every_other(part: "Tensor | Quantised") -> "tuple[Tensor | Quantised, Tensor | Quantised]":
    """The rows 0, 2, 4 ... and the rows 1, 3, 5 ... of `part` (m, ...), in its memory."""
    if not isinstance(part, Quantised):
        return part[::2], part[1::2]
    if part.zeros is not None or isinstance(part, Nested):
        raise AssertionError("alternating rows have no zero points")
    even, odd = (replace(part, levels=part.levels[first::2], scales=part.scales[first::2]) for first in (0, 1))
    return even, odd


def in_order(part: "Tensor | Quantised", order: list[int]) -> "Tensor | Quantised":
    """The rows of `part` (m, ...) in the order `order`, m row numbers."""
    if isinstance(part, Nested | Blocks):
        return part.rows(order)
    if not isinstance(part, Quantised):
        return part[order]
    zeros, levels = part.plain_zeros, cast("Tensor", part.levels) if part.int8_inputs else part.plain_levels
    return replace(part, levels=levels[order], scales=part.scales[order], zeros=None if zeros is None else zeros[order])


def in_int8(part: "Tensor") -> Quantised:
    """`part` (m, K) rounded to the nearest of 255 steps, with one scale a row."""
    import torch

    wide = part.float()
    scales = wide.abs().amax(1, keepdim=True) / 127
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 1, scales)  # all weights become zero
    return Quantised(8, (wide / scales).round().to(torch.int8), scales, None, int8_inputs=True)


def floats(part: "Tensor | Quantised") -> "Tensor":
    """`part` as a float tensor: dequantised if it is quantised, otherwise unchanged."""
    return part.floats() if isinstance(part, Quantised) else part


def _times(halves: "Tensor", bytes_: "Tensor") -> "Tensor":
    """Each byte times the half of its group."""
    return halves.float().repeat_interleave(bytes_.shape[1] // halves.shape[1], 1) * bytes_.float()


def _plain(levels: "Tensor | Words") -> "Tensor":
    import torch

    if not isinstance(levels, torch.Tensor):
        return levels.unpacked()
    return levels.view(torch.uint8) ^ 128 if levels.dtype == torch.int8 else levels

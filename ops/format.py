"""The formats of matrices, and weights as a quantised checkpoint stores them.

The launcher reads GROUP_SIZES and must start quickly, so this file does not import torch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

GROUP_SIZES = (32, 64, 128)  # columns of a row that may share a scale: the sizes of a quantisation group


@dataclass(frozen=True)
class Format:
    """How a matrix is kept: in a float type, or quantised (`q8`, `q4`) as integers with one float16 scale for every
    `group` columns of a row and, with `zeros`, a zero point beside each scale, or quantised (`f8`) as floats of eight
    bits (e4m3) with a float32 scale. With `tiled` the device may store a float matrix in its own tile order (Ascend's
    FRACTAL_NZ)."""

    kind: str
    group: int = 0
    zeros: bool = False
    tiled: bool = False

    @property
    def quantised(self) -> bool:
        return self.group > 0


FORMATS = {kind: Format(kind) for kind in ("float32", "bfloat16", "float16")}
FORMATS |= {kind: Format(kind, group=32) for kind in ("q8", "q4")}
F8 = Format("f8", group=128)
LARGEST_F8 = 448.0


@dataclass(frozen=True)
class Quantised:
    """m rows of a quantised matrix, K columns: w = (level - zero) * scale, or level * scale if levels are floats."""

    bits: int  # 4 or 8
    levels: "Tensor"  # (m, K) uint8, below 2^bits, or float8_e4m3fn
    scales: "Tensor"  # (m, K / group), floating
    zeros: "Tensor | None"  # (m, K / group) uint8; None: 2^(bits - 1) everywhere, or none at all for floats

    @property
    def group(self) -> int:
        return self.levels.shape[1] // self.scales.shape[1]

    @property
    def float8(self) -> bool:
        return self.levels.is_floating_point()

    def fits(self, format: Format) -> bool:
        """Whether a matrix kept in `format` stores these levels unchanged."""
        kind = "f8" if self.float8 else {4: "q4", 8: "q8"}[self.bits]
        whole = format.group and self.group % format.group == 0
        return bool(format.kind == kind and whole and (self.zeros is None or format.zeros))

    def in_groups(self, group: int) -> "tuple[Tensor, Tensor | None]":
        """The scales and zero points for smaller groups: each repeats those of the larger group that contains it."""
        times = self.group // group
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, dim=1)
        return self.scales.repeat_interleave(times, dim=1), zeros

    def floats(self) -> "Tensor":
        """The dequantised weights, (m, K) float32."""
        middle = 0 if self.float8 else 1 << (self.bits - 1)
        zeros = middle if self.zeros is None else self.zeros.float()[..., None]
        levels = self.levels.float().unflatten(1, (-1, self.group))  # (m, K / group, group)
        return ((levels - zeros) * self.scales.float()[..., None]).flatten(1)


def in_order(part: "Tensor | Quantised", order: list[int]) -> "Tensor | Quantised":
    """The rows of `part` (m, ...) in the order `order`, m row numbers."""
    if not isinstance(part, Quantised):
        return part[order]
    zeros = None if part.zeros is None else part.zeros[order]
    return Quantised(part.bits, part.levels[order], part.scales[order], zeros)


def floats(part: "Tensor | Quantised") -> "Tensor":
    """`part` as a float tensor: dequantised if it is quantised, otherwise unchanged."""
    return part.floats() if isinstance(part, Quantised) else part

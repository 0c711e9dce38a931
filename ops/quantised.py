"""Weights as a quantised checkpoint has them, on their way into an implementation's own layout."""

from dataclasses import dataclass

from torch import Tensor

from ops.interface import Format


@dataclass(frozen=True)
class Quantised:
    """m rows of a matrix with K columns: w = (level - zero) * scale."""

    bits: int  # 4 or 8
    levels: Tensor  # (m, K) uint8, below 2^bits
    scales: Tensor  # (m, K / group), floating
    zeros: Tensor | None  # (m, K / group) uint8; None: 2^(bits - 1) everywhere

    @property
    def group(self) -> int:
        return self.levels.shape[1] // self.scales.shape[1]

    def fits(self, format: Format) -> bool:
        """Whether a matrix kept in `format` keeps these levels as they are."""
        kind = {4: "q4", 8: "q8"}[self.bits]
        whole = format.group and self.group % format.group == 0
        return bool(format.kind == kind and whole and (self.zeros is None or format.zeros))

    def in_groups(self, group: int) -> tuple[Tensor, Tensor | None]:
        """Scales and zero points of smaller groups: those of the group that each was a part of."""
        times = self.group // group
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, dim=1)
        return self.scales.repeat_interleave(times, dim=1), zeros

    def floats(self) -> Tensor:
        """(m, K) float32"""
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros.float()[..., None]
        levels = self.levels.float().unflatten(1, (-1, self.group))  # (m, K / group, group)
        return ((levels - zeros) * self.scales.float()[..., None]).flatten(1)


def floats(part: Tensor | Quantised) -> Tensor:
    return part.floats() if isinstance(part, Quantised) else part

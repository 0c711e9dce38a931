"""Rows of a part of a matrix, quantised or not, picked and put in order."""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from umbra.ops.formats.ggml import Blocks
from umbra.ops.formats.quantised import Nested, Quantised

if TYPE_CHECKING:
    from torch import Tensor


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
    zeros, levels = part.plain_zeros, cast("Tensor", part.levels) if part.spec.int8_inputs else part.plain_levels
    return replace(part, levels=levels[order], scales=part.scales[order], zeros=None if zeros is None else zeros[order])

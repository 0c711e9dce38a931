"""Parts of packed or grouped dimensions."""

from collections.abc import Callable
from math import gcd
from typing import Any

from ops.words import Words


def covering(part: slice, count: int) -> tuple[slice, slice]:
    """(the words of a packed dimension that hold the elements `part`, the place of those elements within the words)"""
    first, end = part.start // count, -(-part.stop // count)
    return slice(first, end), slice(part.start - first * count, part.stop - first * count)


def groups_of(inputs: slice, group: int) -> tuple[slice, Callable[[Any], Any]]:
    """(the quantisation groups that hold the columns `inputs`, a function from the (m, groups) scales or zero points of
    them to those of `inputs`). Where `inputs` begins or ends inside a group, its groups are smaller ones with the same
    scales."""
    unit = gcd(group, inputs.start, inputs.stop)
    held, within = covering(slice(inputs.start // unit, inputs.stop // unit), group // unit)

    def cut(given: Any) -> Any:
        if unit == group:
            return given
        plain = given.unpacked() if isinstance(given, Words) else given
        return plain.repeat_interleave(group // unit, dim=1)[:, within]

    return held, cut

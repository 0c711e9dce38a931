"""Levels of 4 or 8 bits packed into int32, the first in the lowest bits, and parts of packed or grouped dimensions."""

from collections.abc import Callable
from math import gcd

import torch
from torch import Tensor


def unpack(words: Tensor, bits: int) -> Tensor:
    """(..., n) int32 -> (..., n, 32 / bits) uint8"""
    inner = words.clone(memory_format=torch.contiguous_format)
    bytes_ = inner.view(torch.uint8).unflatten(-1, (-1, 4))  # little-endian: the lowest bits first
    if bits == 8:
        return bytes_
    out = torch.empty(*bytes_.shape, 2, dtype=torch.uint8)
    torch.bitwise_and(bytes_, 15, out=out[..., 0])
    torch.bitwise_right_shift(bytes_, 4, out=out[..., 1])
    return out.flatten(-2)


def covering(part: slice, count: int) -> tuple[slice, slice]:
    """(the words of a packed dimension that hold the elements `part`, the place of those elements within the words)"""
    first, end = part.start // count, -(-part.stop // count)
    return slice(first, end), slice(part.start - first * count, part.stop - first * count)


def groups_of(inputs: slice, group: int) -> tuple[slice, Callable[[Tensor], Tensor]]:
    """(the quantisation groups that hold the columns `inputs`, a function from the (m, groups) scales of them to the
    scales of `inputs`). Where `inputs` begins or ends inside a group, its groups are smaller ones with the same
    scales."""
    unit = gcd(group, inputs.start, inputs.stop)
    held, within = covering(slice(inputs.start // unit, inputs.stop // unit), group // unit)
    return held, lambda scales: scales.repeat_interleave(group // unit, dim=1)[:, within]

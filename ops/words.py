"""Levels as checkpoints pack them: a few in each int32 word."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Words:
    """Levels (m, K) in int32 words, of any strides. A word holds 32 / bits neighbours of a row, the first in the lowest
    bits: `words` is (m, K bits / 32). With `order`, it holds eight neighbours of a column in four bits each, the j-th
    at the place order[j]: `words` is (m / 8, K)."""

    words: Tensor
    bits: int
    order: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.words.shape
        return (rows * len(self.order), columns) if self.order else (rows, columns * 32 // self.bits)

    def __getitem__(self, rows: slice) -> "Words":
        """Some rows, where each has words of its own."""
        if self.order:
            raise AssertionError("eight rows share a word")
        return Words(self.words[rows], self.bits)

    def is_floating_point(self) -> bool:
        return False

    def unpacked(self) -> Tensor:
        """(m, K) uint8: the reference of what csrc/kernels/panel.h does to sixteen rows at a time."""
        words = self.words.clone(memory_format=torch.contiguous_format)
        bytes_ = words.view(torch.uint8).unflatten(-1, (-1, 4))  # the lowest bits first
        rows, columns = self.shape
        if self.order:
            out = torch.empty(rows // len(self.order), len(self.order), columns, dtype=torch.uint8)
            for row, nibble in enumerate(self.order):
                pair = bytes_[..., nibble // 2]
                torch.bitwise_and(pair >> 4 if nibble % 2 else pair, 15, out=out[:, row])
            return out.flatten(0, 1)
        if self.bits == 8:
            return bytes_.flatten(-2)
        out = torch.empty(*bytes_.shape, 2, dtype=torch.uint8)
        torch.bitwise_and(bytes_, 15, out=out[..., 0])
        torch.bitwise_right_shift(bytes_, 4, out=out[..., 1])
        return out.flatten(1)

    def rows(self, part: slice) -> "Words | Tensor":
        """The levels (rows of the slice, K)"""
        return self if (part.start, part.stop) == (0, self.shape[0]) else self.unpacked()[part]

    def columns(self, part: slice) -> "Words | Tensor":
        """The levels (m, columns of the slice)"""
        return self if (part.start, part.stop) == (0, self.shape[1]) else self.unpacked()[:, part]

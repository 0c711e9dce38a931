"""Weights in the native layout: 16 rows side by side, quants and scales in planes of their own (csrc/matrix.h)."""

from itertools import pairwise

import torch
from torch import Tensor

from errors import UserError
from ops.cpu.engine import native, pointer

ROWS, BLOCK = 16, 32
CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "q8": 3, "q4": 4}
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "q8": 8, "q4": 4}
GROUP = 32  # columns that share a scale
ALIGNMENT = 64


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class PackedMatrices:
    """`count` matrices of (rows, columns). Each NUMA node has a buffer with its rows of every matrix, one matrix after
    another in each plane; rows are divided over the nodes in multiples of `unit`."""

    def __init__(self, count: int, rows: int, columns: int, format: str, unit: int = ROWS):
        quantised = format.startswith("q")
        if quantised and columns % GROUP:
            raise UserError(f"quantization: a matrix with {columns} columns cannot be cut into groups of {GROUP}")
        self.columns = columns
        self.nbytes = 0
        self.buffers, parts = [], []
        for node, (first, end) in enumerate(pairwise(native().split(padded(rows, unit) // unit))):
            part_rows = (end - first) * unit
            weights = count * part_rows * columns
            scales = weights // GROUP if quantised else 0
            quants = weights * BITS[format] // 8
            # Zeroed: padding rows must add nothing. The planes follow each other.
            buffer = native().Buffer(padded(quants, ALIGNMENT) + scales * 2, node)
            scales_at = buffer.address + padded(quants, ALIGNMENT) if quantised else 0
            group = GROUP if quantised else 0
            parts.append(native().Matrix(CODES[format], part_rows, columns, group, buffer.address, scales_at, 0))
            self.buffers.append(buffer)
            self.nbytes += quants + scales * 2
        self.handle = native().SplitMatrix(parts)

    def fill(self, index: int, row: int, part: Tensor) -> None:
        wide = part.to(torch.float32).contiguous()
        native().pack_rows(self.handle, index, row, len(wide), wide.shape[1], pointer(wide))

    def dequantised(self, index: int, rows: int) -> Tensor:
        """What is stored, as float32 (rows, columns)."""
        out = torch.empty(rows, self.columns)
        native().unpack_rows(self.handle, index, 0, rows, self.columns, pointer(out))
        return out


class NativeMatrix:
    def __init__(self, rows: int, columns: int, format: str, device: torch.device):
        self.rows, self.columns = rows, columns
        self.packed = PackedMatrices(1, rows, columns, format)
        self.nbytes = self.packed.nbytes
        self.quantised = format.startswith("q")

    def fill(self, row: int, part: Tensor) -> None:
        self.packed.fill(0, row, part)


class NativeExperts:
    """Gate and up in w13, 16 rows of one and 16 of the other in turn, each padded to `inner`, a multiple of 32;
    down in w2 with `inner` columns."""

    def __init__(self, count: int, inner: int, hidden: int, format: str, device: torch.device):
        if format.startswith("q") and inner % GROUP:
            raise UserError(
                f"quantization: an expert's {inner} intermediate columns on this rank are no multiple of {GROUP}"
            )
        self.count, self.hidden, self.inner = count, hidden, padded(inner, BLOCK)
        self.w13 = PackedMatrices(count, 2 * self.inner, hidden, format, unit=2 * BLOCK)
        self.w2 = PackedMatrices(count, hidden, self.inner, format)
        self.nbytes = self.w13.nbytes + self.w2.nbytes

    def fill(self, expert: int, which: str, part: Tensor) -> None:
        if which == "down":
            self.w2.fill(expert, 0, part)
            return
        for block, rows in enumerate(part.split(ROWS)):
            self.w13.fill(expert, (2 * block + (which == "up")) * ROWS, rows)

    def dequantised(self, expert: int, which: str) -> Tensor:
        """What is stored, as float32, padding included."""
        if which == "down":
            return self.w2.dequantised(expert, self.hidden)
        both = self.w13.dequantised(expert, 2 * self.inner).unflatten(0, (-1, 2, ROWS))
        return both[:, int(which == "up")].flatten(0, 1)

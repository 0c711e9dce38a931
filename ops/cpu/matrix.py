"""Weights in the native layout: 16 rows side by side, quants and scales in planes of their own (csrc/matrix.h)."""

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
    """`count` matrices of (rows, columns), one after another in each plane."""

    def __init__(self, count: int, rows: int, columns: int, format: str):
        quantised = format.startswith("q")
        if quantised and columns % GROUP:
            raise UserError(f"quantization: a matrix with {columns} columns cannot be cut into groups of {GROUP}")
        self.count, self.padded_rows, self.columns = count, padded(rows, ROWS), columns
        weights = count * self.padded_rows * columns
        scales = weights // GROUP if quantised else 0
        quants = weights * BITS[format] // 8
        self.nbytes = quants + scales * 2
        # One buffer, zeroed: padding rows must add nothing. The planes follow each other.
        self.memory = native().Buffer(padded(quants, ALIGNMENT) + scales * 2)
        quants_at, scales_at = self.memory.address, self.memory.address + padded(quants, ALIGNMENT)

        def handle(first: int) -> object:
            """The native view of matrix `first`, whose neighbours follow it."""
            scales_here = scales_at + first * (scales // count) * 2 if quantised else 0
            group = GROUP if quantised else 0
            return native().Matrix(
                CODES[format], self.padded_rows, columns, group, quants_at + first * (quants // count), scales_here, 0
            )

        self.each = [handle(i) for i in range(count)]
        self.handle = self.each[0]

    def fill(self, index: int, row: int, part: Tensor) -> None:
        wide = part.to(torch.float32).contiguous()
        native().pack_rows(self.each[index], row, len(wide), wide.shape[1], pointer(wide))

    def dequantised(self, index: int, rows: int) -> Tensor:
        """What is stored, as float32 (rows, columns)."""
        out = torch.empty(rows, self.columns)
        native().unpack_rows(self.each[index], 0, rows, self.columns, pointer(out))
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
        self.w13 = PackedMatrices(count, 2 * self.inner, hidden, format)
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

"""Weights in the native layout: 16 rows side by side, quants and scales in planes of their own (csrc/matrix.h)."""

import torch
from torch import Tensor
from torch.nn import functional

from errors import UserError
from ops.cpu.engine import native, pointer
from ops.interface import Format

ROWS, BLOCK = 16, 32
CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "q8": 3, "q4": 4}
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "q8": 8, "q4": 4}
ALIGNMENT = 64
CHUNK = 4096  # rows that are float32 at a time while a matrix is filled


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class PackedMatrices:
    """`count` matrices of (rows, columns), one after another in each plane."""

    def __init__(self, count: int, rows: int, columns: int, format: Format):
        group = format.group
        if group and columns % group:
            raise UserError(f"quantization: a matrix with {columns} columns cannot be cut into groups of {group}")
        self.count, self.padded_rows, self.columns = count, padded(rows, ROWS), columns
        weights = self.padded_rows * columns  # of one matrix
        scales = weights // group if group else 0
        # Bytes of one matrix in each plane: quants, scales, zero points. The planes follow each other.
        planes = [weights * BITS[format.kind] // 8, scales * 2, scales * format.zeros]
        starts = [0]
        for size in planes:
            starts.append(starts[-1] + padded(count * size, ALIGNMENT))
        self.nbytes = count * sum(planes)
        self.memory = native().Buffer(starts[-1])  # zeroed: padding rows must add nothing
        self.storages = [torch.frombuffer(self.memory, dtype=torch.uint8)]

        def handle(index: int) -> object:
            """The native view of matrix `index`, whose neighbours follow it."""
            places = [
                self.memory.address + s + index * size if size else 0 for s, size in zip(starts, planes, strict=False)
            ]
            return native().Matrix(CODES[format.kind], self.padded_rows, columns, group, *places)

        self.each = [handle(i) for i in range(count)]
        self.handle = self.each[0]

    def fill(self, index: int, row: int, part: Tensor) -> None:
        for start, rows in zip(range(0, len(part), CHUNK), part.split(CHUNK), strict=True):
            wide = rows.to(torch.float32).contiguous()
            if missing := self.columns - part.shape[1]:  # padding columns, in float formats only
                wide = functional.pad(wide, (0, missing))
            native().pack_rows(self.each[index], row + start, len(wide), pointer(wide))

    def dequantised(self, index: int, rows: int) -> Tensor:
        """What is stored, as float32 (rows, columns)."""
        out = torch.empty(rows, self.columns)
        native().unpack_rows(self.each[index], 0, rows, pointer(out))
        return out


class NativeMatrix:
    def __init__(self, rows: int, columns: int, format: Format, device: torch.device):
        self.rows, self.columns = rows, columns
        self.packed = PackedMatrices(1, rows, columns, format)
        self.nbytes, self.storages = self.packed.nbytes, self.packed.storages
        self.quantised = format.quantised

    def fill(self, row: int, part: Tensor) -> None:
        self.packed.fill(0, row, part)


class NativeExperts:
    """Gate and up in w13, 16 rows of one and 16 of the other in turn, each padded to `inner`, a multiple of 32;
    down in w2 with `inner` columns."""

    def __init__(self, count: int, inner: int, hidden: int, format: Format, device: torch.device):
        if format.group and inner % format.group:
            raise UserError(
                f"quantization: an expert's {inner} intermediate columns on this rank are no multiple of {format.group}"
            )
        self.count, self.hidden, self.inner = count, hidden, padded(inner, BLOCK)
        self.w13 = PackedMatrices(count, 2 * self.inner, hidden, format)
        self.w2 = PackedMatrices(count, hidden, self.inner, format)
        self.nbytes = self.w13.nbytes + self.w2.nbytes
        self.storages = self.w13.storages + self.w2.storages

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

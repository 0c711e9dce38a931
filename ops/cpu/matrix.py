"""Weights in the native layout: 16 rows side by side, quants and scales in separate planes (csrc/kernels/matrix.h)."""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from errors import UserError
from ops.cpu.engine import native, pointer
from ops.format import Format, Quantised

ROWS, BLOCK = 16, 32
CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "q8": 3, "q4": 4}
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "q8": 8, "q4": 4}
ALIGNMENT = 64
CHUNK = 4096  # rows that are float32 at a time while a matrix is filled


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def plane_bytes(weights: int, format: Format) -> list[int]:
    """Of `weights` values: quants, scales, zero points."""
    scales = weights // format.group if format.group else 0
    return [weights * BITS[format.kind] // 8, scales * 2, scales * format.zeros]


class MatrixView:
    """Matrices of `columns` that lie one after another in each plane, wherever that is: a native SplitMatrix."""

    def __init__(self, handle: Any, format: Format, columns: int):
        self.handle, self.format, self.columns = handle, format, columns

    def fill(self, index: int, row: int, part: Tensor | Quantised, step: int = 1) -> None:
        """Put `part` at rows row, row + 1 ...; with `step` 2, 16 rows at a time with 16 others' room between."""
        if isinstance(part, Quantised):
            if part.fits(self.format):
                return self._fill_levels(index, row, part, step)
            part = part.floats()
        for start, rows in zip(range(0, len(part), CHUNK), part.split(CHUNK), strict=True):
            wide = rows.to(torch.float32).contiguous()
            if missing := self.columns - part.shape[1]:  # padding columns, in float formats only
                wide = functional.pad(wide, (0, missing))
            native().pack_rows(self.handle, index, row + start * step, step, len(wide), pointer(wide))

    def _fill_levels(self, index: int, row: int, part: Quantised, step: int) -> None:
        scales, zeros = part.in_groups(self.format.group)
        halves = scales.to(torch.float16).contiguous()
        if not halves.isfinite().all():
            raise UserError("quantization: a scale is beyond float16's range: --set quantization.method=none")
        zeros = None if zeros is None else zeros.contiguous()
        addresses = (
            pointer(part.levels, torch.uint8), pointer(halves, torch.float16), pointer(zeros, torch.uint8),
        )  # fmt: skip
        native().pack_levels(self.handle, index, row, step, len(halves), *addresses)

    def dequantised(self, index: int, rows: int, row: int = 0, step: int = 1) -> Tensor:
        """What is stored, as float32 (rows, columns)."""
        out = torch.empty(rows, self.columns)
        native().unpack_rows(self.handle, index, row, step, rows, pointer(out))
        return out


class PackedMatrices(MatrixView):
    """`count` matrices of (rows, columns). Each NUMA node has a buffer with its rows of every matrix, one matrix after
    another in each plane; rows are divided over the nodes in multiples of `unit`. On the meta device there are no
    buffers, one storage for each plane has its size."""

    def __init__(self, count: int, rows: int, columns: int, format: Format, device: torch.device, unit: int = ROWS):
        group = format.group
        if group and columns % group:
            raise UserError(f"quantization: a matrix with {columns} columns cannot be cut into groups of {group}")
        super().__init__(None, format, columns)
        self.nbytes = 0
        if device.type == "meta":
            sizes = plane_bytes(count * padded(rows, unit) * columns, format)
            types = (torch.uint8, torch.float16, torch.uint8) if group else (getattr(torch, format.kind),)
            planes = [torch.empty(n // t.itemsize, dtype=t, device=device) for n, t in zip(sizes, types, strict=False)]
            self.storages, self.nbytes = planes, sum(sizes)
            return
        self.buffers, parts = [], []
        for node, (first, end) in enumerate(pairwise(native().split(padded(rows, unit) // unit))):
            part_rows = (end - first) * unit
            sizes = plane_bytes(count * part_rows * columns, format)
            starts = [0, *accumulate(padded(size, ALIGNMENT) for size in sizes)]  # one behind the other
            buffer = native().Buffer(starts[-1], node)  # zeroed: padding rows must add nothing
            places = [buffer.address + start if size else 0 for start, size in zip(starts, sizes, strict=False)]
            parts.append(native().Matrix(CODES[format.kind], part_rows, columns, group, *places))
            self.buffers.append(buffer)
            self.nbytes += sum(sizes)
        self.storages = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in self.buffers if len(buffer)]
        self.handle = native().SplitMatrix(parts)


class NativeMatrix:
    def __init__(self, rows: int, columns: int, format: Format, device: torch.device):
        self.rows, self.columns = rows, columns
        self.packed = PackedMatrices(1, rows, columns, format, device)
        self.nbytes, self.storages = self.packed.nbytes, self.packed.storages
        self.quantised = format.quantised

    def fill(self, row: int, part: Tensor | Quantised) -> None:
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
        self.w13 = PackedMatrices(count, 2 * self.inner, hidden, format, device, unit=2 * BLOCK)
        self.w2 = PackedMatrices(count, hidden, self.inner, format, device)
        self.nbytes = self.w13.nbytes + self.w2.nbytes
        self.storages = self.w13.storages + self.w2.storages

    def fill(self, expert: int, which: str, part: Tensor | Quantised) -> None:
        if which == "down":
            self.w2.fill(expert, 0, part)
        else:
            self.w13.fill(expert, ROWS * (which == "up"), part, step=2)

    def dequantised(self, expert: int, which: str) -> Tensor:
        """What is stored, as float32, padding included."""
        if which == "down":
            return self.w2.dequantised(expert, self.hidden)
        return self.w13.dequantised(expert, self.inner, ROWS * (which == "up"), step=2)

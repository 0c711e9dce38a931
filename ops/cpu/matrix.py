"""Weights in the native layout: 16 rows side by side, quants and scales in separate planes (csrc/kernels/matrix.h)."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops.cpu.engine import TYPES, module, native, pointer
from umbra.ops.cpu.memory import allocate
from umbra.ops.formats import SPECS, Format, FormatSpec
from umbra.ops.formats.ggml import Blocks
from umbra.ops.formats.quantised import Nested, Quantised, floats
from umbra.ops.formats.records import grid_of
from umbra.ops.interface import SILU_EXPERTS, ExpertKind
from umbra.ops.words import Words

if TYPE_CHECKING:
    from umbra.ops.cpu._native import Given, SplitMatrix, Table

ROWS, BLOCK = 16, 32
ALIGNMENT = 64
KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.uint8: 4,
    torch.int8: 5,
    torch.float8_e8m0fnu: 4,
}
WORDS, AWQ = 6, 7
STRANGE, LARGE_SCALE = 1, 2  # what csrc/kernels/pack.h returns


@cache
def code_of(kind: str) -> int:
    """The number by which the kernels know the format of this name, which can multiply it from then on."""
    code, record = module.format_names().index(kind), SPECS[kind].record
    if record and record.grid:
        grid = grid_of(record.grid)
        module.set_grid(format=code, entries=pointer(grid, torch.int8), count=len(grid))
    return code


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def plane_bytes(rows: int, columns: int, format: Format, biased: bool) -> list[int]:
    """Sizes of the planes of (rows, columns) values: quants, scales, zero points, bias."""
    weights, spec = rows * columns, format.spec
    groups = weights // format.group if format.group else 0
    if spec.nesting:
        scales = groups * spec.nesting.group_bytes + rows * spec.nesting.row_bytes
        scales += 0 if spec.record else weights // BLOCK * spec.nesting.block_bytes
    else:
        scales = groups * _scale_type(spec).itemsize
    return [spec.quant_bytes(weights), scales, groups if format.zeros else 0, 4 * rows * biased]


def _scale_type(spec: FormatSpec) -> torch.dtype:
    type: torch.dtype = getattr(torch, spec.scale_type)
    return type


def rows_of(x: "Tensor | Words") -> "Table":
    """The rows of `x` (m, K), whose memory must outlive the result."""
    if isinstance(x, Words):
        row, step = (4 * stride for stride in x.words.stride())
        kind = AWQ if x.order else KINDS[torch.uint8] if x.bits == 8 else WORDS
        return module.Table(address=pointer(x.words, torch.int32, contiguous=False), kind=kind, row=row, step=step)
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise TypeError(f"rows {tuple(x.shape)} {x.stride()} are not of neighbours")
    return module.Table(
        address=pointer(x, x.dtype, contiguous=False), kind=KINDS[x.dtype], row=x.stride(0) * x.itemsize, step=4
    )


def elements(x: "Tensor | Words | None") -> "Table":
    """`x` (m, K / group), scales or zero points, at any strides, in memory that must outlive the result."""
    if x is None:
        return module.Table(address=0, kind=0, row=0, step=0)
    if isinstance(x, Words):
        return rows_of(x)
    row, step = (x.itemsize * stride for stride in x.stride())
    return module.Table(address=pointer(x, x.dtype, contiguous=False), kind=KINDS[x.dtype], row=row, step=step)


def fill_table(table: Tensor, part: Tensor | Quantised) -> bool:
    """Fills `table` with the values of `part`, and returns whether all of them are finite numbers."""
    given, (rows, columns) = given_of(part if isinstance(part, Blocks) else floats(part)), table.shape
    to = pointer(table, table.dtype)
    return native.fill_table(to=to, type=TYPES[table.dtype], rows=rows, columns=columns, given=given)


class MatrixView:
    """Reads and writes rows of matrices with `columns` that follow one another in each plane of `handle`."""

    def __init__(self, handle: "SplitMatrix", format: Format, columns: int):
        self.handle, self.format, self.columns = handle, format, columns

    def fill(self, index: int, row: int, part: Tensor | Quantised, step: int = 1) -> bool:
        """Writes `part` to matrix `index` from `row` on. With `step` 2, every 16 rows are followed by a gap of 16 rows,
        which hold another matrix's. Returns whether all weights are finite numbers. Columns that `part` lacks are
        padding and stay zero."""
        keep, spec = isinstance(part, Quantised) and part.fits(self.format), self.format.spec
        if spec.quantise and not keep:
            part, keep = spec.quantise(floats(part), self.format.group), True
        if not keep and spec.nesting:
            raise UserError(f"{self.format.kind} holds a checkpoint's own rows only: set quantization.method: q8 or q4")
        if isinstance(part, Quantised) and not keep and _only_kept(part):
            part = part.floats()
        rows, columns = part.shape
        if columns != self.columns and (self.format.group or columns > self.columns):
            raise AssertionError(f"{columns} columns for a matrix of {self.columns}")
        given = given_of(part)
        flags = native.pack_rows(
            w=self.handle, index=index, first=row, step=step, count=rows, columns=columns, given=given, keep=keep
        )
        if flags & LARGE_SCALE:
            raise UserError("quantization: a scale is beyond float16's range: set quantization.method: none")
        return not flags & STRANGE

    def dequantised(self, index: int, rows: int, row: int = 0, step: int = 1) -> Tensor:
        """The stored rows, dequantised to float32 (rows, columns)."""
        out = torch.empty(rows, self.columns)
        native.unpack_rows(w=self.handle, index=index, first=row, step=step, count=rows, rows=pointer(out))
        return out


def given_of(part: Tensor | Quantised) -> "Given":
    """The rows, whose memory must outlive the result."""
    if isinstance(part, Blocks):
        data = part.of.data
        if data.stride()[1:] != (data.shape[2], 1):
            raise TypeError(f"blocks {tuple(data.shape)} {data.stride()} are not of neighbours")
        address = pointer(data, torch.uint8, contiguous=False)
        if part.of.kept:
            code_of(part.of.kept.kind)  # with whose grid blocks are read
        return native.Given(
            address=address, type=part.of.type, row=data.stride(0), skipped=part.of.skipped, factor=part.of.factor
        )
    scales, zeros, of_scales, of_zeros, group, middle = *(elements(None) for _ in range(4)), 0, 0
    if isinstance(part, Nested):
        of_scales, of_zeros = elements(part.d), elements(part.dmin)
    if isinstance(part, Quantised):
        rows, columns = part.levels.shape
        if not isinstance(part, Nested) and part.scales.shape != (rows, columns // part.group):
            raise AssertionError(f"scales of shape {part.scales.shape} for levels of shape {part.levels.shape}")
        scales, zeros, group, middle = elements(part.scales), elements(part.zeros), part.group, part.spec.middle
    return native.Given(
        values=rows_of(part.levels if isinstance(part, Quantised) else part),
        scales=scales,
        zeros=zeros,
        group=group,
        middle=middle,
        of_scales=of_scales,
        of_zeros=of_zeros,
    )


def _only_kept(part: Quantised) -> bool:
    """Returns whether rows in another format are packed as floats."""
    return not isinstance(part, Blocks) and (
        part.group % BLOCK > 0 or bool(part.spec.codes) or isinstance(part, Nested)
    )


def write_bias(parts: Iterable[Tensor], row: int, part: Tensor, step: int) -> None:
    """Writes the bias of the rows that `MatrixView.fill` writes for the same arguments. `parts` are each node's."""
    first, rows = 0, torch.arange(len(part))
    targets = rows // ROWS * ROWS * step + rows % ROWS + row
    for bias in parts:
        here = (targets >= first) & (targets < first + len(bias))
        bias[targets[here] - first] = part.float()[here]
        first += len(bias)


class PackedMatrices(MatrixView):
    """`count` matrices of (rows, columns). Each NUMA node has a buffer with its rows of every matrix, one matrix after
    another in each plane; rows are divided over the nodes in multiples of `unit`. On the meta device there are no
    buffers and no handle: one meta storage for each plane stands for its size."""

    def __init__(
        self,
        count: int,
        rows: int,
        columns: int,
        format: Format,
        device: torch.device,
        unit: int = ROWS,
        biased: bool = False,
    ):
        group = format.group
        if group and columns % group:
            raise UserError(f"quantization: a matrix with {columns} columns cannot be cut into groups of {group}")
        self.format, self.columns, self.nbytes = format, columns, 0
        if device.type == "meta":
            sizes = plane_bytes(count * padded(rows, unit), columns, format, biased)
            quant = torch.uint8 if group else getattr(torch, format.kind)
            types = quant, _scale_type(format.spec), torch.uint8, torch.float32
            self.storages = [
                torch.empty(n // t.itemsize, dtype=t, device=device)
                for n, t in zip(sizes, types, strict=True)
                if n or t is quant
            ]
            self.nbytes = sum(sizes)
            return
        self.buffers, parts = [], []
        self.biases: list[Tensor] = []  # (count, rows) of each node's part
        self.planes: list[Tensor] = []  # (count, bytes) of each node's part
        for node, (first, end) in enumerate(pairwise(native.split(count=padded(rows, unit) // unit))):
            part_rows = (end - first) * unit
            sizes = plane_bytes(count * part_rows, columns, format, biased)
            starts = [0, *accumulate(padded(size, ALIGNMENT) for size in sizes)]
            buffer = allocate(starts[-1], node)  # zeroed: padding rows must add nothing
            addresses = (buffer.address + at if n else 0 for at, n in zip(starts, sizes, strict=False))
            quants, scales, zeros, bias = addresses
            parts.append(
                native.Matrix(
                    format=code_of(format.kind),
                    n=part_rows,
                    k=columns,
                    group=group,
                    quants=quants,
                    scales=scales,
                    zeros=zeros,
                    bias=bias,
                )
            )
            self.buffers.append(buffer)
            self.nbytes += sum(sizes)
            for at, size in zip(starts, sizes, strict=False):
                if size:
                    plane = torch.frombuffer(buffer, dtype=torch.uint8)[at : at + size]
                    self.planes.append(plane.view(count, size // count))
            if sizes[3]:
                self.biases.append(self.planes[-1].view(torch.float32))
        self.storages = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in self.buffers if len(buffer)]
        super().__init__(native.SplitMatrix(parts=parts), format, columns)

    def fill_bias(self, index: int, row: int, part: Tensor, step: int = 1) -> None:
        """Writes the bias of the rows that `fill` writes for the same arguments."""
        write_bias((bias[index] for bias in self.biases), row, part, step)


class NativeMatrix:
    def __init__(self, rows: int, columns: int, format: Format, device: torch.device):
        self.rows, self.columns = rows, columns
        self.packed = PackedMatrices(1, rows, columns, format, device)
        self.nbytes, self.storages = self.packed.nbytes, self.packed.storages
        self.quantised = format.spec.int8_products  # whether its products quantise activations
        self.parts = [self]

    def fill(self, row: int, part: Tensor | Quantised) -> bool:
        return self.packed.fill(0, row, part)


class NativeStack:
    """A matrix whose rows are those of `parts`, (rows, format) of each, one below the other."""

    def __init__(self, parts: Sequence[tuple[int, Format]], columns: int, device: torch.device):
        self.parts = [NativeMatrix(rows, columns, format, device) for rows, format in parts]
        self.rows, self.columns = sum(part.rows for part in self.parts), columns
        self.nbytes = sum(part.nbytes for part in self.parts)
        self.storages = [storage for part in self.parts for storage in part.storages]
        self.quantised = any(part.quantised for part in self.parts)

    def fill(self, row: int, part: Tensor | Quantised) -> bool:
        """Writes rows of one of the parts."""
        for matrix in self.parts:
            if row < matrix.rows:
                return matrix.fill(row, part)
            row -= matrix.rows
        raise AssertionError(f"row {row} below {self.rows} rows")


class NativeHeads:
    def __init__(self, count: int, rows: int, columns: int, format: Format, device: torch.device):
        self.count, self.rows, self.columns = count, rows, columns
        self.packed = PackedMatrices(count, rows, columns, format, device)
        self.nbytes, self.storages = self.packed.nbytes, self.packed.storages

    def fill(self, head: int, part: Tensor) -> bool:
        return self.packed.fill(head, 0, part)


class NativeExperts:
    """The experts' gate and up matrices in w13, 16 rows of each in turn, both padded to `inner` rows, a multiple of 32;
    their down matrices in w2, with `inner` columns."""

    def __init__(
        self, count: int, inner: int, hidden: int, format: Format, device: torch.device, kind: ExpertKind = SILU_EXPERTS
    ):
        down = format.down or format
        if down.group and inner % down.group:
            raise UserError(
                f"quantization: an expert's {inner} intermediate columns on this rank are no multiple of {down.group}"
            )
        self.count, self.hidden, self.inner, self.kind = count, hidden, padded(inner, BLOCK), kind
        self.w13 = PackedMatrices(count, 2 * self.inner, hidden, format, device, 2 * BLOCK, kind.biased)
        self.w2 = PackedMatrices(count, hidden, self.inner, down, device, biased=kind.biased)
        self.nbytes = self.w13.nbytes + self.w2.nbytes
        self.storages = self.w13.storages + self.w2.storages

    def fill(self, expert: int, which: str, part: Tensor | Quantised) -> bool:
        if which == "down":
            return self.w2.fill(expert, 0, part)
        return self.w13.fill(expert, ROWS * (which == "up"), part, step=2)

    def fill_bias(self, expert: int, which: str, part: Tensor) -> None:
        if which == "down":
            self.w2.fill_bias(expert, 0, part)
        else:
            self.w13.fill_bias(expert, ROWS * (which == "up"), part, step=2)

    def stored(self, experts: Sequence[int]) -> Tensor:
        return torch.cat([plane[experts] for plane in self._planes], 1)

    def restore(self, experts: Sequence[int], stored: Tensor) -> None:
        for plane, part in zip(self._planes, stored.split([p.shape[1] for p in self._planes], 1), strict=True):
            plane[experts] = part

    @property
    def _planes(self) -> list[Tensor]:
        return self.w13.planes + self.w2.planes

    def dequantised(self, expert: int, which: str) -> Tensor:
        """ "gate", "up" or "down" of an expert, dequantised to float32, padding included."""
        if which == "down":
            return self.w2.dequantised(expert, self.hidden)
        return self.w13.dequantised(expert, self.inner, ROWS * (which == "up"), step=2)

"""Values of matrices in the CPU's layout (ops/cpu/csrc/kernels/matrix.h), computed with PyTorch on any device."""

import torch
from torch import Tensor

from umbra.ops.cpu.matrix import BLOCK, ROWS
from umbra.ops.cpu.shadow import ExpertBlocks
from umbra.ops.formats import Format

HALF, WORD = 16, 4  # columns in the low nibbles of a block; neighbouring columns of a row


def unpack(memory: Tensor, starts: Tensor, shape: ExpertBlocks, name: str, dtype: torch.dtype) -> Tensor:
    """The matrices "w13" or "w2" of the blocks of `shape` that begin at `starts` (count) int64 of `memory` (uint8):
    (count, rows, columns) with padding, in w13 all rows of gate before those of up."""
    values = unpacked(blocks_at(memory, starts, shape), shape, name).to(dtype)
    if name == "w2":
        return values
    gate, up = values.unflatten(1, (-1, 2, ROWS)).unbind(2)
    return torch.cat((gate.flatten(1, 2), up.flatten(1, 2)), 1)


def biases(memory: Tensor, starts: Tensor, shape: ExpertBlocks, name: str) -> Tensor:
    """The biases of the same rows, (count, rows) float32, of experts that have some."""
    rows, at = shape.shapes[name][0], shape.offsets[name][3]
    places = (starts + at)[:, None] // 4 + torch.arange(rows, device=starts.device)
    of_all = memory.view(-1).view(torch.float32)[places]
    return of_all if name == "w2" else of_all.unflatten(1, (-1, 2, ROWS)).transpose(1, 2).flatten(1)


def blocks_at(memory: Tensor, starts: Tensor, shape: ExpertBlocks) -> Tensor:
    """-> (count, bytes)"""
    flat = memory.view(-1)
    return torch.stack([flat[start : start + shape.block_bytes] for start in starts.tolist()])


def unpacked(blocks: Tensor, shape: ExpertBlocks, name: str) -> Tensor:
    """The matrices "w13" or "w2" of blocks (count, bytes) uint8, padding included. -> (count, rows, columns) float32"""
    rows, columns = shape.shapes[name]
    quants, scales, zeros, _ = _planes(blocks, shape, name)
    lead, format = (len(blocks), rows // ROWS), shape.formats[name]
    if not format.quantised:
        values = quants.view(getattr(torch, format.kind)).view(*lead, columns, ROWS)
        return values.transpose(-1, -2).reshape(len(blocks), rows, columns).float()
    levels = _levels(quants, format, (*lead, columns))  # (count, row blocks, ROWS, columns)
    return _scaled(levels, scales, zeros, format).reshape(len(blocks), rows, columns)


def _planes(blocks: Tensor, shape: ExpertBlocks, name: str) -> list[Tensor]:
    sizes = shape.planes(name, shape.shapes[name][0])
    return [blocks[:, at : at + size] for at, size in zip(shape.offsets[name], sizes, strict=True)]


def _levels(quants: Tensor, format: Format, shape: tuple[int, ...]) -> Tensor:
    """The values of the levels, before zero points are subtracted. `shape`: (count, row blocks, columns)."""
    spec, (count, blocks, columns) = format.spec, shape
    if spec.float_levels:
        return quants.view(torch.float8_e4m3fn).view(*shape, ROWS).transpose(-1, -2).float()
    by_block = quants.view(count, blocks, columns // BLOCK, -1)
    if spec.bits == 8:
        bytes_ = by_block.view(*by_block.shape[:3], BLOCK // WORD, ROWS, WORD)
        return bytes_.permute(0, 1, 4, 2, 3, 5).reshape(count, blocks, ROWS, columns).float()
    nibbles = by_block[..., : BLOCK * ROWS // 2].unflatten(-1, (HALF // WORD, ROWS, WORD))
    halves = torch.stack((nibbles & 15, nibbles >> 4), 3)  # (count, blocks, k / 32, 2, 4, ROWS, 4)
    levels = halves.permute(0, 1, 5, 2, 3, 4, 6).reshape(count, blocks, ROWS, columns)
    if bits := spec.bits - 4:
        words = by_block[..., BLOCK * ROWS // 2 :].unflatten(-1, (bits, ROWS, 1, WORD))
        shifts = torch.arange(0, 8, bits, device=quants.device, dtype=torch.uint8)[:, None]
        high = (words >> shifts) & ((1 << bits) - 1)  # (count, blocks, k / 32, bits, ROWS, 8 / bits, 4)
        levels = levels | high.permute(0, 1, 4, 2, 3, 5, 6).reshape(levels.shape) << 4
    if spec.codes:
        return torch.tensor(spec.codes, device=quants.device)[levels.int()]
    return levels.float()


def _scaled(values: Tensor, scales: Tensor, zeros: Tensor, format: Format) -> Tensor:
    """`values` (count, row blocks, ROWS, columns) with zero points taken off, times their scales."""
    spec, lead, groups = format.spec, values.shape[:2], values.shape[-1] // format.group
    if (nesting := spec.nesting) and nesting.of_rows:
        by_block = scales.reshape(*lead, -1)
        of_rows = by_block[..., : 4 * ROWS].reshape(-1).view(torch.float32).view(*lead, 1, ROWS)
        e4m3 = by_block[..., 4 * ROWS :].reshape(-1).view(torch.float8_e4m3fn).float()
        return _by_column(of_rows * e4m3.view(*lead, -1, ROWS), values) * values
    if nesting:
        halves = nesting.group_bytes // 2
        by_group = scales.reshape(*lead, groups, -1)
        of_scales = by_group[..., : 2 * ROWS * halves].reshape(-1).view(torch.float16).float()
        of_scales = of_scales.view(*lead, groups, 1, halves, ROWS)
        bytes_ = by_group[..., 2 * ROWS * halves :].unflatten(-1, (-1, nesting.block_bytes, ROWS))
        if nesting.minimums:
            scale, minimum = ((of_scales * bytes_.float())[..., i, :].flatten(2, 3) for i in range(2))
            return _by_column(scale, values) * values - _by_column(minimum, values)
        scale = (of_scales * bytes_.view(torch.int8).float()).flatten(2, 4)
        return _by_column(scale, values) * (values - spec.middle)
    if spec.scale_type == "uint8":
        scale = torch.exp2(scales.float() - 127)
    else:
        scale = scales.reshape(-1).view(getattr(torch, spec.scale_type)).float()
    points = _by_column(zeros.reshape(*lead, groups, ROWS).float(), values) if format.zeros else spec.middle
    return _by_column(scale.reshape(*lead, groups, ROWS), values) * (values - points)


def _by_column(numbers: Tensor, values: Tensor) -> Tensor:
    """`numbers` (..., groups, ROWS), each for all columns of its group of `values` (..., ROWS, columns)."""
    return numbers.transpose(-1, -2).repeat_interleave(values.shape[-1] // numbers.shape[-2], -1)

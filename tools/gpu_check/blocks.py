"""Blocks of experts with random content, in every format."""

import torch
from torch import Tensor

from umbra.ops.cpu.shadow import ExpertBlocks
from umbra.ops.formats import SPECS, Format
from umbra.ops.interface import SILU_EXPERTS, ExpertKind

FORMATS = [
    Format(name, 32 if spec.zero_points else spec.group, zeros)
    for name, spec in SPECS.items()
    if not spec.record
    for zeros in ((False, True) if spec.zero_points else (False,))
]


def random_blocks(
    count: int, inner: int, hidden: int, format: Format, kind: ExpertKind = SILU_EXPERTS
) -> tuple[ExpertBlocks, Tensor]:
    """The layout, and blocks (count, bytes) uint8, whose padding is zeros where the format's zero level is."""
    shape = ExpertBlocks(inner, hidden, format, kind)
    blocks = torch.zeros(count, shape.block_bytes, dtype=torch.uint8)
    for name, (rows, columns) in shape.shapes.items():
        for at, plane in zip(shape.offsets[name], _planes(count, rows, columns, shape.formats[name]), strict=False):
            blocks[:, at : at + plane.shape[1]] = plane
        if kind.biased:
            at = shape.offsets[name][3]
            blocks[:, at : at + 4 * rows] = torch.randn(count, rows).view(torch.uint8)
    return shape, blocks


def _planes(count: int, rows: int, columns: int, format: Format) -> list[Tensor]:
    """The quants, scales and zero points of so many matrices, (count, bytes) uint8 each."""
    spec, weights = format.spec, rows * columns
    if not format.quantised:
        return [torch.randn(count, weights).to(getattr(torch, format.kind)).view(torch.uint8)]
    quants = torch.randint(256, (count, weights * spec.bits // 8), dtype=torch.uint8)
    if spec.float_levels:
        return [quants & 0xF7, _scales(count, weights // format.group, torch.float32)]
    if spec.scale_type == "uint8":
        return [quants, torch.randint(118, 124, (count, weights // format.group), dtype=torch.uint8)]
    if (nesting := spec.nesting) and nesting.of_rows:
        lead = count * rows // 16
        floats = _scales(lead, 16, torch.float32)
        e4m3 = torch.randint(0x38, (lead, columns), dtype=torch.uint8)
        return [quants, torch.cat((floats, e4m3), 1).view(count, -1)]
    if nesting:
        halves = _scales(count * weights // format.group // 16, 8 * nesting.group_bytes, torch.float16)
        of_bytes = (len(halves), format.group // 32 * 16 * nesting.block_bytes)
        bytes_ = torch.randint(64, of_bytes, dtype=torch.uint8)
        return [quants, torch.cat((halves, bytes_), 1).view(count, -1)]
    scales = _scales(count, weights // format.group, getattr(torch, spec.scale_type))
    return [quants, scales, torch.randint(1 << spec.bits, (count, weights // format.group * format.zeros)).byte()]


def _scales(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return (0.01 + 0.01 * torch.rand(rows, columns)).to(dtype).view(torch.uint8)

"""Values of experts' matrices, read from the CPU's blocks (experts.py). A program writes a tile of 16 rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from umbra.ops.cpu.shadow import ExpertBlocks
from umbra.ops.cuda.kernels.experts import (
    BYTES,
    E4M3,
    FLOATS,
    NIBBLES,
    _aligned,
    _nibbles,
    _product,
    _scale,
    layout,
    views,
)

UNITS = {FLOATS: 256, E4M3: 256, BYTES: 64, NIBBLES: 64}  # columns of floats or words of a program
COLUMNS = {FLOATS: 1, E4M3: 1, BYTES: 4, NIBBLES: 8}  # of such a unit


@triton.jit
def _columns(first, second, third, fourth, UNITS: tl.constexpr):
    """Four columns of each of UNITS words (UNITS, 16) side by side: (16, 4 UNITS)."""
    both = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(tl.trans(tl.reshape(both, (UNITS, 16, 4)), (1, 0, 2)), (16, 4 * UNITS))


@triton.jit
def _unpack(
    memory, words, halves, floats, typed, starts, out,
    ROWS: tl.constexpr, PAIRED: tl.constexpr, AT: tl.constexpr, SCALES_AT: tl.constexpr, ZEROS_AT: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, STORED: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    BITS: tl.constexpr, MIDDLE: tl.constexpr, CODES: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """out (experts, ROWS, K): of matrices in blocks at `starts` behind `memory`. PAIRED: rows of gate and of up come 16
    by 16, and are written with all of gate first."""
    block_at, row_block = tl.load(starts + tl.program_id(0)), tl.program_id(1)
    COLUMNS: tl.constexpr = 4 if STORED == 1 else 8 if STORED == 2 else 1  # of a unit
    IN_BLOCK: tl.constexpr = 32 // COLUMNS
    u = tl.program_id(2) * UNITS + tl.arange(0, UNITS)
    r = tl.arange(0, 16)[None, :]
    mask = (u < K // COLUMNS)[:, None] & (r >= 0)
    blocks, within = (u // IN_BLOCK)[:, None], (u % IN_BLOCK)[:, None]
    first_row = row_block * 16
    if PAIRED:
        first_row = row_block // 2 * 16 + row_block % 2 * (ROWS // 2)
    row = (tl.program_id(0).to(tl.int64) * ROWS + first_row + tl.arange(0, 16))[:, None] * K
    at = block_at + AT
    low, high, minimum = _scale(
        memory, halves, floats, block_at + SCALES_AT, row_block, blocks, r, mask, K, GROUP, SCALES
    )
    if STORED == 0 or STORED == 3:
        offset = (row_block * K + u[:, None]) * 16 + r
        if STORED == 0:
            value = tl.load(typed + _aligned(at, BITS // 8) + offset, mask=mask, other=0).to(tl.float32)
        else:
            byte = tl.load(typed + _aligned(at, 1) + offset, mask=mask, other=0).to(tl.int32)
            value = (((byte << 24) >> 4) & -2014314496).to(tl.float32, bitcast=True)
            value *= low * 1329227995784915872903807060280344576.0  # 2^120
        tl.store(out + row + u[None, :], tl.trans(value).to(out.dtype.element_ty), mask=u[None, :] < K)
    else:
        BLOCK_WORDS: tl.constexpr = 128 if STORED == 1 else 16 * BITS
        base = words + _aligned(at, 4)
        start = (row_block * (K // 32) + blocks) * BLOCK_WORDS
        word = tl.load(base + start + within * 16 + r, mask=mask, other=0)
        if ZEROS:
            of_group = (row_block * (K // GROUP) + blocks * 32 // GROUP) * 16 + r
            zero = tl.load(memory + _aligned(block_at + ZEROS_AT, 1) + of_group, mask=mask, other=0).to(tl.float32)
        else:
            zero = MIDDLE
        lane = tl.arange(0, 4 * UNITS)
        unit = tl.program_id(2) * UNITS + lane // 4
        column = (unit // IN_BLOCK * 32 + unit % IN_BLOCK * 4 + lane % 4)[None, :]
        inside = (unit < K // COLUMNS)[None, :]
        if STORED == 1:
            value = _columns(
                _product(word, low, zero, 0, 255, 0), _product(word, low, zero, 8, 255, 0),
                _product(word, low, zero, 16, 255, 0), _product(word, low, zero, 24, 255, 0), UNITS,
            )  # fmt: skip
            tl.store(out + row + column, value.to(out.dtype.element_ty), mask=inside)
        else:
            lows, highs = _nibbles(base, start, within, word, r, mask, BITS)
            MASK: tl.constexpr = 15 if BITS == 4 else 255
            UPPER: tl.constexpr = 4 if BITS == 4 else 0
            less = minimum if SCALES == 5 else tl.zeros((1, 1), tl.float32)
            value = _columns(
                _product(lows, low, zero, 0, MASK, CODES) - less, _product(lows, low, zero, 8, MASK, CODES) - less,
                _product(lows, low, zero, 16, MASK, CODES) - less, _product(lows, low, zero, 24, MASK, CODES) - less,
                UNITS,
            )  # fmt: skip
            tl.store(out + row + column, value.to(out.dtype.element_ty), mask=inside)
            value = _columns(
                _product(highs, high, zero, UPPER, MASK, CODES) - less,
                _product(highs, high, zero, UPPER + 8, MASK, CODES) - less,
                _product(highs, high, zero, UPPER + 16, MASK, CODES) - less,
                _product(highs, high, zero, UPPER + 24, MASK, CODES) - less, UNITS,
            )  # fmt: skip
            tl.store(out + row + column + 16, value.to(out.dtype.element_ty), mask=inside)


def unpack(memory: Tensor, starts: Tensor, shape: ExpertBlocks, name: str, dtype: torch.dtype) -> Tensor:
    """The matrices "w13" or "w2" of the blocks of `shape` that begin at `starts` (count) int64 of `memory` (uint8):
    (count, rows, columns) with padding, in w13 all rows of gate before those of up."""
    rows, columns = shape.shapes[name]
    out = torch.empty(len(starts), rows, columns, dtype=dtype, device=memory.device)
    given = layout(shape, name)
    units = UNITS[given["STORED"]]
    tiles = triton.cdiv(columns // COLUMNS[given["STORED"]], units)
    _unpack[(len(starts), rows // 16, tiles)](
        *views(memory, shape.formats[name]), starts, out, ROWS=rows, PAIRED=name == "w13", **given, UNITS=units,
        num_warps=4,
    )  # fmt: skip
    return out

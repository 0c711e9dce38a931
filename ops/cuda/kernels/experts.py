"""Experts' products for few rows, read from the CPU's own blocks (ops/cpu/csrc/kernels/matrix.h draws them).

A pair is a row with one of its experts. One kernel multiplies a pair's row by 16 rows of gate and of up, a second one
the hidden rows of all pairs of a row by 16 rows of their experts' down matrices. A program walks over the columns, of
one pair after the other, a tile at a time. A block of 32 columns of quants is 64 (4 bits) or 128 (8 bits) words of four
neighbouring columns of a row each, 16 rows side by side, so a thread loads 16 bytes: words of four rows, or 16 floats
of 8 bits. Every element of the tile keeps its own sum, and the sums of a row are added once, at the end.

Experts are found by `places`: the offset of each one's block in `memory`, negative for those that are not there, whose
pairs add nothing. Levels are multiplied as float32 by float32 rows, so nothing is rounded but the sum's order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from umbra.ops.cpu.shadow import ExpertBlocks
from umbra.ops.formats import Format
from umbra.ops.formats.mxfp4 import E2M1

FLOATS, BYTES, NIBBLES, E4M3 = 0, 1, 2, 3  # how quants are stored
NONE, HALVES, WIDE, EXPONENTS, NESTED, MINIMUMS, SIXTEENS, OF_ROWS = 0, 1, 2, 3, 4, 5, 6, 7  # kinds of scales
NUMBERS, FLOAT_CODES, TABLE_CODES = 0, 1, 2  # what levels stand for: themselves, e2m1, the table of iq4


class Tile(NamedTuple):
    """A program holds so much at a time: `units` words, or columns of floats, of each of its rows."""

    units: int
    warps: int
    stages: int = 1  # loads of so many tiles are under way


# By how quants are stored, of `_up` and of `_down`.
TILES = {
    FLOATS: (Tile(256, 4), Tile(2048, 16)),
    BYTES: (Tile(128, 4), Tile(256, 8)),
    NIBBLES: (Tile(64, 4), Tile(256, 16)),
    E4M3: (Tile(256, 4), Tile(512, 16)),
}


@triton.jit
def _aligned(at, BYTES: tl.constexpr):
    """The element of BYTES bytes at which the byte `at` lies, a multiple of 64, as the compiler sees from this."""
    return at // 64 * (64 // BYTES)


@triton.jit
def _scale(
    memory, halves, floats, at, row_block, block, r, mask, K: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr
):  # fmt: skip
    """The scales of rows `r` in blocks of 32 columns `block`: (of the first 16 columns, of the others, minimum). They
    begin `at` bytes behind `memory`, a multiple of 64."""
    group = row_block * (K // GROUP) + block * 32 // GROUP
    if SCALES == 0:
        one = tl.full((1, 1), 1.0, tl.float32)
        return one, one, one
    elif SCALES == 1:
        scale = tl.load(halves + _aligned(at, 2) + group * 16 + r, mask=mask, other=0).to(tl.float32)
        return scale, scale, scale
    elif SCALES == 2:
        scale = tl.load(floats + _aligned(at, 4) + group * 16 + r, mask=mask, other=0)
        return scale, scale, scale
    elif SCALES == 3:
        exponent = tl.load(memory + _aligned(at, 1) + group * 16 + r, mask=mask, other=0).to(tl.int32)
        # The power of two 2^(exponent - 127): 2^-127 is no normal float32, and half of 2^-126.
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
        scale = bits.to(tl.float32, bitcast=True)
        return scale, scale, scale
    elif SCALES == 7:  # behind a float for each row, two e4m3 floats for each block
        behind = row_block * (64 + K)
        of_row = tl.load(floats + _aligned(at, 4) + behind // 4 + r, mask=mask, other=0)
        of_row *= 1329227995784915872903807060280344576.0
        both = memory + _aligned(at, 1) + behind + 64 + block * 32 + r
        low = tl.load(both, mask=mask, other=0).to(tl.int32)
        high = tl.load(both + 16, mask=mask, other=0).to(tl.int32)
        # The bits of an e4m3 float stand in those of a float32 whose bias is 127 in place of 7: 2^120.
        low = (((low << 24) >> 4) & -2014314496).to(tl.float32, bitcast=True)
        high = (((high << 24) >> 4) & -2014314496).to(tl.float32, bitcast=True)
        return of_row * low, of_row * high, of_row
    else:
        HALVES_OF: tl.constexpr = 2 if SCALES == 5 else 1
        BYTES_OF: tl.constexpr = 1 if SCALES == 4 else 2
        GROUP_BYTES: tl.constexpr = 32 * HALVES_OF + GROUP // 32 * BYTES_OF * 16
        of_scale = tl.load(halves + _aligned(at, 2) + group * (GROUP_BYTES // 2) + r, mask=mask, other=0).to(tl.float32)
        behind = group * GROUP_BYTES + 32 * HALVES_OF + (block % (GROUP // 32)) * (BYTES_OF * 16) + r
        bytes_at = memory + _aligned(at, 1) + behind
        first = tl.load(bytes_at, mask=mask, other=0)
        if SCALES == 5:
            of_minimum = tl.load(halves + _aligned(at, 2) + group * (GROUP_BYTES // 2) + 16 + r, mask=mask, other=0)
            minimum = of_minimum.to(tl.float32) * tl.load(bytes_at + 16, mask=mask, other=0).to(tl.float32)
            scale = of_scale * first.to(tl.float32)
            return scale, scale, minimum
        elif SCALES == 6:
            second = tl.load(bytes_at + 16, mask=mask, other=0)
            low = of_scale * first.to(tl.int8, bitcast=True).to(tl.float32)
            return low, of_scale * second.to(tl.int8, bitcast=True).to(tl.float32), low
        else:
            scale = of_scale * first.to(tl.int8, bitcast=True).to(tl.float32)
            return scale, scale, scale


@triton.jit
def _product(word, x, zero, SHIFT: tl.constexpr, MASK: tl.constexpr, CODES: tl.constexpr):
    """`x` times what stands in bits SHIFT.. of `word`: an integer less `zero`, or a code.

    A GPU has few units that convert integers. So the bits are read as a float32's: those of an integer below 2^23 as
    the low ones of 2^23 plus this integer, those of a code e2m1 as a float with another bias."""
    AT: tl.constexpr = SHIFT % 16
    ONE: tl.constexpr = 1 << AT
    half = word if SHIFT < 16 else word >> 16
    if CODES == 1:  # sign, two bits of exponent, one of mantissa
        bits = ((half << (22 - AT)) & 0x01C00000) | ((half << (28 - AT)) & -2147483648)
        return bits.to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0 * x  # 2^126
    level = ((half & (MASK << AT)) | 0x4B000000).to(tl.float32, bitcast=True)
    if CODES == 2:  # iq4's table is this polynomial, rounded by the sum with 1.5 * 2^23
        m = (level - (8388608.0 + 8.0 * ONE)) * (1.0 / ONE)
        code = 0.0015860428231561825 * m + 0.08183980967486144
        code = ((code * m - 0.016812053925454283) * m + 11.439809674861213) * m + 1.4329896907216515
        return ((code + 12582912.0) - 12582912.0) * x
    return (level - (8388608.0 + zero * ONE)) * (x * (1.0 / ONE))


@triton.jit
def _nibbles(base, start, within, word, r, mask, BITS: tl.constexpr):
    """The levels of word `within` of a block that begins at `base + start`: of its first and of its last 16 columns, in
    the low and high nibbles where BITS is 4, else a byte each."""
    if BITS == 4:
        lows, highs = word, word
    else:
        lows, highs = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
    if BITS == 5:  # bit c / 4 of byte 4 r + c % 4
        above = tl.load(base + start + 64 + r, mask=mask, other=0)
        lows |= ((above >> within) & 0x01010101) << 4
        highs |= ((above >> (within + 4)) & 0x01010101) << 4
    elif BITS == 6:  # bits 2 (c / 4 % 4) of the vectors of the first and of the last 16 columns
        above = tl.load(base + start + 64 + r, mask=mask, other=0)
        lows |= ((above >> (2 * within)) & 0x03030303) << 4
        above = tl.load(base + start + 80 + r, mask=mask, other=0)
        highs |= ((above >> (2 * within)) & 0x03030303) << 4
    return lows, highs


@triton.jit
def _sums(
    memory, words, halves, floats, typed, x, ids, places, weights, first_expert, first_block,
    PAIRS: tl.constexpr, WEIGHTED: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, AT: tl.constexpr,
    SCALES_AT: tl.constexpr, ZEROS_AT: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, STORED: tl.constexpr,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr, CODES: tl.constexpr,
    UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum, over PAIRS pairs in turn, of a pair's row by ROWS rows of its expert's matrix, from row block
    `first_block` on, times `weights` if WEIGHTED. `x` (PAIRS, K)."""
    COLUMNS: tl.constexpr = 4 if STORED == 1 else 8 if STORED == 2 else 1  # of a unit
    # Tiles of floats of 8 bits may lie in one group of one pair each, whose scales are then loaded once.
    ONE_GROUP: tl.constexpr = STORED == 3 and GROUP % UNITS == 0
    PER: tl.constexpr = K // COLUMNS
    IN_BLOCK: tl.constexpr = 32 // COLUMNS
    lane = tl.arange(0, ROWS)[None, :]
    r, row_block = lane % 16, first_block + lane // 16
    sums = tl.zeros((UNITS, ROWS), tl.float32)
    for first in tl.range(0, PAIRS * PER, UNITS, num_stages=STAGES):
        if ONE_GROUP:
            pair, start = first // PER, first % PER
            u = start + tl.arange(0, UNITS)
            inside = u < PER
            blocks = start // 32
        else:
            flat = first + tl.arange(0, UNITS)
            inside = flat < PAIRS * PER
            if PAIRS == 1:
                pair, u = first * 0, flat
            else:
                pair, u = tl.minimum(flat // PER, PAIRS - 1), flat % PER
            blocks = (u // IN_BLOCK)[:, None]
        expert = tl.load(ids + pair).to(tl.int64) - first_expert
        here = (expert >= 0) & (expert < EXPERTS)
        block_at = tl.load(places + tl.where(here, expert, 0))
        inside = inside & here & (block_at >= 0)
        factor = 1.0
        if WEIGHTED:
            factor = tl.load(weights + pair).to(tl.float32)
        column = x + pair * K + (u // IN_BLOCK * 32 + u % IN_BLOCK * min(COLUMNS, 4))
        if PAIRS > 1 and not ONE_GROUP:
            block_at = block_at[:, None]
        mask, at = inside[:, None], block_at + AT
        low, high, minimum = _scale(
            memory, halves, floats, block_at + SCALES_AT, row_block, blocks, r, mask, K, GROUP, SCALES
        )
        if STORED == 0 or STORED == 3:  # a unit is a column
            columns = (tl.load(column, mask=inside, other=0).to(tl.float32) * factor)[:, None]
            offset = (row_block * K + u[:, None]) * 16 + r
            if STORED == 0:
                base = typed + _aligned(at, BITS // 8)
                sums += tl.load(base + offset, mask=mask, other=0).to(tl.float32) * columns
            else:
                # The bits of an e4m3 float stand in those of a float32 whose bias is 127 in block_at of 7.
                byte = tl.load(typed + _aligned(at, 1) + offset, mask=mask, other=0).to(tl.int32)
                value = (((byte << 24) >> 4) & -2014314496).to(tl.float32, bitcast=True)
                sums += value * (low * 1329227995784915872903807060280344576.0) * columns  # 2^120
        else:
            BLOCK_WORDS: tl.constexpr = 128 if STORED == 1 else 16 * BITS
            within = (u % IN_BLOCK)[:, None]
            base = words + _aligned(at, 4)
            start = (row_block * (K // 32) + blocks) * BLOCK_WORDS
            word = tl.load(base + start + within * 16 + r, mask=mask, other=0)
            if ZEROS:
                of_group = (row_block * (K // GROUP) + blocks * 32 // GROUP) * 16 + r
                zeros = memory + _aligned(block_at + ZEROS_AT, 1)
                zero = tl.load(zeros + of_group, mask=mask, other=0).to(tl.float32)
            else:
                zero = MIDDLE
            part = tl.zeros((UNITS, ROWS), tl.float32)
            if STORED == 1:
                for c in tl.static_range(4):
                    one = tl.load(column + c, mask=inside, other=0).to(tl.float32) * factor
                    part += _product(word, one[:, None], zero, 8 * c, 255, 0)
                sums += part * low
            else:
                lows, highs = _nibbles(base, start, within, word, r, mask, BITS)
                MASK: tl.constexpr = 15 if BITS == 4 else 255
                UPPER: tl.constexpr = 4 if BITS == 4 else 0
                other = tl.zeros((UNITS, ROWS), tl.float32)
                seen = tl.zeros((UNITS,), tl.float32)
                for c in tl.static_range(4):
                    x_low = tl.load(column + c, mask=inside, other=0).to(tl.float32) * factor
                    x_high = tl.load(column + 16 + c, mask=inside, other=0).to(tl.float32) * factor
                    part += _product(lows, x_low[:, None], zero, 8 * c, MASK, CODES)
                    of_high = _product(highs, x_high[:, None], zero, 8 * c + UPPER, MASK, CODES)
                    if SCALES >= 6:
                        other += of_high
                    else:
                        part += of_high
                    seen += x_low + x_high
                sums += part * low
                if SCALES >= 6:
                    sums += other * high
                if SCALES == 5:
                    sums -= minimum * seen[:, None]
    return tl.sum(sums, 0)


@triton.jit
def _up(
    memory, words, halves, floats, typed, x, ids, places, hidden, first_expert, limit, alpha,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, INNER: tl.constexpr, AT: tl.constexpr, SCALES_AT: tl.constexpr,
    ZEROS_AT: tl.constexpr, BIAS_AT: tl.constexpr, BIASED: tl.constexpr, LIMITED: tl.constexpr, GELU: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, STORED: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    BITS: tl.constexpr, MIDDLE: tl.constexpr, CODES: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """hidden (pairs, INNER) float32: 16 columns of the product of gate and up."""
    pair, j = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64) - first_expert
    here = (expert >= 0) & (expert < EXPERTS)
    block_at = tl.load(places + tl.where(here, expert, 0))
    n = tl.arange(0, 16)
    if here & (block_at >= 0):
        both = _sums(
            memory, words, halves, floats, typed, x + pair // TOP_K * K, ids + pair, places, ids, first_expert, 2 * j,
            1, False, EXPERTS, 32, AT, SCALES_AT, ZEROS_AT, K, GROUP, STORED, SCALES, ZEROS, BITS, MIDDLE, CODES, UNITS,
            STAGES,
        )  # fmt: skip
        if BIASED:
            both += tl.load(floats + (block_at + BIAS_AT) // 4 + j * 32 + tl.arange(0, 32))
        gate, up = tl.split(tl.trans(tl.reshape(both, (2, 16))))
        if LIMITED:
            gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
            out = (up + 1) * gate / (1 + tl.exp(-alpha * gate))
        elif GELU:
            out = gate / (1 + tl.exp(-1.5957691216 * gate * (1 + 0.044715 * gate * gate))) * up
        else:
            out = gate / (1 + tl.exp(-gate)) * up
        tl.store(hidden + pair * INNER + j * 16 + n, out)


@triton.jit
def _down(
    memory, words, halves, floats, typed, hidden, ids, weights, places, out, first_expert, columns,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, AT: tl.constexpr, SCALES_AT: tl.constexpr, ZEROS_AT: tl.constexpr,
    BIAS_AT: tl.constexpr, BIASED: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, STORED: tl.constexpr,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr, CODES: tl.constexpr,
    UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out (T, columns): 16 columns of a row, summed over its experts."""
    t, j = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, 16)
    total = _sums(
        memory, words, halves, floats, typed, hidden + t * TOP_K * K, ids + t * TOP_K, places, weights + t * TOP_K,
        first_expert, j, TOP_K, True, EXPERTS, 16, AT, SCALES_AT, ZEROS_AT, K, GROUP, STORED, SCALES, ZEROS, BITS,
        MIDDLE, CODES, UNITS, STAGES,
    )  # fmt: skip
    if BIASED:
        for choice in range(TOP_K):
            expert = tl.load(ids + t * TOP_K + choice).to(tl.int64) - first_expert
            here = (expert >= 0) & (expert < EXPERTS)
            block_at = tl.load(places + tl.where(here, expert, 0))
            bias = floats + (block_at + BIAS_AT) // 4 + j * 16 + n
            mask = (n >= 0) & here & (block_at >= 0)
            total += tl.load(bias, mask=mask, other=0) * tl.load(weights + t * TOP_K + choice).to(tl.float32)
    column = j * 16 + n
    tl.store(out + t * columns + column, total.to(out.dtype.element_ty), mask=column < columns)


def constants(shape: ExpertBlocks, name: str) -> dict[str, int | bool]:
    """The constants of the kernel of "w13" or "w2", and how many warps run a program."""
    stored = layout(shape, name)
    tile = TILES[stored["STORED"]][name == "w2"]
    biases = dict(BIAS_AT=shape.offsets[name][3], BIASED=shape.kind.biased)
    return stored | biases | dict(UNITS=tile.units, STAGES=tile.stages, num_warps=tile.warps)


def layout(shape: ExpertBlocks, name: str) -> dict[str, int | bool]:
    """The constants that say how the matrix "w13" or "w2" lies in a block."""
    format, (_, columns) = shape.formats[name], shape.shapes[name]
    spec, (at, scales, zeros, _) = format.spec, shape.offsets[name]
    return dict(
        AT=at,
        SCALES_AT=scales,
        ZEROS_AT=zeros,
        K=columns,
        GROUP=format.group or columns,
        STORED=E4M3 if spec.float_levels else FLOATS if not spec.quantised else BYTES if spec.bits == 8 else NIBBLES,
        SCALES=kind_of_scales(format),
        ZEROS=format.zeros,
        BITS=spec.bits,
        MIDDLE=spec.middle,
        CODES=NUMBERS if not spec.codes else FLOAT_CODES if spec.codes == E2M1 else TABLE_CODES,
    )


def kind_of_scales(format: Format) -> int:
    spec = format.spec
    if not spec.quantised:
        return NONE
    if nesting := spec.nesting:
        if nesting.of_rows:
            return OF_ROWS
        return MINIMUMS if nesting.minimums else SIXTEENS if nesting.columns == 16 else NESTED
    return {"float16": HALVES, "float32": WIDE, "uint8": EXPONENTS}[spec.scale_type]


def views(memory: Tensor, format: Format) -> tuple[Tensor, ...]:
    """`memory` (uint8) as the kernels take it."""
    flat = memory.view(-1)
    stored = torch.uint8 if format.spec.quantised else getattr(torch, format.kind)
    return flat, *(flat.view(kind) for kind in (torch.int32, torch.float16, torch.float32, stored))


def mixture(
    x: Tensor, weights: Tensor, ids: Tensor, shape: ExpertBlocks, memory: Tensor, places: Tensor, first_expert: int
) -> Tensor:
    """As `moe`, of the experts whose blocks of `shape` lie in `memory` (uint8) at `places` (experts) int64."""
    (tokens, top_k), kind = ids.shape, shape.kind
    ids = ids.contiguous()
    hidden = torch.empty(tokens * top_k, shape.inner, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    common = dict(TOP_K=top_k, EXPERTS=len(places))
    _up[(tokens * top_k, shape.inner // 16)](
        *views(memory, shape.formats["w13"]), x.contiguous(), ids, places, hidden, first_expert, kind.limit,
        kind.alpha, INNER=shape.inner, LIMITED=bool(kind.limit), GELU=kind.gelu, **common, **constants(shape, "w13"),
    )  # fmt: skip
    _down[(tokens, shape.shapes["w2"][0] // 16)](
        *views(memory, shape.formats["w2"]), hidden, ids, weights.contiguous(), places, out, first_expert, x.shape[1],
        **common, **constants(shape, "w2"),
    )  # fmt: skip
    return out

"""Experts' products for few rows, read from the CPU's own blocks (ops/cpu/csrc/kernels/matrix.h draws them).

A pair is a row with one of its experts. A program multiplies a pair's row by 16 rows of a matrix, of gate and of up at
once. It walks over the columns in steps of `STEP` blocks of 32: a block of quants is 64 (4 bits) or 128 (8 bits) words
of four neighbouring columns of a row each, 16 rows side by side, so a warp's loads are whole lines. Every lane keeps
its own sum, of one row and of each word's columns, and the lanes of a row are added once, at the end.

Experts are found by `places`: the offset of each one's block in `memory`, negative for those that are not there, whose
pairs add nothing. Levels are multiplied as float32 by float32 rows, so nothing is rounded but the sum's order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from umbra.ops.cpu.shadow import ExpertBlocks
from umbra.ops.formats import Format

STEP = 4  # blocks of 32 columns at a time
FLOATS, BYTES, NIBBLES, E4M3 = 0, 1, 2, 3  # how quants are stored
NONE, HALVES, WIDE, EXPONENTS, NESTED, MINIMUMS, SIXTEENS = 0, 1, 2, 3, 4, 5, 6  # kinds of scales


@triton.jit
def _scale(
    memory, halves, floats, at, row_block, block, r, K: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr
):  # fmt: skip
    """The scales of rows `r` in blocks of 32 columns `block`: (of the first 16 columns, of the others, minimum). They
    begin `at` bytes behind `memory`."""
    if SCALES == 0:
        one = (block + r + 1 > 0).to(tl.float32)
        return one, one, one
    elif SCALES == 1:
        scale = tl.load(halves + at // 2 + (row_block * (K // GROUP) + block * 32 // GROUP) * 16 + r).to(tl.float32)
        return scale, scale, scale
    elif SCALES == 2:
        scale = tl.load(floats + at // 4 + (row_block * (K // GROUP) + block * 32 // GROUP) * 16 + r)
        return scale, scale, scale
    elif SCALES == 3:
        exponent = tl.load(memory + at + (row_block * (K // GROUP) + block * 32 // GROUP) * 16 + r).to(tl.float32)
        scale = tl.exp2(exponent - 127.0)
        return scale, scale, scale
    else:
        HALVES_OF: tl.constexpr = 2 if SCALES == 5 else 1
        BYTES_OF: tl.constexpr = 1 if SCALES == 4 else 2
        GROUP_BYTES: tl.constexpr = 32 * HALVES_OF + GROUP // 32 * BYTES_OF * 16
        group = at + (row_block * (K // GROUP) + block * 32 // GROUP) * GROUP_BYTES
        of_scale = tl.load(halves + group // 2 + r).to(tl.float32)
        bytes_at = memory + group + 32 * HALVES_OF + (block % (GROUP // 32)) * BYTES_OF * 16 + r
        first = tl.load(bytes_at)
        if SCALES == 5:
            minimum = tl.load(halves + group // 2 + 16 + r).to(tl.float32) * tl.load(bytes_at + 16).to(tl.float32)
            scale = of_scale * first.to(tl.float32)
            return scale, scale, minimum
        elif SCALES == 6:
            second = tl.load(bytes_at + 16)
            low = of_scale * first.to(tl.int8, bitcast=True).to(tl.float32)
            return low, of_scale * second.to(tl.int8, bitcast=True).to(tl.float32), low
        else:
            scale = of_scale * first.to(tl.int8, bitcast=True).to(tl.float32)
            return scale, scale, scale


@triton.jit
def _value(level, codes, CODED: tl.constexpr):
    """The values of integers `level`, as float32."""
    if CODED:
        return tl.load(codes + level)
    else:
        return level.to(tl.float32)


@triton.jit
def _sums(
    memory, words, halves, floats, typed, codes, x, base, scales_at, zeros_at, row_block, live,
    K: tl.constexpr, GROUP: tl.constexpr, STORED: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    BITS: tl.constexpr, MIDDLE: tl.constexpr, CODED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The products of a row at `x` by the 16 rows of a row block whose matrix begins `place` bytes behind `memory`."""
    r = tl.arange(0, 16)[None, :]
    if STORED == 0 or STORED == 3:  # (columns, 16 rows)
        column = tl.arange(0, STEP * 32)[:, None]
        sums = tl.zeros((STEP * 32, 16), tl.float32)
        for first in range(0, K, STEP * 32):
            k = first + column
            inside = (k < K) & live
            if STORED == 0:
                at = base // (BITS // 8) + (row_block * K + k) * 16 + r
                value = tl.load(typed + at, mask=inside, other=0).to(tl.float32)
            else:
                # The bits of an e4m3 float stand in those of a half with the bias 15 in place of 7.
                byte = tl.load(typed + base + (row_block * K + k) * 16 + r, mask=inside, other=0).to(tl.uint16)
                half = ((byte & 128) << 8 | (byte & 127) << 7).to(tl.float16, bitcast=True)
                value = half.to(tl.float32) * 256.0
                low, _, _ = _scale(
                    memory, halves, floats, scales_at, row_block, tl.minimum(k, K - 1) // 32, r, K, GROUP, SCALES
                )
                value = value * low
            sums += value * tl.load(x + k, mask=inside, other=0)
        return tl.sum(sums, 0)
    else:
        IN_BLOCK: tl.constexpr = 8 if STORED == 1 else 4  # words of a row in a block
        BLOCK_WORDS: tl.constexpr = 128 if STORED == 1 else 16 * BITS
        i = tl.arange(0, STEP * IN_BLOCK)[:, None]
        sums = tl.zeros((STEP * IN_BLOCK, 16), tl.float32)
        for first in range(0, K // 32, STEP):
            block = first + i // IN_BLOCK
            inside = (block < K // 32) & live
            block = tl.minimum(block, K // 32 - 1)
            within = i % IN_BLOCK
            start = base // 4 + (row_block * (K // 32) + block) * BLOCK_WORDS
            word = tl.load(words + start + within * 16 + r, mask=inside, other=0)
            low, high, minimum = _scale(memory, halves, floats, scales_at, row_block, block, r, K, GROUP, SCALES)
            k = block * 32 + within * 4
            if ZEROS:
                zero = tl.load(memory + zeros_at + (row_block * (K // GROUP) + block * 32 // GROUP) * 16 + r).to(
                    tl.float32
                )
            else:
                zero = MIDDLE
            if STORED == 1:
                part = tl.zeros((STEP * IN_BLOCK, 16), tl.float32)
                for c in tl.static_range(4):
                    value = ((word >> (8 * c)) & 255).to(tl.float32) - zero
                    part += value * tl.load(x + k + c, mask=inside, other=0)
                sums += part * low
            else:
                part = tl.zeros((STEP * IN_BLOCK, 16), tl.float32)
                other = tl.zeros((STEP * IN_BLOCK, 16), tl.float32)
                seen = tl.zeros((STEP * IN_BLOCK, 1), tl.float32)
                if BITS == 5:  # bit c / 4 of byte 4 r + c % 4
                    above = tl.load(words + start + 64 + r, mask=inside, other=0)
                    of_low, of_high = (above >> within) & 0x01010101, (above >> (within + 4)) & 0x01010101
                elif BITS == 6:  # bits 2 (c / 4 % 4) of the vectors of the first and of the last 16 columns
                    of_low = (tl.load(words + start + 64 + r, mask=inside, other=0) >> (2 * within)) & 0x03030303
                    of_high = (tl.load(words + start + 80 + r, mask=inside, other=0) >> (2 * within)) & 0x03030303
                for c in tl.static_range(4):
                    level = (word >> (8 * c)) & 15
                    upper = (word >> (8 * c + 4)) & 15
                    if BITS > 4:
                        level = level | ((of_low >> (8 * c)) & 3) << 4
                        upper = upper | ((of_high >> (8 * c)) & 3) << 4
                    x_low = tl.load(x + k + c, mask=inside, other=0)
                    x_high = tl.load(x + k + 16 + c, mask=inside, other=0)
                    part += (_value(level, codes, CODED) - zero) * x_low
                    other += (_value(upper, codes, CODED) - zero) * x_high
                    seen += x_low + x_high
                sums += part * low + other * high
                if SCALES == 5:
                    sums -= minimum * seen
        return tl.sum(sums, 0)


@triton.jit
def _up(
    memory, words, halves, floats, typed, codes, x, ids, places, hidden, first_expert, limit, alpha,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, INNER: tl.constexpr, AT: tl.constexpr, SCALES_AT: tl.constexpr,
    ZEROS_AT: tl.constexpr, BIAS_AT: tl.constexpr, BIASED: tl.constexpr, LIMITED: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, STORED: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr,
    MIDDLE: tl.constexpr, CODED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """hidden (pairs, INNER) float32: 16 columns of the product of gate and up."""
    pair, j = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64) - first_expert
    here = (expert >= 0) & (expert < EXPERTS)
    base = tl.load(places + tl.where(here, expert, 0))
    live = here & (base >= 0)
    base = tl.multiple_of(tl.where(live, base, 0), 64)
    row = x + pair // TOP_K * K
    if live:
        gate = _sums(
            memory, words, halves, floats, typed, codes, row, base + AT, base + SCALES_AT, base + ZEROS_AT, 2 * j,
            live, K, GROUP, STORED, SCALES, ZEROS, BITS, MIDDLE, CODED, STEP,
        )  # fmt: skip
        up = _sums(
            memory, words, halves, floats, typed, codes, row, base + AT, base + SCALES_AT, base + ZEROS_AT,
            2 * j + 1, live, K, GROUP, STORED, SCALES, ZEROS, BITS, MIDDLE, CODED, STEP,
        )  # fmt: skip
        n = tl.arange(0, 16)
        if BIASED:
            gate += tl.load(floats + (base + BIAS_AT) // 4 + j * 32 + n)
            up += tl.load(floats + (base + BIAS_AT) // 4 + j * 32 + 16 + n)
        if LIMITED:
            gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
            out = (up + 1) * gate / (1 + tl.exp(-alpha * gate))
        else:
            out = gate / (1 + tl.exp(-gate)) * up
        tl.store(hidden + pair * INNER + j * 16 + n, out)


@triton.jit
def _down(
    memory, words, halves, floats, typed, codes, x, ids, weights, places, out, first_expert, columns,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, AT: tl.constexpr, SCALES_AT: tl.constexpr, ZEROS_AT: tl.constexpr,
    BIAS_AT: tl.constexpr, BIASED: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, STORED: tl.constexpr,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr, CODED: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """out (T, columns): 16 columns of a row, summed over its experts in their order."""
    t, j = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, 16)
    total = tl.zeros((16,), tl.float32)
    for choice in range(TOP_K):
        pair = t * TOP_K + choice
        expert = tl.load(ids + pair).to(tl.int64) - first_expert
        here = (expert >= 0) & (expert < EXPERTS)
        base = tl.load(places + tl.where(here, expert, 0))
        live = here & (base >= 0)
        base = tl.multiple_of(tl.where(live, base, 0), 64)
        if live:
            y = _sums(
                memory, words, halves, floats, typed, codes, x + pair * K, base + AT, base + SCALES_AT,
                base + ZEROS_AT, j, live, K, GROUP, STORED, SCALES, ZEROS, BITS, MIDDLE, CODED, STEP,
            )  # fmt: skip
            if BIASED:
                y += tl.load(floats + (base + BIAS_AT) // 4 + j * 16 + n)
            total += y * tl.load(weights + pair).to(tl.float32)
    column = j * 16 + n
    tl.store(out + t * columns + column, total.to(out.dtype.element_ty), mask=column < columns)


def constants(shape: ExpertBlocks, name: str) -> dict[str, int | bool]:
    """The constants of the kernel of "w13" or "w2"."""
    format, (_, columns) = shape.formats[name], shape.shapes[name]
    spec, (at, scales, zeros, bias) = format.spec, shape.offsets[name]
    stored = E4M3 if spec.float_levels else FLOATS if not spec.quantised else BYTES if spec.bits == 8 else NIBBLES
    return dict(
        AT=at,
        SCALES_AT=scales,
        ZEROS_AT=zeros,
        BIAS_AT=bias,
        BIASED=shape.kind.biased,
        K=columns,
        GROUP=format.group or columns,
        STORED=stored,
        SCALES=kind_of_scales(format),
        ZEROS=format.zeros,
        BITS=spec.bits,
        MIDDLE=0 if spec.codes else spec.middle,
        CODED=bool(spec.codes),
        STEP=STEP,
    )


def kind_of_scales(format: Format) -> int:
    spec = format.spec
    if not spec.quantised:
        return NONE
    if nesting := spec.nesting:
        return MINIMUMS if nesting.minimums else SIXTEENS if nesting.columns == 16 else NESTED
    return {"float16": HALVES, "float32": WIDE, "uint8": EXPONENTS}[spec.scale_type]


_codes: dict[tuple[str, torch.device], Tensor] = {}


def views(memory: Tensor, format: Format) -> tuple[Tensor, ...]:
    """`memory` (uint8) as the kernels take it, and the values of the format's codes."""
    flat, spec, key = memory.view(-1), format.spec, (format.kind, memory.device)
    stored = torch.uint8 if spec.quantised else getattr(torch, format.kind)
    if key not in _codes:
        _codes[key] = torch.tensor(spec.codes or (0,), dtype=torch.float32, device=memory.device)
    words, halves, floats = (flat.view(kind) for kind in (torch.int32, torch.float16, torch.float32))
    return flat, words, halves, floats, flat.view(stored), _codes[key]


def mixture(
    x: Tensor, weights: Tensor, ids: Tensor, shape: ExpertBlocks, memory: Tensor, places: Tensor, first_expert: int
) -> Tensor:
    """As `moe`, of the experts whose blocks of `shape` lie in `memory` (uint8) at `places` (experts) int64."""
    (tokens, top_k), kind = ids.shape, shape.kind
    rows, ids = x.float().contiguous(), ids.contiguous()
    hidden = torch.empty(tokens * top_k, shape.inner, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    common = dict(TOP_K=top_k, EXPERTS=len(places))
    _up[(tokens * top_k, shape.inner // 16)](
        *views(memory, shape.formats["w13"]), rows, ids, places, hidden, first_expert, kind.limit, kind.alpha,
        INNER=shape.inner, LIMITED=bool(kind.limit), **common, **constants(shape, "w13"),
    )  # fmt: skip
    _down[(tokens, shape.shapes["w2"][0] // 16)](
        *views(memory, shape.formats["w2"]), hidden, ids, weights.contiguous(), places, out, first_expert, x.shape[1],
        **common, **constants(shape, "w2"),
    )  # fmt: skip
    return out

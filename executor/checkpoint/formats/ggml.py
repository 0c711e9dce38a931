"""Decodes the blocks of ggml's types into the levels of a format that keeps them, or into floats.

`blocks` are always bytes (rows, blocks of a row, bytes of a block). Fields are in the order of the bytes; d, m and
dmin are float16. Products are made in the order in which `gguf.quants` makes them, so that all bits are equal.

This is the portable reference: it decodes for every device, and for rows that no format keeps. The CPU's packing of
kept formats (ops/cpu/csrc/kernels/blocks.cpp) goes from the blocks to its own layout at once, and has the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from umbra.models.gguf.types import FLOATS
from umbra.ops.formats import SPECS, Format, FormatSpec
from umbra.ops.formats.iq4 import IQ4
from umbra.ops.formats.mxfp4 import MXFP4
from umbra.ops.formats.nvfp4 import NVFP4
from umbra.ops.formats.q4 import Q4
from umbra.ops.formats.q4_k import Q4_K
from umbra.ops.formats.q5_k import Q5_K
from umbra.ops.formats.q6_k import Q6_K
from umbra.ops.formats.q8 import Q8
from umbra.ops.formats.quantised import Nested, Quantised
from umbra.ops.formats.records import grid_of

# The format that keeps the blocks of each type bit for bit.
KEPT = {
    block.name: Format(spec.name, min(spec.group, block.columns))
    for spec in SPECS.values()
    for block in spec.block_types
}
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def values_of(kind: str, blocks: Tensor, factor: float = 1.0) -> Tensor | Quantised:
    """The rows in their format, or as floats: the three float types in their own type, types that are kept as records
    in float32. `factor`: of all weights, in a format that keeps it."""
    if kind in FLOATS:
        return blocks.flatten(1).view(FLOAT_TYPES[kind])
    if kind in DEQUANTISED:
        return DEQUANTISED[kind](blocks).flatten(1)
    values = quantised(kind, blocks)
    return values if factor == 1 or not isinstance(values, Nested) else replace(values, d=values.d * factor)


def quantised(kind: str, blocks: Tensor) -> Quantised:
    """Rows of a type whose levels are numbers or codes."""
    return LEVELS[kind](blocks)


def _q4_0(blocks: Tensor) -> Quantised:
    return Quantised(Q4, _row(_nibbles(blocks[..., 2:])), _half(blocks, 0), None)


def _q8_0(blocks: Tensor) -> Quantised:
    return Quantised(Q8, _row(blocks[..., 2:]).contiguous().view(torch.int8), _half(blocks, 0), None)


def _mxfp4(blocks: Tensor) -> Quantised:  # its table is doubled, and its exponent one less
    return Quantised(
        MXFP4, _row(_nibbles(blocks[..., 1:])), blocks[..., 0].contiguous().view(torch.float8_e8m0fnu), None
    )


def _nvfp4(blocks: Tensor) -> Nested:  # its table is doubled, and its scales are halved
    """Eight bytes are sixteen columns. A scale of 0x7f is 0."""
    scales = blocks[..., :4] & 0x7F
    scales = torch.where(scales == 0x7F, 0, scales).flatten(1).view(torch.float8_e4m3fn)
    return Nested(NVFP4, _row(_pieces(blocks[..., 4:], 8, 4)), scales, None, torch.ones(len(blocks), 1))


def _iq4_nl(blocks: Tensor) -> Nested:
    d = _half(blocks, 0)
    return Nested(IQ4, _row(_nibbles(blocks[..., 2:])), torch.ones_like(d, dtype=torch.int8), None, d)


def _q5_0(blocks: Tensor) -> Nested:
    d = _half(blocks, 0)
    ones = torch.ones_like(d, dtype=torch.uint8)
    return Nested(Q5_K, _row(_fives(blocks[..., 2:])), ones, 16 * ones, d, d)


def _with_minimum(blocks: Tensor) -> Nested:
    """Q4_1 and Q5_1: d, m, then levels."""
    spec, read = (Q4_K, _nibbles) if blocks.shape[-1] == 20 else (Q5_K, _fives)
    levels = read(blocks[..., 4:])
    d, m = _half(blocks, 0), _half(blocks, 2)
    ones = torch.ones_like(d, dtype=torch.uint8)
    return Nested(spec, _row(levels), ones, ones, d, -m)


def _q4_k(blocks: Tensor) -> Nested:
    return _with_minimums(Q4_K, blocks, _pieces(blocks[..., 16:], 32, 4))


def _q5_k(blocks: Tensor) -> Nested:
    return _with_minimums(Q5_K, blocks, _pieces(blocks[..., 48:], 32, 4) | _pieces(blocks[..., 16:48], 32, 1) << 4)


def _with_minimums(spec: FormatSpec, blocks: Tensor, levels: Tensor) -> Nested:
    """Eight scales and minimums of six bits each are packed into 12 bytes."""
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], -1)
    minimums = torch.cat([second & 63, third >> 4 | second >> 2 & 48], -1)
    return Nested(spec, _row(levels), _row(scales), _row(minimums), _half(blocks, 0), _half(blocks, 2))


def _q6_k(blocks: Tensor) -> Nested:
    levels = _pieces(blocks[..., :128], 64, 4) | _pieces(blocks[..., 128:192], 32, 2) << 4
    return Nested(
        Q6_K, _row(levels), _row(blocks[..., 192:208]).contiguous().view(torch.int8), None, _half(blocks, 208)
    )


def _iq4_xs(blocks: Tensor) -> Nested:
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    high = (blocks[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8)).flatten(-2) & 3
    scales = (low | high << 4).view(torch.int8) - 32
    return Nested(IQ4, _row(_pieces(blocks[..., 8:], 16, 4)), _row(scales), None, _half(blocks, 0))


def _row(x: Tensor) -> Tensor:
    """Puts the values of a row's blocks side by side."""
    return x.flatten(1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at the byte `at` of each block: (rows, blocks)"""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(bytes_: Tensor) -> Tensor:
    """The lower halves of all bytes, then the upper halves."""
    return _pieces(bytes_, bytes_.shape[-1], 4)


def _fives(bytes_: Tensor) -> Tensor:
    """Levels of five bits: 32 highest bits, then nibbles."""
    high = (bytes_[..., :4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return _nibbles(bytes_[..., 4:]) | high.flatten(-2) << 4


def _pieces(bytes_: Tensor, run: int, bits: int) -> Tensor:
    """Numbers of `bits` bits: each `run` bytes, of which there are four or a multiple, hold first the lowest bits of
    all, then the next."""
    kind, size = (torch.int64, 8) if run % 8 == 0 else (torch.int32, 4)  # words are much faster than bytes
    words = bytes_.contiguous().view(kind).unflatten(-1, (-1, run // size))
    out = torch.empty(*words.shape[:-1], 8 // bits, words.shape[-1], dtype=kind)
    mask = int.from_bytes(bytes([(1 << bits) - 1] * size))
    for piece in range(8 // bits):
        torch.bitwise_and(words >> piece * bits, mask, out=out[..., piece, :])
    return out.flatten(-3).view(torch.uint8)


def _grouped(levels: Tensor, columns: int) -> Tensor:
    return levels.float().unflatten(-1, (-1, columns))


def _word(blocks: Tensor, at: int, end: int, count: int = 1) -> Tensor:
    """`count` words of each eighth of a block, in int64: (rows, blocks, 8, count)"""
    words = blocks[..., at:end].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return words.unflatten(-1, (8, count))


def _bytes(blocks: Tensor, at: int, end: int, count: int = 1) -> Tensor:
    return blocks[..., at:end].long().unflatten(-1, (8, count))


def _each(x: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    return x >> torch.tensor(shifts) & mask


def _in_grid(name: str, index: Tensor) -> Tensor:
    """The entries of eighths of a block side by side: (rows, blocks, 8, 32)"""
    return grid_of(name)[index].flatten(-2).float()


def _signed(values: Tensor, signs: Tensor) -> Tensor:
    """`signs` (rows, blocks, 8, words), whose bits are those of the columns."""
    bits = 32 // signs.shape[-1]
    return torch.where((_each(signs[..., None], range(bits), 1) == 1).flatten(-2), -values, values)


def _even(sevens: Tensor) -> Tensor:
    """Seven signs with the eighth, which makes their number even."""
    return sevens | _each(sevens[..., None], range(7), 1).sum(-1) % 2 << 7


def _scaled(d: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """`d` (rows, blocks), `scales` (rows, blocks, 8, 1 or 2), `values` (rows, blocks, 8, 32)"""
    factors = d.float()[..., None, None] * scales
    return (factors[..., None] * values.unflatten(-1, (scales.shape[-1], -1))).flatten(-4)


SEVENS, BYTES = range(0, 28, 7), range(0, 32, 8)


def _iq2_xxs(blocks: Tensor) -> Tensor:
    first, last = _word(blocks, 2, 66, 2).split(1, -1)
    values = _signed(_in_grid("IQ2_XXS", _each(first, BYTES, 255)), _even(_each(last, SEVENS, 127)))
    return _scaled(_half(blocks, 0).float() / 8, 2 * (last >> 28) + 1, values)


def _iq2_xs(blocks: Tensor) -> Tensor:
    words = _each(_word(blocks, 2, 66, 2)[..., None], (0, 16), 0xFFFF).flatten(-2)
    values = _signed(_in_grid("IQ2_XS", words & 511), _even(words >> 9))
    return _scaled(_half(blocks, 0).float() / 8, 2 * _each(_bytes(blocks, 66, 74), (0, 4), 15) + 1, values)


def _iq2_s(blocks: Tensor) -> Tensor:
    high = _each(_bytes(blocks, 66, 74), range(0, 8, 2), 3)
    values = _in_grid("IQ2_S", _bytes(blocks, 2, 34, 4) | high << 8)
    scales = 2 * _each(_bytes(blocks, 74, 82), (0, 4), 15) + 1
    return _scaled(_half(blocks, 0).float() / 8, scales, _signed(values, _bytes(blocks, 34, 66, 4)))


def _iq3_xxs(blocks: Tensor) -> Tensor:
    last = _word(blocks, 66, 98)
    values = _in_grid("IQ3_XXS", _bytes(blocks, 2, 66, 8))
    return _scaled(_half(blocks, 0).float() / 4, 2 * (last >> 28) + 1, _signed(values, _even(_each(last, SEVENS, 127))))


def _iq3_s(blocks: Tensor) -> Tensor:
    high = _each(_bytes(blocks, 66, 74), range(8), 1)
    values = _in_grid("IQ3_S", _bytes(blocks, 2, 66, 8) | high << 8)
    scales = _each(blocks[..., 106:110, None].long(), (0, 4), 15).flatten(-2)[..., None]
    return _scaled(_half(blocks, 0), 2 * scales + 1, _signed(values, _bytes(blocks, 74, 106, 4)))


def _iq1_s(blocks: Tensor) -> Tensor:
    low, high = _bytes(blocks, 34, 50, 2).split(1, -1)
    both = low | high << 8
    values = _in_grid("IQ1_S", _bytes(blocks, 2, 34, 4) | _each(both, range(0, 12, 3), 7) << 8)
    return _scaled(_half(blocks, 0).float() / 8, 2 * (both >> 12 & 7) + 1, values + 1 - 2 * (both >> 15))


def _iq1_m(blocks: Tensor) -> Tensor:
    high = _each(_bytes(blocks, 32, 48, 2)[..., None], (0, 4), 15).flatten(-2)
    values = _in_grid("IQ1_S", _bytes(blocks, 0, 32, 4) | (high & 7) << 8).unflatten(-1, (4, 8))
    words = blocks[..., 48:56].contiguous().view(torch.int16).long() & 0xFFFF
    scales = 2 * _each(words[..., None], range(0, 12, 3), 7).flatten(-2).unflatten(-1, (8, 2)) + 1
    d = (words >> 12 << torch.tensor((0, 4, 8, 12))).sum(-1).to(torch.int16).view(torch.float16)
    return _scaled(d.float() / 8, scales, (values + 1 - 2 * (high >> 3)[..., None]).flatten(-2))


def _tq2_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 64)[..., None].float() * (_pieces(blocks[..., :64], 32, 2).float() - 1)


def _tq1_0(blocks: Tensor) -> Tensor:
    """Five levels of three to a byte: those of 32 bytes, then those of 16, and four to a byte of four more."""
    parts = ((blocks[..., :32], 5), (blocks[..., 32:48], 5), (blocks[..., 48:52], 4))
    shifted = [
        (part[..., None, :] * torch.tensor([3**i for i in range(n)]).byte()[:, None]).flatten(-2) for part, n in parts
    ]
    levels = (torch.cat(shifted, -1).int() * 3 >> 8) - 1
    return _half(blocks, 52)[..., None].float() * levels


def _q3_k(blocks: Tensor) -> Tensor:
    levels = _pieces(blocks[..., 32:96], 32, 2).float() - (4 - 4 * _pieces(blocks[..., :32], 32, 1).float())
    packed = blocks[..., 96:108]
    scales = (_pieces(packed[..., :8], 8, 4) | _pieces(packed[..., 8:], 4, 2) << 4).float() - 32
    return ((_half(blocks, 108)[..., None].float() * scales)[..., None] * _grouped(levels, 16)).flatten(-2)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, minimums = (blocks[..., :16] & 15).float(), (blocks[..., :16] >> 4).float()
    scales, minimums = (
        _half(blocks, at)[..., None].float() * sixteenth for at, sixteenth in ((80, scales), (82, minimums))
    )
    levels = _grouped(_pieces(blocks[..., 16:80], 32, 2), 16)
    return levels.mul_(scales[..., None]).sub_(minimums[..., None]).flatten(-2)


LEVELS: dict[str, Callable[[Tensor], Quantised]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q4_1": _with_minimum,
    "Q5_0": _q5_0,
    "Q5_1": _with_minimum,
    "IQ4_NL": _iq4_nl,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}
DEQUANTISED: dict[str, Callable[[Tensor], Tensor]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}

"""What the blocks of ggml's types mean: as the levels of a format that keeps them, or as floats.

`blocks` are always bytes (rows, blocks of a row, bytes of a block). Fields are in the order of the bytes; d, m and
dmin are float16. Products are made in the order in which `gguf.quants` makes them, so that all bits are equal.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from models.gguf.types import FLOATS
from ops.format import FORMATS, MXFP4, Format, Quantised

# The types whose blocks become levels of a format bit for bit, and the format.
KEPT: dict[str, Format] = {
    "Q8_0": FORMATS["q8"],
    "Q5_0": FORMATS["q8"],
    "IQ4_NL": FORMATS["q8"],
    "Q4_0": FORMATS["q4"],
    "MXFP4": MXFP4,
}
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def values_of(kind: str, blocks: Tensor) -> Tensor | Quantised:
    """The rows in their format if it keeps them, else as floats: the three float types in their own type, the others in
    float32."""
    if kind in FLOATS:
        return blocks.flatten(1).view(FLOAT_TYPES[kind])
    return quantised(kind, blocks) if kind in KEPT else DEQUANTISED[kind](blocks).flatten(1)


def quantised(kind: str, blocks: Tensor) -> Quantised:
    """Rows of one of the KEPT types."""
    if kind == "MXFP4":  # its table is doubled, and its exponent one less
        return Quantised(4, _nibbles(blocks[..., 1:]).flatten(1), _exponents(blocks[..., 0]), None)
    scales = _half(blocks, 0)[..., 0]
    if kind == "Q4_0":
        return Quantised(4, _nibbles(blocks[..., 2:]).flatten(1), scales, None)
    if kind == "Q8_0":
        levels = blocks[..., 2:].contiguous().view(torch.int8)
    elif kind == "Q5_0":
        levels = (_fives(blocks[..., 2:]) - 16).view(torch.int8)
    else:
        levels = torch.tensor(IQ4, dtype=torch.int8)[_nibbles(blocks[..., 2:]).int()]
    return Quantised(8, levels.flatten(1), scales, None)


def _exponents(bytes_: Tensor) -> Tensor:
    return bytes_.contiguous().view(torch.float8_e8m0fnu)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at the byte `at` of each block: (rows, blocks, 1)"""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


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


def _with_minimum(blocks: Tensor) -> Tensor:
    """Q4_1 and Q5_1: d, m, then levels."""
    levels = _nibbles(blocks[..., 4:]) if blocks.shape[-1] == 20 else _fives(blocks[..., 4:])
    return _half(blocks, 0).float() * levels.float() + _half(blocks, 2).float()


def _scales_and_minimums(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight of six bits each, from 12 bytes."""
    first, second, third = packed.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], -1)
    return scales.float(), torch.cat([second & 63, third >> 4 | second >> 2 & 48], -1).float()


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minimums(blocks, _pieces(blocks[..., 16:], 32, 4))


def _q5_k(blocks: Tensor) -> Tensor:
    return _with_minimums(blocks, _pieces(blocks[..., 48:], 32, 4) | _pieces(blocks[..., 16:48], 32, 1) << 4)


def _with_minimums(blocks: Tensor, levels: Tensor) -> Tensor:
    scales, minimums = _scales_and_minimums(blocks[..., 4:16])
    scales, minimums = _half(blocks, 0).float() * scales, _half(blocks, 2).float() * minimums
    return _grouped(levels, 32).mul_(scales[..., None]).sub_(minimums[..., None]).flatten(-2)


def _q6_k(blocks: Tensor) -> Tensor:
    levels = _pieces(blocks[..., :128], 64, 4) | _pieces(blocks[..., 128:192], 32, 2) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208).float()
    return _grouped(levels, 16).sub_(32).mul_(scales[..., None]).flatten(-2)


def _q3_k(blocks: Tensor) -> Tensor:
    levels = _pieces(blocks[..., 32:96], 32, 2).float() - (4 - 4 * _pieces(blocks[..., :32], 32, 1).float())
    packed = blocks[..., 96:108]
    scales = (_pieces(packed[..., :8], 8, 4) | _pieces(packed[..., 8:], 4, 2) << 4).float() - 32
    return ((_half(blocks, 108).float() * scales)[..., None] * _grouped(levels, 16)).flatten(-2)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, minimums = (blocks[..., :16] & 15).float(), (blocks[..., :16] >> 4).float()
    scales, minimums = _half(blocks, 80).float() * scales, _half(blocks, 82).float() * minimums
    levels = _grouped(_pieces(blocks[..., 16:80], 32, 2), 16)
    return levels.mul_(scales[..., None]).sub_(minimums[..., None]).flatten(-2)


def _iq4_xs(blocks: Tensor) -> Tensor:
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    high = (blocks[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8)).flatten(-2) & 3
    scales = _half(blocks, 0).float() * ((low | high << 4).float() - 32)
    levels = torch.tensor(IQ4, dtype=torch.float32)[_pieces(blocks[..., 8:], 16, 4).int()]
    return (scales[..., None] * _grouped(levels, 32)).flatten(-2)


DEQUANTISED: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_1": _with_minimum, "Q5_1": _with_minimum, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q3_K": _q3_k,
    "Q2_K": _q2_k, "IQ4_XS": _iq4_xs,
}  # fmt: skip

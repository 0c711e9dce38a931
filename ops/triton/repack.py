"""Packed 4-bit weights as checkpoints have them into the layout of ops/ascend/weights.py, bit for bit.

N outputs, K inputs, G inputs to a group; w = (nibble + offset) * scale.

                     words                                     scales      zero points
AWQ "gemm"           (K, N / 8): output 8 n + j is the         (K / G, N)  (K / G, N / 8), ordered as the words
                     nibble (j % 2) * 4 + j // 2
compressed-tensors   (N, K / 8): input 8 k + i is the          (N, K / G)  (N / 8, K / G): output 8 n + j is the
"pack-quantized"     nibble i                                              nibble j
here, on Ascend      (K, N / 8): output 8 n + j is the         (K / G, N)  offsets (K / G, N) = 8 - zero
                     nibble j

A nibble goes from level to level - 8, which is a flip of its highest bit. Groups stay as they are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.triton import PROGRAMS

BLOCK = 2048  # values that a program holds at a time
TILE = 32  # words each way
FLIP = tl.constexpr(-0x77777778)  # 0x88888888 as int32


@triton.jit  # type: ignore[untyped-decorator]
def awq_words_kernel(words: tl.tensor, out: tl.tensor, count: int, BLOCK: tl.constexpr) -> None:
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        places = start + tl.arange(0, BLOCK)
        x = tl.load(words + places, mask=places < count, other=0)
        y = tl.zeros((BLOCK,), tl.int32)
        for j in tl.static_range(8):
            y |= ((x >> (j % 2 * 4 + j // 2) * 4) & 15) << 4 * j
        tl.store(out + places, y ^ FLIP, mask=places < count)


@triton.jit  # type: ignore[untyped-decorator]
def compressed_words_kernel(words: tl.tensor, out: tl.tensor, outputs: int, inputs: int, TILE: tl.constexpr) -> None:
    """(8 outputs, inputs) -> (8 inputs, outputs) in tiles of 8 TILE outputs and inputs. Both sides are read and written
    along their rows; the turn is made inside."""
    across = tl.cdiv(outputs, TILE)
    for tile in range(tl.program_id(0), across * tl.cdiv(inputs, TILE), tl.num_programs(0)):
        n = tile % across * TILE + tl.arange(0, TILE)
        k = tile // across * TILE + tl.arange(0, TILE)
        for i in range(8):
            y = tl.zeros((TILE, TILE), tl.int32)
            for j in tl.static_range(8):
                held = (n < outputs)[:, None] & (k < inputs)[None, :]
                x = tl.load(words + (8 * n + j)[:, None] * inputs + k[None, :], mask=held, other=0)
                y |= ((x >> 4 * i) & 15) << 4 * j
            kept = (k < inputs)[:, None] & (n < outputs)[None, :]
            tl.store(out + (8 * k + i)[:, None] * outputs + n[None, :], tl.trans(y) ^ FLIP, mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def offsets_kernel(zeros: tl.tensor, out: tl.tensor, count: int, AWQ: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Words (BLOCK) to offsets (BLOCK, 8), made as (8, BLOCK): a shift by a vector would be done value by value."""
    output = tl.arange(0, 8)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        places = start + tl.arange(0, BLOCK)
        x = tl.load(zeros + places, mask=places < count, other=0)
        y = tl.zeros((8, BLOCK), tl.int32)
        for j in tl.static_range(8):
            zero = (x >> ((j % 2 * 4 + j // 2) * 4 if AWQ else 4 * j)) & 15
            y = tl.where(output[:, None] == j, 8 - zero[None, :], y)
        kept = (places < count)[:, None] & (output < 8)[None, :]
        offsets = tl.trans(y).to(tl.float32).to(out.dtype.element_ty)  # the interpreter makes bfloat16 of floats only
        tl.store(out + 8 * places[:, None] + output[None, :], offsets, mask=kept)


def awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """-> words (K, N / 8), scales and offsets (K / G, N) of `dtype`"""
    words = torch.empty_like(qweight, memory_format=torch.contiguous_format)
    _each_block(awq_words_kernel, qweight, words, BLOCK)
    return words, scales.to(dtype).contiguous(), _offsets(qzeros, dtype, awq=True)


def compressed(
    packed: Tensor, zeros: Tensor | None, scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """-> as `awq`; no offsets where there are no zero points"""
    if packed.shape[0] % 8:
        raise ValueError(f"repack: {packed.shape[0]} outputs do not fill words of 8")
    outputs, inputs = packed.shape[0] // 8, packed.shape[1]
    words = torch.empty(8 * inputs, outputs, dtype=torch.int32, device=packed.device)
    tiles = triton.cdiv(outputs, TILE) * triton.cdiv(inputs, TILE)
    compressed_words_kernel[(min(tiles, PROGRAMS),)](packed.contiguous(), words, outputs, inputs, TILE=TILE)
    offsets = None if zeros is None else _offsets(zeros.T, dtype, awq=False)
    return words, scales.T.to(dtype).contiguous(), offsets


def _offsets(zeros: Tensor, dtype: torch.dtype, awq: bool) -> Tensor:
    """(K / G, N / 8) -> (K / G, N)"""
    out = torch.empty(zeros.shape[0], 8 * zeros.shape[1], dtype=dtype, device=zeros.device)
    _each_block(offsets_kernel, zeros, out, BLOCK // 8, AWQ=awq)
    return out


def _each_block(kernel: triton.JITFunction, words: Tensor, out: Tensor, block: int, **options: bool) -> None:
    count = words.numel()
    kernel[(min(triton.cdiv(count, block), PROGRAMS),)](words.contiguous(), out, count, **options, BLOCK=block)

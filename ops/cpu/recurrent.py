"""The ops with states of gated DeltaNet layers, computed by csrc/kernels/delta.cpp; delta.h says how states lie."""

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops.cpu.engine import native, pointer, strided
from umbra.ops.interface import Recurrent

SLAB = 16  # fewest columns of a value head that are computed together


def _places(recurrent: Recurrent) -> "native.Places":
    starts, *tables = recurrent
    reads, writes, marks, marked, pending = (pointer(table, torch.int32) for table in tables)
    return native.Places(pointer(starts, torch.int64), reads, writes, marks, marked, pending, len(recurrent.reads))


def _states(states: Tensor) -> int:
    if not states[0].is_contiguous():
        raise TypeError(f"a place is not contiguous: {tuple(states.shape)} {states.stride()}")
    return pointer(states, contiguous=False)


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, recurrent: Recurrent) -> Tensor:
    taps, channels = weight.shape
    if taps > native.most_taps:
        raise UserError(
            f"linear_conv_kernel_dim: {taps} is above {native.most_taps}, the most of the cpu's convolution"
        )
    out = torch.empty(x.shape)
    native.causal_conv(
        _places(recurrent),
        strided(x[:, None]),
        pointer(weight),
        _states(states),
        pointer(out),
        len(x),
        channels,
        taps,
        states.shape[1] - taps + 1,
        x.stride(0),
        states.stride(0),
    )
    return out


def gated_delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    rates: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    inputs: Tensor,
    recurrent: Recurrent,
    lowest: float = 0.0,
) -> Tensor:
    tokens, columns = qkv.shape
    _, heads, depth, width = states.shape
    if depth > native.most_width:
        raise UserError(f"linear_key_head_dim: {depth} is above {native.most_width}, the most of the cpu's delta rule")
    if width % SLAB:
        raise UserError(f"linear_value_head_dim: {width} is no multiple of {SLAB}, as the cpu's delta rule needs it")
    key_heads = (columns - heads * width) // (2 * depth)
    out, factors = torch.empty(tokens, heads, width), torch.empty(tokens, key_heads + a.shape[1] + heads)
    native.gated_delta_rule(
        _places(recurrent),
        pointer(qkv),
        strided(a[:, None]),
        strided(b[:, None]),
        pointer(rates),
        pointer(dt_bias),
        _states(states),
        _states(inputs),
        pointer(factors),
        pointer(out),
        tokens,
        key_heads,
        heads,
        depth,
        width,
        inputs.shape[1],
        a.stride(0),
        b.stride(0),
        states.stride(0),
        a.shape[1],
        lowest,
    )
    return out

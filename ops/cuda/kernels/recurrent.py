"""The ops with states of gated DeltaNet layers. A program takes one sequence and some channels, or some columns of a
value head, and its rows one after another: first those that the last step kept as pending, then the step's own.

What is kept of pending rows may be read from the place that the step marks, so it is copied before any kernel writes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from umbra.ops.interface import Recurrent

CHANNELS = 128  # of a program of the convolution
COLUMNS = 32  # of a value head, of a program of the delta rule


@triton.jit
def _convolve(
    x, weight, before, states, out, starts, reads, writes, marks, marked, pendings, channels, x_row, before_rows,
    rows_kept, states_place, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """before (S, rows, channels) is what `states` had at the places that are read. out (T, channels)."""
    s = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    start, end = tl.load(starts + s), tl.load(starts + s + 1)
    read, write = tl.load(reads + s), tl.load(writes + s)
    mark, target, pending = tl.load(marks + s), tl.load(marked + s).to(tl.int64), tl.load(pendings + s)
    length = end - start
    known = TAPS - 1 + pending  # rows before the first new one
    own = before + s * before_rows * channels + c
    if length > 0:
        for row in range(length):
            total = tl.zeros((CHANNELS,), tl.float32)
            for tap in tl.static_range(TAPS):
                i = pending + row + tap
                old = tl.load(own + i * channels, mask=inside & (i < known) & (read >= 0), other=0)
                new = tl.load(x + (start + i - known) * x_row + c, mask=inside & (i >= known), other=0).to(tl.float32)
                total += (old + new) * tl.load(weight + tap * channels + c, mask=inside, other=0)
            total = total / (1 + tl.exp(-total))
            tl.store(out + (start + row) * channels + c, total.to(out.dtype.element_ty), mask=inside)
        # The inputs are numbered from the oldest row of the state on.
        if mark > 0:
            kept = tl.minimum(known + length - mark, tl.where(write >= 0, TAPS - 1, rows_kept))
            for row in range(kept):
                i = mark + row
                old = tl.load(own + i * channels, mask=inside & (i < known) & (read >= 0), other=0)
                new = tl.load(x + (start + i - known) * x_row + c, mask=inside & (i >= known), other=0).to(tl.float32)
                tl.store(states + target * states_place + row * channels + c, old + new, mask=inside)
        if write >= 0:
            for last in tl.static_range(TAPS - 1):
                i = pending + length + last
                old = tl.load(own + i * channels, mask=inside & (i < known) & (read >= 0), other=0)
                new = tl.load(x + (start + i - known) * x_row + c, mask=inside & (i >= known), other=0).to(tl.float32)
                tl.store(states + write.to(tl.int64) * states_place + last * channels + c, old + new, mask=inside)


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, recurrent: Recurrent) -> Tensor:
    taps, channels = weight.shape
    tables = on_device(recurrent, x.device)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    before = states[tables.reads.clamp(min=0).long()]
    _convolve[(len(tables.reads), triton.cdiv(channels, CHANNELS))](
        x, weight, before, states, out, *tables, channels, x.stride(0), before.shape[1], states.shape[1],
        states.stride(0), TAPS=taps, CHANNELS=CHANNELS,
    )  # fmt: skip
    return out


@triton.jit
def _delta(
    qkv, a, b, rates, dt_bias, before, states, inputs, out, starts, reads, writes, marks, marked, pendings, qkv_row,
    a_row, b_row, states_place, inputs_place, rows_kept, lowest, HEADS: tl.constexpr, SHARED: tl.constexpr,
    DEPTH: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DECAYS: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """SHARED value heads have one key head, and each has DECAYS decays, 1 or DEPTH. before (S, rows, inputs) is what
    `inputs` had at the places that are read; a row of inputs has keys, values, decays and betas. out (T, HEADS, WIDTH).
    """
    KEYS: tl.constexpr = HEADS // SHARED * DEPTH
    AT: tl.constexpr = KEYS + HEADS * WIDTH  # of decays, in a row of inputs
    INPUTS: tl.constexpr = AT + (DECAYS + 1) * HEADS
    s, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(starts + s), tl.load(starts + s + 1)
    read, write = tl.load(reads + s), tl.load(writes + s)
    mark, target, pending = tl.load(marks + s), tl.load(marked + s).to(tl.int64), tl.load(pendings + s)
    length = end - start
    d, v = tl.arange(0, PADDED), part * COLUMNS + tl.arange(0, COLUMNS)
    deep, wide = d < DEPTH, v < WIDTH
    both = deep[:, None] & wide[None, :]
    within = head * DEPTH * WIDTH + d[:, None] * WIDTH + v[None, :]
    key_head = head // SHARED
    by_row = tl.arange(0, PADDED if DECAYS > 1 else 1)
    decaying, of_head = by_row < DECAYS, head * DECAYS + by_row
    rate, bias = tl.load(rates + head), tl.load(dt_bias + of_head, mask=decaying, other=0)
    if length > 0:
        state = tl.load(
            states + tl.maximum(read, 0).to(tl.int64) * states_place + within, mask=both & (read >= 0), other=0
        )
        for number in range(pending + length):
            old = number < pending
            kept = before + (s * rows_kept + number) * INPUTS
            t = start + number - pending
            row = qkv + t * qkv_row
            key = tl.load(row + KEYS + key_head * DEPTH + d, mask=deep & (number >= pending), other=0).to(tl.float32)
            key = key / tl.sqrt(tl.sum(key * key) + 1e-6)
            key += tl.load(kept + key_head * DEPTH + d, mask=deep & old, other=0)
            value = tl.load(row + 2 * KEYS + head * WIDTH + v, mask=wide & (number >= pending), other=0).to(tl.float32)
            value += tl.load(kept + KEYS + head * WIDTH + v, mask=wide & old, other=0)
            if number < pending:
                decay = tl.load(kept + AT + of_head, mask=decaying, other=0)
                beta = tl.load(kept + AT + DECAYS * HEADS + head)
            else:
                wait = tl.load(a + t * a_row + of_head, mask=decaying, other=0).to(tl.float32) + bias
                if BOUNDED:
                    decay = tl.exp(lowest / (1 + tl.exp(-rate * wait)))
                else:
                    wait = tl.where(wait > 20, wait, tl.log(1 + tl.exp(tl.minimum(wait, 20.0))))
                    decay = tl.exp(-rate * wait)
                beta = 1 / (1 + tl.exp(-tl.load(b + t * b_row + head).to(tl.float32)))
            state = state * decay[:, None]
            change = beta * (value - tl.sum(state * key[:, None], 0))
            state += key[:, None] * change[None, :]
            if number >= pending:
                query = tl.load(row + key_head * DEPTH + d, mask=deep, other=0).to(tl.float32)
                query = query / tl.sqrt(tl.sum(query * query) + 1e-6) / tl.sqrt(DEPTH + 0.0)
                result = tl.sum(state * query[:, None], 0)
                tl.store(out + (t * HEADS + head) * WIDTH + v, result.to(out.dtype.element_ty), mask=wide)
            if number + 1 == mark:
                tl.store(states + target * states_place + within, state, mask=both)
            if (mark > 0) & (write < 0) & (number >= mark) & (number - mark < rows_kept):
                to = inputs + target * inputs_place + (number - mark) * INPUTS
                tl.store(to + KEYS + head * WIDTH + v, value, mask=wide)
                if part == 0:
                    tl.store(to + AT + of_head, decay, mask=decaying)
                    tl.store(to + AT + DECAYS * HEADS + head, beta)
                    if head % SHARED == 0:
                        tl.store(to + key_head * DEPTH + d, key, mask=deep)
        if write >= 0:
            tl.store(states + write.to(tl.int64) * states_place + within, state, mask=both)


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
    _, heads, depth, width = states.shape
    tables, key_heads = on_device(recurrent, qkv.device), (qkv.shape[1] - heads * width) // (2 * depth)
    out = torch.zeros(len(qkv), heads, width, dtype=qkv.dtype, device=qkv.device)
    before = inputs[tables.reads.clamp(min=0).long()]
    columns = min(COLUMNS, triton.next_power_of_2(width))
    _delta[(len(tables.reads), heads, triton.cdiv(width, columns))](
        qkv, a, b, rates, dt_bias, before, states, inputs, out, *tables, qkv.stride(0), a.stride(0), b.stride(0),
        states.stride(0), inputs.stride(0), inputs.shape[1], lowest, HEADS=heads, SHARED=heads // key_heads,
        DEPTH=depth, PADDED=triton.next_power_of_2(depth), WIDTH=width, COLUMNS=columns, DECAYS=a.shape[1] // heads,
        BOUNDED=bool(lowest),
    )  # fmt: skip
    return out


def on_device(recurrent: Recurrent, device: torch.device) -> Recurrent:
    """The tables on `device`: those of a captured step are there, those of others on the host."""
    return Recurrent(*(table.to(device) for table in recurrent))

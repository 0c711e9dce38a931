"""Gated DeltaNet: the convolution and the gated delta rule of ops/interface.py, with states in float32.

The keys' axis of a head's state is the last one, as CANN's operators have it: (Dv, Dk).

Tables on the device are those of a graph. Each row is then of another sequence, with places of its own to read and to
write; padding rows have a place of their own, and no row begins a sequence or is marked. Other steps have their tables
on the host, and may do all that `Recurrent` says.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from ops.interface import Recurrent

CHUNK = 64  # rows that a chunk has at most
MOST_CHUNKS = 64  # that are prepared at once
EPS = 1e-6  # beside the sums of squares of keys and queries


class Rows(NamedTuple):
    """The rows of a sequence in a step, of which there are some."""

    start: int
    length: int
    read: int
    write: int
    mark: int
    marked: int
    pending: int  # always 0: no step has drafts


class Heads(NamedTuple):
    """What the gated delta rule takes of each row: queries, keys (T, Hk, Dk), values (T, Hv, Dv), the logarithms of
    decays and the shares beta of changes (T, Hv), in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    decays: Tensor
    betas: Tensor


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, recurrent: Recurrent) -> Tensor:
    if in_graph(x, recurrent):
        y, after = _conv_step(_read(states, recurrent.reads), x, weight)
        _write(states, recurrent.writes, after)
        return F.silu(y).to(x.dtype)
    sequences = _sequences(recurrent)
    if not sequences:
        return torch.zeros_like(x)
    before, taps = _before(states, sequences), len(weight)
    total = sequences[-1].start + sequences[-1].length
    if total == len(sequences):
        y, after = _conv_step(before, x[:total], weight)
        _keep(states, [(s, s.length, after[i]) for i, s in enumerate(sequences)])
    else:
        inputs = torch.cat([part for s, b in zip(sequences, before, strict=True)
                            for part in (b, x[s.start : s.start + s.length].float())])  # fmt: skip
        y = inputs[: 1 - taps] * weight[0]
        for tap in range(1, taps):
            y.addcmul_(inputs[tap : len(y) + tap], weight[tap])
        firsts = [s.start + i * (taps - 1) for i, s in enumerate(sequences)]
        y = torch.cat([y[first : first + s.length] for first, s in zip(firsts, sequences, strict=True)])
        _keep(states, [(s, count, inputs[first + count :][: taps - 1])
                       for first, s in zip(firsts, sequences, strict=True) for count in _kept(s)])  # fmt: skip
    return _padded(F.silu(y).to(x.dtype), len(x))


def gated_delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    rates: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    inputs: Tensor,
    recurrent: Recurrent,
) -> Tensor:
    if in_graph(qkv, recurrent):
        out, after = _delta_step(_read(states, recurrent.reads), _heads(qkv, a, b, rates, dt_bias, states))
        _write(states, recurrent.writes, after)
        return out.to(qkv.dtype)
    sequences = _sequences(recurrent)
    total = sequences[-1].start + sequences[-1].length if sequences else 0
    if not total:
        return qkv.new_zeros(len(qkv), states.shape[1], states.shape[3])
    heads = _heads(qkv[:total], a[:total], b[:total], rates, dt_bias, states)
    before = _before(states, sequences)
    if total == len(sequences):
        out, after = _delta_step(before, heads)
        _keep(states, [(s, s.length, after[i]) for i, s in enumerate(sequences)])
    else:
        out, kept = _delta_chunks(before, heads, sequences)
        _keep(states, kept)
    return _padded(out.to(qkv.dtype), len(qkv))


def in_graph(x: Tensor, recurrent: Recurrent) -> bool:
    """Whether the tables are those of a graph."""
    if recurrent.reads.device.type == "cpu":
        return False
    if len(recurrent.reads) != len(x):
        raise TypeError(f"{len(x)} rows of {len(recurrent.reads)} sequences: a graph has a row of each")
    return True


def _padded(x: Tensor, rows: int) -> Tensor:
    """`x` with rows of zeros behind it."""
    return x if len(x) == rows else torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))


def _sequences(recurrent: Recurrent) -> list[Rows]:
    starts, *tables = (table.tolist() for table in recurrent)
    rows = zip(starts, (b - a for a, b in itertools.pairwise(starts)), *tables, strict=False)
    return [Rows(*row) for row in rows if row[1]]


def _kept(s: Rows) -> Iterator[int]:
    """The numbers of rows after which a sequence's state is kept."""
    if s.mark:
        yield s.mark
    if s.mark != s.length:
        yield s.length


# --- states ---


def _strips(states: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The memory of all places as strips without gaps, and which of them `places` have. Places overlap; an operator
    would first copy all of them."""
    if states.is_contiguous():
        return states, places
    if not states[0].is_contiguous():
        raise TypeError(f"a place is not contiguous: {tuple(states.shape)} {states.stride()}")
    size, apart = states[0].numel(), states.stride(0)
    strip = math.gcd(size, apart)
    strips = states.as_strided((((len(states) - 1) * apart + size) // strip, strip), (strip, 1))
    parts = torch.arange(size // strip, dtype=places.dtype, device=places.device)
    return strips, (places[:, None] * (apart // strip) + parts).flatten()


def _read(states: Tensor, places: Tensor) -> Tensor:
    strips, index = _strips(states, places)
    return strips.index_select(0, _there(index, states)).view(len(places), *states.shape[1:])


def _write(states: Tensor, places: Tensor, values: Tensor) -> None:
    strips, index = _strips(states, places)
    updates = values.reshape(len(index), *strips.shape[1:])
    torch_npu.npu_scatter_nd_update_(input=strips, indices=_there(index, states)[:, None], updates=updates)


def _there(table: Tensor, states: Tensor) -> Tensor:
    """A table on the device of `states`, for which the host does not wait."""
    if table.device == states.device:
        return table
    return table.pin_memory().to(states.device, non_blocking=True)


def _before(states: Tensor, sequences: Sequence[Rows]) -> Tensor:
    """The states before the first rows."""
    begun = [i for i, s in enumerate(sequences) if s.read >= 0]
    if not begun:
        return states.new_zeros(len(sequences), *states.shape[1:])
    read = _read(states, torch.tensor([sequences[i].read for i in begun]))
    if len(begun) == len(sequences):
        return read
    before = states.new_zeros(len(sequences), *states.shape[1:])
    return before.index_copy_(0, _there(torch.tensor(begun), states), read)


def _keep(states: Tensor, kept: Sequence[tuple[Rows, int, Tensor]]) -> None:
    """Writes states of sequences after some number of rows to the places that get them."""
    pairs = [(s.marked, state) for s, count, state in kept if s.mark == count]
    pairs += [(s.write, state) for s, count, state in kept if s.length == count and s.write >= 0]
    if pairs:
        places, values = zip(*pairs, strict=True)
        _write(states, torch.tensor(places), torch.stack(values))


# --- convolution ---


def _conv_step(before: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution of a row for each state, and the states after it."""
    inputs = torch.cat((before, x.float()[:, None]), 1)
    return (inputs * weight).sum(1), inputs[:, 1:]


# --- gated delta rule ---


def _heads(qkv: Tensor, a: Tensor, b: Tensor, rates: Tensor, dt_bias: Tensor, states: Tensor) -> Heads:
    """With keys and queries normalised: by their mean squares, which are sums divided by Dk."""
    _, heads, depth, width = states.shape
    qk, v = qkv.float().split([qkv.shape[1] - heads * width, heads * width], 1)
    gamma = torch.full((depth,), depth**-0.5, dtype=torch.float32, device=qkv.device)
    normed = torch_npu.npu_rms_norm(input=qk.unflatten(1, (-1, depth)), gamma=gamma, epsilon=EPS / depth)[0]
    q, k = normed.chunk(2, 1)
    decays = F.softplus(a.float() + dt_bias) * -rates
    return Heads(q * depth**-0.5, k.contiguous(), v.unflatten(1, (-1, width)), decays, b.float().sigmoid())


def _delta_step(before: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """The outputs (T, Hv, Dv) of a row for each state, and the states after it, in the memory of `before`."""
    (rows, count, width), (_, key_heads, depth) = heads.v.shape, heads.k.shape
    # Value heads of a key head are one matrix, which meets one key.
    state = before.view(rows, count, width * depth).mul_(heads.decays.exp()[..., None])
    state = state.view(rows * key_heads, -1, depth)
    q, k = (x.view(rows * key_heads, depth, 1) for x in (heads.q, heads.k))
    change = (heads.v - torch.bmm(state, k).view(heads.v.shape)) * heads.betas[..., None]
    state.addcmul_(change.view(rows * key_heads, -1, 1), k.view(rows * key_heads, 1, depth))
    return torch.bmm(state, q).view(heads.v.shape), state.view(before.shape)


class Chunks(NamedTuple):
    """Chunks of rows, each with its parts as matrices (chunks, Hv, ..) of which those over states are left."""

    u: Tensor  # (C, Dv): changes without those that come of the state
    w: Tensor  # (C, Dk): and what they are less by for a state
    q: Tensor  # (C, Dk): decayed from the chunk's begin
    k: Tensor  # (C, Dk): decayed to its end
    qk: Tensor  # (C, C)
    decay: Tensor  # (1, 1): of the whole chunk


def _cuts(s: Rows, length: int) -> list[int]:
    """Where a sequence's chunks begin and end."""
    cuts = [0]
    for end in _kept(s):
        cuts += [*range(cuts[-1] + length, end, length), end]
    return cuts


def _delta_chunks(
    before: Tensor, heads: Heads, sequences: Sequence[Rows]
) -> tuple[Tensor, list[tuple[Rows, int, Tensor]]]:
    """The outputs, and the states after the numbers of rows that `_kept` says. All sequences advance by a chunk at a
    time, the ones with most chunks first. A chunk ends at a mark."""
    length = min(CHUNK, 1 << (max(s.length for s in sequences) - 1).bit_length())
    cuts = [_cuts(s, length) for s in sequences]
    order = sorted(range(len(sequences)), key=lambda i: -len(cuts[i]))
    active = [sum(len(c) > step + 1 for c in cuts) for step in range(len(cuts[order[0]]) - 1)]
    spans = [(sequences[i].start + cuts[i][step], sequences[i].start + cuts[i][step + 1])
             for step, count in enumerate(active) for i in order[:count]]  # fmt: skip
    total = len(heads.v)
    firsts, ends = torch.tensor(spans).unbind(1)
    rows = firsts[:, None] + torch.arange(length)
    inside = rows < ends[:, None]
    back = torch.empty(total, dtype=torch.int64)
    back[rows[inside]] = inside.flatten().nonzero().flatten()
    rows = _there(torch.where(inside, rows, total), before)
    padded = Heads(*(_padded(x, total + 1) for x in heads))
    if order != sorted(order):
        before = before.index_select(0, _there(torch.tensor(order), before))
    state = before.view(len(order), *before.shape[1:2], -1, heads.k.shape[2])  # (S, Hv, Dv, Dk)
    outs, kept = [], []
    for step, (count, chunks) in enumerate(zip(active, _prepared(padded, rows, active), strict=True)):
        u, w, q, k, qk, decay = (x.flatten(0, 1) for x in chunks)
        here = state[:count].flatten(0, 1)
        change = torch.baddbmm(u, w, here.mT, alpha=-1)
        outs.append(torch.baddbmm(torch.bmm(q, here.mT), qk, change))
        here.mul_(decay).baddbmm_(change.mT, k)
        for at, i in enumerate(order[:count]):
            if (end := cuts[i][step + 1]) in _kept(sequences[i]):
                kept.append((sequences[i], end, state[at].clone()))
    out = torch.cat(outs).unflatten(0, (len(rows), -1)).transpose(1, 2).flatten(0, 1)  # (chunks C, Hv, Dv)
    return out.index_select(0, _there(back, before)), kept


def _prepared(heads: Heads, rows: Tensor, active: list[int]) -> Iterator[Chunks]:
    """The chunks of each step, of which there are as many as `active` says. Those of several steps are prepared at
    once."""
    step, chunk = 0, 0
    while step < len(active):
        end = step + 1
        while end < len(active) and sum(active[step : end + 1]) <= MOST_CHUNKS:
            end += 1
        counts = active[step:end]
        chunks = _prepare(heads, rows[chunk : chunk + sum(counts)])
        yield from (Chunks(*parts) for parts in zip(*(x.split(counts) for x in chunks), strict=True))
        step, chunk = end, chunk + sum(counts)


def _prepare(heads: Heads, rows: Tensor) -> Chunks:
    """What the rows (chunks, C) have to do with each other."""
    chunks, length = rows.shape
    key_heads = heads.k.shape[1]
    q, k, v, decays, betas = (
        x.index_select(0, rows.flatten()).unflatten(0, (chunks, length)).transpose(1, 2) for x in heads
    )
    q, k = q[:, :, None], k[:, :, None]  # (chunks, Hk, 1, C, Dk)
    v, decays, betas = (x.unflatten(1, (key_heads, -1)) for x in (v, decays, betas))  # (chunks, Hk, groups, C, ..)
    sums = decays.cumsum(-1)
    number = torch.arange(length, device=rows.device)
    later = number > number[:, None]
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()
    low = (torch.matmul(k, k.mT) * between * betas[..., None]).tril(-1)
    # The inverse of 1 + low, by blocks of which two make one of the next size.
    inverse = torch.eye(length, device=rows.device).expand_as(low)
    size = 1
    while size < length:
        beside = (number ^ number[:, None]) // size == 1
        inverse = inverse - torch.matmul(inverse, torch.matmul(low * beside, inverse))
        size *= 2
    begun = sums.exp()[..., None]
    left = (sums[..., -1:] - sums).exp()[..., None]
    parts = (
        torch.matmul(inverse, v * betas[..., None]), torch.matmul(inverse, k * (betas[..., None] * begun)), q * begun,
        k * left, torch.matmul(q, k.mT) * between, begun[..., -1:, :],
    )  # fmt: skip
    return Chunks(*(x.flatten(1, 2) for x in parts))

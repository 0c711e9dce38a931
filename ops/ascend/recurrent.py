"""Gated DeltaNet: the convolution and the gated delta rule of ops/interface.py, with states in float32.

The keys' axis of a head's state is the last one, as CANN's operators have it: (Dv, Dk).

Tables on the device are those of a graph, as `GraphStrips` makes them: no row begins a sequence, and padding rows have
a place of their own. Without drafts, each row is of another sequence, with places of its own to read and to write, and
none is marked. Other steps have their tables on the host, and may do all that `Recurrent` says.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor, nn

from umbra.ops.ascend import recurrent_drafts as drafted
from umbra.ops.interface import Recurrent, SequenceRows, fixed

CHUNK, CHUNK_BY_ROW = 64, 16  # rows that a chunk has at most; where rows of a state have decays of their own
MOST_CHUNKS = 64  # that are prepared at once; of the shorter ones a quarter
# Attributes of states, set by `GraphStrips`.
READ, WRITTEN, LAST, MASKS = "read_strips", "written_strips", "last", "masks"
EPS = 1e-6  # beside the sums of squares of keys and queries


class DeltaHeads(NamedTuple):
    """The inputs of the gated delta rule for each row: queries, keys (T, Hk, Dk), values (T, Hv, Dv), the logarithms of
    decays (T, Hv, 1), or (T, Hv, Dk) by rows of a state, and the shares beta of changes (T, Hv), in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    decays: Tensor
    betas: Tensor


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, recurrent: Recurrent) -> Tensor:
    taps, drafts = len(weight), states.shape[1] - len(weight) + 1
    if in_graph(x, recurrent, drafts):
        count = places = len(recurrent.pending)
        before = _read(*_graph_strips(states, READ, recurrent.reads, count, last=True), count)
        if drafts:
            indices = drafted.conv_indices(recurrent.query_starts, count, len(x), taps, drafts)
            y, after = drafted.conv(before, x, weight, *indices)
            places = 2 * count
        else:
            y, after = _conv_step(before, x, weight)
        _write(*_graph_strips(states, WRITTEN, recurrent.writes, places, last=True), after)
        return F.silu(y).to(x.dtype)
    sequences = recurrent.sequences()
    if not sequences:
        return torch.zeros_like(x)
    before = _before(states, sequences).view(len(sequences), *states.shape[1:])
    total = sequences[-1].end
    room = [weight.new_zeros(drafts, x.shape[1])] if drafts else []  # for rows that no sequence has
    if total == len(sequences) and not any(s.pending for s in sequences):
        y, after = _conv_step(before[:, : taps - 1], x[:total], weight)
        kept = [torch.cat([state, *room]) for state in after] if room else after
        _keep(states, [(s, s.length, kept[i]) for i, s in enumerate(sequences)])
    else:
        inputs = torch.cat(
            [
                part
                for s, b in zip(sequences, before, strict=True)
                for part in (b[: taps - 1 + s.pending], x[s.start : s.end].float())
            ]
            + room
        )
        y = inputs[: 1 - taps] * weight[0]
        for tap in range(1, taps):
            y.addcmul_(inputs[tap : len(y) + tap], weight[tap])
        earlier = itertools.accumulate((taps - 1 + s.pending for s in sequences), initial=0)
        firsts = [s.start + rows for s, rows in zip(sequences, earlier, strict=False)]
        y = torch.cat([y[first + s.pending :][: s.length] for first, s in zip(firsts, sequences, strict=True)])
        _keep(
            states,
            [
                (s, count, inputs[first + count :][: states.shape[1]])
                for first, s in zip(firsts, sequences, strict=True)
                for count in _kept(s)
            ],
        )
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
    lowest: float = 0.0,
) -> Tensor:
    drafts, gate = inputs.shape[1], (rates, dt_bias, lowest)
    if in_graph(qkv, recurrent, drafts):
        count = len(recurrent.pending)
        strips = _graph_strips(states, READ, recurrent.reads, count, last=False)
        if drafts:
            heads = _heads(qkv, a, b, gate, states)
            index = drafted.delta_indices(recurrent.query_starts, count, len(qkv), drafts)
            rows = _inputs_in_graph(inputs, heads, index.kept, recurrent, len(strips[1]))
            sizes, masks = (*heads.v.shape[1:], heads.k.shape[2]), getattr(states, MASKS)
            before = _read(*strips, count)
            compute = drafted.delta if a.shape[1] == len(rates) else drafted.delta_by_row
            out, after = compute(before, rows, heads.q.flatten(1), index, recurrent.marks, masks, sizes)
        else:
            out, after = _delta_step(_read(*strips, count), _heads(qkv, a, b, gate, states))
        written = _graph_strips(states, WRITTEN, recurrent.writes, len(after), last=False)
        _write(*written, after)
        if getattr(states, LAST, False):  # the result depends on what no other layer reads
            out = out + 0 * written[0].index_select(0, written[1][:1])[:, :1]
        return out.to(qkv.dtype)
    sequences = recurrent.sequences()
    total = sequences[-1].end if sequences else 0
    if not total:
        return qkv.new_zeros(len(qkv), states.shape[1], states.shape[3])
    heads = _heads(qkv[:total], a[:total], b[:total], gate, states)
    before = _before(states, sequences)
    own = sequences
    if drafts and any(s.pending or (s.mark and s.write < 0) for s in sequences):
        heads, sequences = _with_pending(heads, inputs, sequences)
    if len(heads.v) == len(sequences):
        out, after = _delta_step(before, heads)
        _keep(states, [(s, s.length, after[i]) for i, s in enumerate(sequences)])
    else:
        out, kept = _delta_chunks(before, heads, sequences)
        _keep(states, kept)
    if len(out) > total:
        out = torch.cat([out[s.start + of.pending :][: of.length] for s, of in zip(sequences, own, strict=True)])
    return _padded(out.to(qkv.dtype), len(qkv))


def in_graph(x: Tensor, recurrent: Recurrent, drafts: int) -> bool:
    """Returns whether the tables are those of a graph."""
    if recurrent.reads.device.type == "cpu":
        return False
    if not drafts and len(recurrent.query_starts) != len(x) + 1:
        raise TypeError(f"{len(x)} rows of {len(recurrent.query_starts) - 1} sequences: a graph has a row of each")
    return True


def _padded(x: Tensor, rows: int) -> Tensor:
    """`x` with rows of zeros behind it."""
    return x if len(x) == rows else torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))


def _kept(s: SequenceRows) -> Iterator[int]:
    """The numbers of rows, pending ones included, after which a sequence's state is kept."""
    if s.mark:
        yield s.mark
    if s.mark != s.pending + s.length:
        yield s.pending + s.length


# --- states ---


class GraphStrips:
    """The states of all layers as strips, by whose numbers graphs read and write them.

    A strip is a run of `width` values of the memory that all states share. In a place, the delta rule's state, the
    convolution's and the kept inputs follow each other, each in whole strips. A graph reads a layer's states through
    one tensor over the memory and writes them through another, because GE copies all of a tensor that it both reads and
    writes. A tensor that is written but not read would be a result of the graph, which is copied too: so each layer
    reads through the tensor that the layer before it wrote.
    """

    def __init__(self, layers: Sequence[tuple[nn.Parameter, nn.Parameter, nn.Parameter]], most: int):
        """`layers` has (conv, inputs, delta) of each layer, which get their tensors as attributes. With drafts, graphs
        have at most `most` sequences."""
        conv, inputs, delta = layers[0]
        self.layers, self.most = len(layers), most
        self.drafts, self.taps = inputs.shape[1], conv.shape[1] - inputs.shape[1] + 1
        sizes, apart = [math.prod(states.shape[1:]) for states in (delta, conv, inputs)], delta.stride(0)
        self.width = math.gcd(*sizes[:2], apart)
        ends = list(itertools.accumulate(-(-size // self.width) for size in sizes))
        self.strips_apart, self.padding = apart // self.width, min(map(len, layers[0])) - 1
        self.count = self.padding * self.strips_apart + ends[-1]
        # The strips of a place, from its first one on: of the delta rule, of the convolution, of inputs.
        self.parts = [torch.arange(*span, dtype=torch.int32) for span in itertools.pairwise((0, *ends))]
        self._bind(layers)

    def tables(self, at: Recurrent) -> Recurrent:
        """Returns a graph's tables from those (layers, S) of a step: places become the numbers of their strips. With
        drafts each of the `most` sequences writes two places, and the other tables are as recurrent_drafts.py says."""
        if not self.drafts:
            return at._replace(reads=self._numbers(at.reads), writes=self._numbers(at.writes))
        rows = len(at.query_starts) - 1
        at = Recurrent(at.query_starts[: self.most + 1], *(table[:, : self.most] for table in at[1:]))
        step = drafted.on_host(at, rows, self.taps, self.drafts)
        reads, writes = self._numbers(at.reads), self._numbers(step.first, step.second)
        before = step.before.repeat(self.layers, 1)
        return Recurrent(step.indices, reads, writes, before, *(table.contiguous() for table in at[4:]))

    def _bind(self, layers: Sequence[tuple[nn.Parameter, nn.Parameter, nn.Parameter]]) -> None:
        """Sets the attributes of states that a graph's ops read."""
        delta = layers[0][2]
        read = self._over(delta)
        for states in itertools.chain.from_iterable(layers):
            if states.shape[1]:
                written = self._over(delta)
                for name, tensor in ((READ, read), (WRITTEN, written)):
                    setattr(states, name, tensor)
                read = written
        setattr(layers[-1][2], LAST, True)
        if self.drafts:
            with torch.inference_mode(False):
                masks = fixed(drafted.masks(self.drafts).to(delta.device))
            for *_, states in layers:
                setattr(states, MASKS, masks)

    def _over(self, delta: Tensor) -> nn.Parameter:
        """Returns a tensor of its own over the memory of all states, which begins where `delta` does."""
        with torch.inference_mode(False):  # which would make other tensors
            view = delta.detach().as_strided((self.count, self.width), (self.width, 1))
            return fixed(torch.utils.dlpack.from_dlpack(view))

    def _numbers(self, *places: Tensor) -> Tensor:
        """Returns the numbers of the strips of `places` (layers, S): those of all delta rules, then those of inputs, of
        the first `places` only, then those of all convolutions. Places below 0 are the one for padding."""
        firsts = [torch.where(p < 0, self.padding, p)[..., None] * self.strips_apart for p in places]
        every, (delta, conv, inputs) = torch.cat(firsts, 1), self.parts
        numbers = (every + delta, firsts[0] + inputs, every + conv)
        return torch.cat([table.flatten(1) for table in numbers], 1)


def _graph_strips(
    states: Tensor, name: str, table: Tensor, places: int, last: bool, behind: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns the strips that `GraphStrips` gave `states`, and the numbers of those that a step uses: the `last` ones
    of the table, or its first ones, or the ones `behind` so many."""
    strips: Tensor = getattr(states, name)
    count = places * -(-math.prod(states.shape[1:]) // strips.shape[1])
    return strips, table[-count:] if last else table[behind : behind + count]


def _inputs_in_graph(inputs: Tensor, heads: DeltaHeads, kept: Tensor, recurrent: Recurrent, behind: int) -> Tensor:
    """Inputs that were kept, those of the step, and one of zeros. Keeps those that `kept` says. In tables, inputs are
    behind so many strips of states, or twice as many."""
    count, size = len(recurrent.pending), math.prod(inputs.shape[1:])
    read = _read(*_graph_strips(inputs, READ, recurrent.reads, count, False, behind), count)
    new = _as_inputs(heads)
    rows = torch.cat((read[:, :size].reshape(-1, new.shape[1]), new, new.new_zeros(1, new.shape[1])))
    after = torch.cat((rows.index_select(0, kept).view(count, size), read[:, size:]), 1)  # whole strips
    _write(*_graph_strips(inputs, WRITTEN, recurrent.writes, count, False, 2 * behind), after)
    return rows


def _strips(states: Tensor, places: list[int]) -> tuple[Tensor, Tensor]:
    """The memory of all places as strips without gaps, and which of them `places` have. Places overlap; an operator
    would first copy all of them."""
    size, apart = math.prod(states.shape[1:]), states.stride(0)
    if not states[0].is_contiguous():
        raise TypeError(f"a place is not contiguous: {tuple(states.shape)} {states.stride()}")
    width = math.gcd(size, apart)
    strips = states.as_strided((((len(states) - 1) * apart + size) // width, width), (width, 1))
    index = torch.tensor(places)[:, None] * (apart // width) + torch.arange(size // width)
    return strips, _there(index.flatten(), states)


def _read(strips: Tensor, index: Tensor, rows: int) -> Tensor:
    return strips.index_select(0, index).view(rows, -1)


def _write(strips: Tensor, index: Tensor, values: Tensor) -> None:
    updates = values.reshape(-1, strips.shape[1])
    torch_npu.npu_scatter_nd_update_(input=strips, indices=index[:, None], updates=updates)


def _there(table: Tensor, states: Tensor) -> Tensor:
    """A table on the device of `states`, for which the host does not wait."""
    if table.device == states.device:
        return table
    return table.pin_memory().to(states.device, non_blocking=True)


def _before(states: Tensor, sequences: Sequence[SequenceRows]) -> Tensor:
    """The states before the first rows (S, elements)."""
    begun = [i for i, s in enumerate(sequences) if s.read >= 0]
    size = math.prod(states.shape[1:])
    if not begun:
        return states.new_zeros(len(sequences), size)
    read = _read(*_strips(states, [sequences[i].read for i in begun]), len(begun))
    if len(begun) == len(sequences):
        return read
    return states.new_zeros(len(sequences), size).index_copy_(0, _there(torch.tensor(begun), states), read)


def _keep(states: Tensor, kept: Sequence[tuple[SequenceRows, int, Tensor]]) -> None:
    """Writes states of sequences after some number of rows to the places that get them."""
    pairs = [(s.marked, state) for s, count, state in kept if s.mark == count]
    pairs += [(s.write, state) for s, count, state in kept if s.pending + s.length == count and s.write >= 0]
    if pairs:
        places, values = zip(*pairs, strict=True)
        _write(*_strips(states, list(places)), torch.stack(values))


# --- convolution ---


def _conv_step(before: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution of a row for each state (T, elements), and the states after it."""
    inputs = torch.cat((before.view(len(x), -1, x.shape[1]), x.float()[:, None]), 1)
    return (inputs * weight).sum(1), inputs[:, 1:]


# --- gated delta rule ---


def _heads(qkv: Tensor, a: Tensor, b: Tensor, gate: tuple[Tensor, Tensor, float], states: Tensor) -> DeltaHeads:
    """With keys and queries normalised: by their mean squares, which are sums divided by Dk. `gate`: rates, dt_bias and
    lowest, as of the op."""
    _, heads, depth, width = states.shape
    rates, dt_bias, lowest = gate
    qk, v = qkv.split([qkv.shape[1] - heads * width, heads * width], 1)
    qk = _floats(qk.unflatten(1, (2, -1, depth)).transpose(0, 1))  # (2, T, Hk, Dk)
    gamma = torch.full((depth,), depth**-0.5, dtype=torch.float32, device=qkv.device)
    q, k = torch_npu.npu_rms_norm(input=qk, gamma=gamma, epsilon=EPS / depth)[0]
    passed = (a.float() + dt_bias).view(len(a), heads, -1)
    decays = (passed * rates[:, None]).sigmoid() * lowest if lowest else F.softplus(passed) * -rates[:, None]
    return DeltaHeads(q * depth**-0.5, k, _floats(v.unflatten(1, (-1, width))), decays, b.float().sigmoid())


def _as_inputs(heads: DeltaHeads) -> Tensor:
    """Returns the inputs that are kept of each row: all but queries."""
    return torch.cat([x.flatten(1) for x in heads[1:]], 1)


def _with_pending(
    heads: DeltaHeads, inputs: Tensor, sequences: Sequence[SequenceRows]
) -> tuple[DeltaHeads, list[SequenceRows]]:
    """The rows of sequences with their pending ones before them. Keeps the inputs of rows behind marks."""
    (_, count, width), (_, key_heads, depth), (drafts, size) = heads.v.shape, heads.k.shape, inputs.shape[1:]
    new, q, nothing = _as_inputs(heads), [], inputs.new_zeros(drafts, size)
    ahead = [s for s in sequences if s.pending]
    before = iter(_read(*_strips(inputs, [s.read for s in ahead]), len(ahead)).view(-1, drafts, size) if ahead else ())
    parts: list[Tensor] = []
    together: list[SequenceRows] = []
    kept: list[tuple[int, Tensor]] = []
    start = 0
    for s in sequences:
        rows = new[s.start : s.end]
        q.append(heads.q[s.start : s.end])
        if s.pending:
            rows = torch.cat((next(before)[: s.pending], rows))
            q.insert(-1, heads.q.new_zeros(s.pending, key_heads, depth))
        if s.mark and s.write < 0:
            kept.append((s.marked, torch.cat((rows[s.mark :], nothing))[:drafts]))
        parts.append(rows)
        together.append(s._replace(start=start, end=start + len(rows), pending=0))
        start += len(rows)
    if kept:
        places, values = zip(*kept, strict=True)
        _write(*_strips(inputs, list(places)), torch.stack(values))
    of_rows = torch.cat(parts).split([key_heads * depth, count * width, heads.decays[0].numel(), count], 1)
    k, v, decays, betas = (x.contiguous() for x in of_rows)
    k, v, decays = k.unflatten(1, (-1, depth)), v.unflatten(1, (-1, width)), decays.unflatten(1, (count, -1))
    return DeltaHeads(torch.cat(q), k, v, decays, betas), together


def _floats(x: Tensor) -> Tensor:
    return x.to(torch.float32, memory_format=torch.contiguous_format).contiguous()  # the latter for float32


def _delta_step(before: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor]:
    """The outputs (T, Hv, Dv) of a row for each state (T, elements), and the states after it, in the same memory."""
    (rows, count, width), (_, key_heads, depth) = heads.v.shape, heads.k.shape
    # Value heads of a key head are one matrix, which meets one key.
    state = before.view(rows, count, width, depth).mul_(heads.decays.exp()[:, :, None])
    state = state.view(rows * key_heads, -1, depth)
    q, k = (x.view(rows * key_heads, depth, 1) for x in (heads.q, heads.k))
    change = (heads.v - torch.bmm(state, k).view(heads.v.shape)) * heads.betas[..., None]
    state.addcmul_(change.view(rows * key_heads, -1, 1), k.view(rows * key_heads, 1, depth))
    return torch.bmm(state, q).view(heads.v.shape), state.view(before.shape)


class Chunks(NamedTuple):
    """Matrices (chunks Hv, ..) of chunks of rows, from which their sums over states follow."""

    u: Tensor  # (C, Dv): changes without those that come of the state
    w: Tensor  # (C, Dk): and what they are less by for a state
    q: Tensor  # (C, Dk): decayed from the chunk's begin
    k: Tensor  # (C, Dk): decayed to its end
    qk: Tensor  # (C, C)
    decay: Tensor  # (1, 1), or (1, Dk): of the whole chunk


def _cuts(s: SequenceRows, length: int) -> list[int]:
    """Returns the rows at which a sequence's chunks begin and end."""
    cuts = [0]
    for end in _kept(s):
        cuts += [*range(cuts[-1] + length, end, length), end]
    return cuts


def _delta_chunks(
    before: Tensor, heads: DeltaHeads, sequences: Sequence[SequenceRows]
) -> tuple[Tensor, list[tuple[SequenceRows, int, Tensor]]]:
    """The outputs, and the states after the numbers of rows that `_kept` says. All sequences advance by a chunk at a
    time, the ones with most chunks first. A chunk ends at a mark."""
    most = CHUNK if heads.decays.shape[2] == 1 else CHUNK_BY_ROW
    length = min(most, 1 << (max(s.length for s in sequences) - 1).bit_length())
    cuts = [_cuts(s, length) for s in sequences]
    order = sorted(range(len(sequences)), key=lambda i: -len(cuts[i]))
    active = [sum(len(c) > step + 1 for c in cuts) for step in range(len(cuts[order[0]]) - 1)]
    spans = [
        (sequences[i].start + cuts[i][step], sequences[i].start + cuts[i][step + 1])
        for step, count in enumerate(active)
        for i in order[:count]
    ]
    firsts, ends = torch.tensor(spans).unbind(1)
    rows = firsts[:, None] + torch.arange(length)
    inside = rows < ends[:, None]
    back = torch.empty(len(heads.v), dtype=torch.int64)
    back[rows[inside]] = inside.flatten().nonzero().flatten()
    rows, inside = (_there(x, before) for x in (torch.where(inside, rows, 0), inside.float()))
    if order != sorted(order):
        before = before.index_select(0, _there(torch.tensor(order), before))
    state = before.view(len(order), *heads.v.shape[1:], heads.k.shape[2])  # (S, Hv, Dv, Dk)
    outs, kept = [], []
    for step, (count, chunks) in enumerate(zip(active, _prepared(heads, rows, inside, active), strict=True)):
        u, w, q, k, qk, decay = chunks
        here = state[:count].flatten(0, 1)
        change = torch.baddbmm(u, w, here.mT, alpha=-1)
        outs.append(torch.baddbmm(torch.bmm(q, here.mT), qk, change))
        here.mul_(decay).baddbmm_(change.mT, k)
        for at, i in enumerate(order[:count]):
            if (end := cuts[i][step + 1]) in _kept(sequences[i]):
                kept.append((sequences[i], end, state[at].clone()))
    out = torch.cat(outs).unflatten(0, (len(rows), -1)).transpose(1, 2).flatten(0, 1)  # (chunks C, Hv, Dv)
    return out.index_select(0, _there(back, before)), kept


def _prepared(heads: DeltaHeads, rows: Tensor, inside: Tensor, active: list[int]) -> Iterator[Chunks]:
    """The chunks of each step, of which there are as many as `active` says. Those of several steps are prepared at
    once."""
    step, chunk, most = 0, 0, MOST_CHUNKS if heads.decays.shape[2] == 1 else MOST_CHUNKS // 4
    while step < len(active):
        end = step + 1
        while end < len(active) and sum(active[step : end + 1]) <= most:
            end += 1
        counts = active[step:end]
        part = slice(chunk, chunk + sum(counts))
        chunks = _prepare(heads, rows[part], inside[part])
        count = heads.v.shape[1]
        yield from (Chunks(*x) for x in zip(*(x.split([n * count for n in counts]) for x in chunks), strict=True))
        step, chunk = end, part.stop


def _prepare(heads: DeltaHeads, rows: Tensor, inside: Tensor) -> Chunks:
    """Computes how the rows (chunks, C) of each chunk depend on each other. Rows that are not `inside` change
    nothing."""
    chunks, length = rows.shape
    groups = heads.v.shape[1] // heads.k.shape[1]
    q, k, v, decays, betas = (
        x.index_select(0, rows.flatten()).unflatten(0, (chunks, length)).transpose(1, 2).flatten(0, 1) for x in heads
    )  # (chunks heads, C, ..)
    q, k = (x[:, None].expand(-1, groups, -1, -1).flatten(0, 1) for x in (q, k))
    outside = inside.repeat_interleave(heads.v.shape[1], 0)
    sums, betas = (decays * outside[..., None]).cumsum(1), (betas * outside)[..., None]
    number = torch.arange(length, device=rows.device)
    after = number > number[:, None]
    if decays.shape[2] == 1:
        between = (sums - sums.mT).masked_fill(after, -torch.inf).exp()
        kk, qk = torch.bmm(k, k.mT) * between, torch.bmm(q, k.mT) * between
    else:  # each column of a product decays by itself
        between = (sums[:, :, None] - sums[:, None]).masked_fill_(after[..., None], -torch.inf).exp_()
        both = torch.stack((k, q), 3).flatten(0, 1)  # (chunks heads C, Dk, 2)
        kk, qk = torch.bmm(between.mul_(k[:, None]).flatten(0, 1), both).view(-1, length, length, 2).unbind(3)
    low = (kk * betas).tril(-1)
    # The inverse of 1 + low, by blocks of which two make one of the next size.
    inverse = torch.eye(length, device=rows.device).expand_as(low)
    size = 1
    while size < length:
        beside = (number ^ number[:, None]) // size == 1
        inverse = torch.baddbmm(inverse, inverse, torch.bmm(low * beside, inverse), alpha=-1)
        size *= 2
    begun = sums.exp()
    return Chunks(
        torch.bmm(inverse, v * betas),
        torch.bmm(inverse, k * (betas * begun)),
        q * begun,
        k * (sums[:, -1:] - sums).exp(),
        qk,
        begun[:, -1:],
    )

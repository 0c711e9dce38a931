"""Steps of graphs in which sequences have drafts: what they compute of gathered states (recurrent.py).

A sequence of such a step has up to D pending rows, then up to 1 + D of its own, which together are one chunk of
L = 1 + 2 D rows; those that are missing are rows of zeros, which change nothing. Which rows these are, the host knows:
it passes indices of them in place of `Recurrent.query_starts`, and in place of `marks` which of them come before the
two states that are written, after the marked row and after the last one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from umbra.ops.interface import Recurrent


class Delta(NamedTuple):
    """Indices for the delta rule. Its rows are those of kept inputs (S D), the step's (T), and one of zeros."""

    taken: Tensor  # (S L): pending rows and the step's
    queries: Tensor  # (S L): the same of the step's queries and a row of zeros
    kept: Tensor  # (S D): the next step's pending rows
    back: Tensor  # (T): where the step's rows are among `taken`


def delta_indices(indices: Tensor, count: int, rows: int, drafts: int) -> Delta:
    sizes = [count * (1 + 2 * drafts)] * 2 + [count * drafts, rows]
    return Delta(*indices[: sum(sizes)].split(sizes))


def conv_indices(indices: Tensor, count: int, rows: int, taps: int, drafts: int) -> tuple[Tensor, Tensor]:
    """Returns indices into the rows of places (S (taps - 1 + D)), those of the step (T) and one of zeros: the rows that
    each row's convolution takes (T taps), and those that both written places get (2 S (taps - 1 + D))."""
    sizes = [rows * taps, 2 * count * (taps - 1 + drafts)]
    taken, kept = indices[-sum(sizes) :].split(sizes)
    return taken, kept


class RecurrentStep(NamedTuple):
    """The tables that the host makes for a step."""

    indices: Tensor
    before: Tensor  # (2 S L) float32: 1 for a row that comes before a written state; first all of those written first
    first: Tensor  # (layers, S) places that get the state after the last row, or the marked one if none gets that
    second: Tensor  # (layers, S) marked ones beside those; negative: none


def on_host(at: Recurrent, rows: int, taps: int, drafts: int) -> RecurrentStep:
    """Makes a step's tables on the host. The last sequences may have no rows, and the last rows may be padding. All
    layers have the same numbers of rows."""
    count, length = len(at.query_starts) - 1, 1 + 2 * drafts
    sequences, chunk, kept = torch.arange(count), torch.arange(length), torch.arange(taps - 1 + drafts)
    starts, own = at.query_starts[:-1], at.query_starts.diff()
    pending, marks, written = at.pending[0].long(), at.marks[0].long(), at.writes >= 0
    ends = torch.where(written[0], pending + own, marks), marks

    def source(of: Tensor, i: Tensor, places: int, earlier: int) -> Tensor:
        """Rows i (n, ..) of sequences `of` (n), of which the first `earlier` and then pending ones are among the rows
        of a place, so many."""
        of, i = of.view(-1, 1), i.view(-1, i.shape[-1])
        before = pending[of] + earlier
        here = torch.where(i < before + own[of], count * places + starts[of] + i - before, count * places + rows)
        return torch.where(i < before, of * places + i, here)

    used = int(at.query_starts[-1])
    of = torch.repeat_interleave(sequences, own, output_size=used)
    number = torch.arange(used) - starts[of] + pending[of]
    back = torch.full((rows,), count * length - 1)  # padding has any row
    back[:used] = of * length + number
    convolved = torch.full((rows, taps), count * len(kept) + rows)
    convolved[:used] = source(of, number[:, None] + torch.arange(taps), len(kept), taps - 1)
    taken = source(sequences, chunk, drafts, 0)
    parts = [
        taken,
        torch.where(taken < count * drafts, rows, taken - count * drafts),
        source(sequences, ends[0][:, None] + chunk[:drafts], drafts, 0),
        back,
        convolved,
        *(source(sequences, end[:, None] + kept, len(kept), taps - 1) for end in ends),
    ]
    marked = torch.where(at.marks > 0, at.marked, -1)
    return RecurrentStep(
        torch.cat([part.flatten() for part in parts]),
        torch.cat([(chunk < end[:, None]).flatten() for end in ends]).float(),
        torch.where(written, at.writes, marked),
        torch.where(written, marked, -1),
    )


def masks(drafts: int) -> Tensor:
    """(masks, L, L): the diagonal with what is below it, the diagonal, then for the sizes 1, 2, 4, .. of blocks what is
    below the diagonal in the two blocks that make one of the next size."""
    number = torch.arange(1 + 2 * drafts)
    sizes = [1 << i for i in range((len(number) - 1).bit_length())]
    below = number[:, None] > number
    blocks = [below & ((number ^ number[:, None]) // size == 1) for size in sizes]
    return torch.stack([below | (below == below.T), number == number[:, None], *blocks]).float()


def conv(before: Tensor, x: Tensor, weight: Tensor, taken: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution of each row (T, C), and what is written (2 S (taps - 1 + D), C). before (S, elements)"""
    channels = x.shape[1]
    rows = torch.cat((before.view(-1, channels), x.float(), weight.new_zeros(1, channels)))
    y = (rows.index_select(0, taken).view(len(x), -1, channels) * weight).sum(1)
    return y, rows.index_select(0, kept)


def delta(
    before: Tensor, inputs: Tensor, q: Tensor, index: Delta, within: Tensor, masks: Tensor, heads: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The outputs (T, Hv, Dv) of rows, and both states (2 S, elements). before (S, elements); inputs, of which `index`
    takes some, as they are kept; q (T, Hk Dk)."""
    count, width, depth = heads
    length, drafts = masks.shape[1], (masks.shape[1] - 1) // 2
    keys, size = q.shape[1], len(index.kept) // drafts
    key_heads = keys // depth
    group = count // key_heads
    rows = inputs.index_select(0, index.taken).view(size, length, -1)
    k, v, decays, betas = rows.split([keys, count * width, count, count], 2)
    queries = torch.cat((q, q.new_zeros(1, keys))).index_select(0, index.queries).view(size, length, keys)
    k = k.unflatten(2, (-1, depth)).transpose(1, 2).flatten(0, 1)  # (S Hk, L, Dk)
    kq = torch.cat((k, queries.unflatten(2, (-1, depth)).transpose(1, 2).flatten(0, 1)), 1)
    v = v.unflatten(2, (-1, width)).permute(0, 2, 3, 1)  # (S, Hv, Dv, L)
    decays, betas = (x.transpose(1, 2).contiguous() for x in (decays, betas))  # (S, Hv, L)
    sums = decays.cumsum(2)
    between = (sums[..., None] - sums[:, :, None]).clamp(max=0).exp() * masks[0]
    products = torch.bmm(kq, k.mT).view(size, key_heads, 1, 2, length, length)
    products = products * between.view(size, key_heads, group, 1, length, length)
    low, shares = (x.flatten(0, 2) for x in products.unbind(3))  # (S Hv, L, L)
    inverse = _inverse(low * betas.view(-1, length, 1), masks)
    state = before.view(size * key_heads, group * width, depth)
    met = torch.bmm(state, kq.mT).view(size, count, width, 2 * length)
    by_key, by_query = (x * sums.exp()[:, :, None] for x in met.split(length, 3))
    change = torch.bmm(((v - by_key) * betas[:, :, None]).flatten(0, 1), inverse.mT)  # (S Hv, Dv, L)
    out = torch.baddbmm(by_query.flatten(0, 1), change, shares.mT).view(size, count, width, length)
    out = out.permute(0, 3, 1, 2).flatten(0, 1).index_select(0, index.back)
    # Both states: what rows change decays to the end of those that come before it.
    within = within.view(2, size, 1, length)
    total = (decays * within).sum(3)[..., None]  # (2, S, Hv, 1)
    change = change.view(size, count, width, length) * ((total - sums).clamp(max=0).exp() * within)[:, :, :, None]
    after = before.view(size, count, width * depth) * total.exp()
    after = torch.baddbmm(
        after.view(2 * len(state), group * width, depth),
        change.view(2 * len(state), group * width, length),
        k.expand(2, *k.shape).flatten(0, 1),
    )
    return out, after.view(2 * size, -1)


def _inverse(low: Tensor, masks: Tensor) -> Tensor:
    """The inverse of one plus what is below the diagonal of each `low` (.., L, L)."""
    inverse = masks[1] - low * masks[2]
    for mask in masks[3:]:
        inverse = torch.baddbmm(inverse, inverse, torch.bmm(low * mask, inverse), alpha=-1)
    return inverse


def delta_by_row(
    before: Tensor, inputs: Tensor, q: Tensor, index: Delta, within: Tensor, masks: Tensor, heads: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The same as `delta`, where each row of a head's state decays by itself."""
    count, width, depth = heads
    length, drafts = masks.shape[1], (masks.shape[1] - 1) // 2
    keys, size = q.shape[1], len(index.kept) // drafts
    group = count // (keys // depth)
    rows = inputs.index_select(0, index.taken).view(size, length, -1)
    k, v, decays, betas = rows.split([keys, count * width, count * depth, count], 2)
    queries = torch.cat((q, q.new_zeros(1, keys))).index_select(0, index.queries).view(size, length, keys)
    k, queries = (x.unflatten(2, (-1, depth)).repeat_interleave(group, 2) for x in (k, queries))
    k, queries, v, decays = (
        x.transpose(1, 2).flatten(0, 1)
        for x in (k, queries, v.unflatten(2, (count, width)), decays.unflatten(2, (count, depth)))
    )  # (S Hv, L, ..)
    betas, sums = betas.transpose(1, 2).reshape(-1, length, 1), decays.cumsum(1)
    between = (sums[:, :, None] - sums[:, None]).clamp(max=0).exp() * masks[0][..., None]
    both = torch.stack((k, queries), 3).flatten(0, 1)  # (S Hv L, Dk, 2)
    products = torch.bmm((between * k[:, None]).flatten(0, 1), both).view(-1, length, length, 2)
    low, shares = products.unbind(3)
    inverse, begun = _inverse(low * betas, masks), sums.exp()
    state = before.view(size * count, width, depth)
    changed = torch.bmm(inverse, (v - torch.bmm(k * begun, state.mT)) * betas)  # (S Hv, L, Dv)
    out = torch.baddbmm(torch.bmm(queries * begun, state.mT), shares, changed)
    out = out.view(size, count, length, width).transpose(1, 2).flatten(0, 1).index_select(0, index.back)
    # Both states: what rows change decays to the end of those that come before it.
    within = within.view(2, size, 1, length, 1).expand(-1, -1, count, -1, -1).flatten(1, 2)  # (2, S Hv, L, 1)
    total = (decays * within).sum(2, keepdim=True)  # (2, S Hv, 1, Dk)
    kept = ((total - sums).clamp(max=0).exp() * within * k).flatten(0, 1)
    after = (state * total.exp()).flatten(0, 1)
    after = torch.baddbmm(after, changed.mT.expand(2, -1, -1, -1).flatten(0, 1), kept)
    return out, after.view(2 * size, -1)

"""Mixtures of many tokens: the rows of each expert are multiplied by its matrices, unpacked to the type of the rows,
some experts at a time.

The pairs of tokens and experts are sorted by the experts' order, so each bank of experts has a slice of the rows. A
token's results are added in the order of its choices, whatever the order of experts was."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from umbra.ops import reference
from umbra.ops.cpu.shadow import ExpertBlocks
from umbra.ops.cuda.unpack import biases
from umbra.ops.cuda.weights import BlockExperts, ResidentExperts

UNPACKED = 1 << 28  # most elements of matrices that are unpacked at a time
Unpack = Callable[[Tensor, Tensor, ExpertBlocks, str, torch.dtype], Tensor]  # as unpack.py has it
Bank = tuple[Tensor, Tensor]  # memory (uint8), and where in it the blocks of its experts begin (int64)
Ints = npt.NDArray[np.integer]


@dataclass
class Rows:
    """The rows of a step, sorted by experts, and the results. `groups` are the experts of each bank."""

    x: Tensor  # (pairs of experts in groups, hidden)
    out: Tensor  # (all pairs, hidden)
    back: Tensor  # the place of each pair in `out`
    groups: Sequence[Sequence[int]]
    pairs: Ints  # of each expert
    ends: Sequence[Tensor]  # of each expert's rows in its bank's slice, int32, by bank

    @classmethod
    def sort(cls, x: Tensor, local: Tensor, groups: Sequence[Sequence[int]], pairs: Ints) -> "Rows":
        """`local` (T, k) are numbers of experts from 0 on; those that are in no group get no rows. `pairs` are the
        numbers of pairs of each expert."""
        flat = [expert for group in groups for expert in group]
        ranks = np.full(len(pairs) + 1, len(flat))
        ranks[flat] = np.arange(len(flat))
        ends = [end for group in groups for end in accumulate(int(pairs[expert]) for expert in group)]
        rank_of, ends_there = to_device(x.device, ranks, np.array(ends, np.int64))
        inside = torch.where((local >= 0) & (local < len(pairs)), local, len(pairs)).flatten()
        order = rank_of[inside].argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        used = int(pairs[flat].sum())
        out = x.new_empty(len(order), x.shape[1])
        out[used:] = 0
        by_bank = ends_there.int().split([len(group) for group in groups]) if flat else ()
        return cls(x.index_select(0, order[:used] // local.shape[1]), out, back, groups, pairs, by_bank)

    def multiply(self, banks: Iterable[Bank], shape: ExpertBlocks, unpack: Unpack) -> None:
        """Computes the rows of all groups, whose banks come in their order."""
        begin = 0
        for group, ends, (memory, starts) in zip(self.groups, self.ends, banks, strict=True):
            rows = slice(begin, begin + int(self.pairs[list(group)].sum()))
            self.out[rows] = products(self.x[rows], ends, memory, starts, shape, unpack)
            begin = rows.stop

    def sums(self, weights: Tensor) -> Tensor:
        """The weighted sums of each token's results, (T, hidden)."""
        by_token = self.out[self.back].view(*weights.shape, -1)
        total = torch.zeros_like(by_token[:, 0], dtype=torch.float32)
        for choice in range(weights.shape[1]):
            total += by_token[:, choice] * weights[:, choice, None].float()
        return total.to(self.out.dtype)


def products(x: Tensor, ends: Tensor, memory: Tensor, starts: Tensor, shape: ExpertBlocks, unpack: Unpack) -> Tensor:
    """Rows by the experts whose blocks begin at `starts`; the rows of each end at `ends`."""

    def linear(rows: Tensor, name: str) -> Tensor:
        y = F.grouped_mm(rows, unpack(memory, starts, shape, name, x.dtype).transpose(1, 2), offs=ends)
        if not shape.kind.biased:
            return y
        experts = torch.searchsorted(ends, torch.arange(len(rows), device=x.device, dtype=torch.int32), right=True)
        return (y.float() + biases(memory, starts, shape, name)[experts]).to(y.dtype)

    return linear(reference.gated(linear(x, "w13"), shape.kind), "w2")[:, : x.shape[1]]


def grouped(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    experts: BlockExperts | ResidentExperts,
    first_expert: int | None,
    unpack: Unpack,
) -> Tensor:
    """The mixture. Experts without a place add nothing."""
    shape, local = experts.shape, ids - (first_expert or 0)
    pairs, starts = pairs_of(local, experts.count), experts.places.tolist()
    here = [expert for expert in np.flatnonzero(pairs).tolist() if starts[expert] >= 0]
    groups = parts(here, shape)
    rows = Rows.sort(x, local, groups, pairs)
    memory, used = experts.data.view(-1), experts.places[here]
    rows.multiply(((memory, part) for part in used.split([len(group) for group in groups])), shape, unpack)
    return rows.sums(weights)


def parts(experts: Sequence[int], shape: ExpertBlocks) -> list[Sequence[int]]:
    """Groups of experts that may be unpacked at once."""
    size = max(1, UNPACKED // (3 * shape.inner * shape.hidden))
    return [experts[at : at + size] for at in range(0, len(experts), size)]


def pairs_of(local: Tensor, experts: int) -> Ints:
    """The number of pairs of each of so many experts; others are not counted."""
    flat = local.cpu().numpy().ravel()
    counts: Ints = np.bincount(flat[(flat >= 0) & (flat < experts)], minlength=experts)
    return counts


def to_device(device: torch.device, *given: Ints) -> Sequence[Tensor]:
    """These numbers in int64, by one copy that is not waited for."""
    host = torch.empty(sum(map(len, given)), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate(given, out=host.numpy(), casting="same_kind")
    return host.to(device, non_blocking=True).split([len(numbers) for numbers in given])

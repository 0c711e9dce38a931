"""Places the experts of a layer on ranks by how often tokens are routed to them: the rank with the most rows decides
how long a step of all ranks takes.

A layer has ranks * own physical experts, of which rank r has r * own .. (r + 1) * own - 1. `held` (ranks * own) says
which of the model's experts each of them is. Every expert is one of them; hot ones are several, on different ranks, and
each of these copies serves its share of the ranks. All of this is a pure function of routing counts, which all ranks
compute alike.
"""

import numpy as np
from numpy.typing import NDArray

Placement = NDArray[np.int64]
Counts = NDArray[np.int64]  # (experts): tokens that were routed to each expert

# As shares of the mean load of a rank:
SLACK = 0.02  # an expert stays where it is unless another rank has so much less to do
WORTH = 0.05  # moves that take less than this from the busiest rank are not made


def first_placement(experts: int, ranks: int, own: int) -> Placement:
    """The placement before any token was routed. Packed weights are kept as it says: if it changes, raise LAYOUT of
    executor/checkpoint/packed.py."""
    return _packed(np.ones(experts, np.int64), ranks, own, None)


def next_placement(counts: Counts, ranks: int, before: Placement) -> Placement:
    """A placement for `counts` that moves few experts; `before` itself unless a new one is worth its moves."""
    packed = _packed(counts, ranks, len(before) // ranks, before)
    return packed if imbalance(counts, before, ranks) - imbalance(counts, packed, ranks) >= WORTH else before


def imbalance(counts: Counts, held: Placement, ranks: int) -> float:
    """Tokens of the busiest rank / tokens of a rank on average; 1 if there are none."""
    loads = (counts / np.bincount(held, minlength=len(counts)))[held].reshape(ranks, -1).sum(1)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def physical_for(rank: int, ranks: int, held: Placement) -> Placement:
    """The physical expert that rank `rank` sends its rows of each expert to: of n copies in order of ranks, the
    first serves the first n-th of the ranks and so on, so that rows seldom leave their neighbourhood."""
    copies = np.bincount(held)
    ordered = np.argsort(held, kind="stable")  # physical experts by expert
    return ordered[np.cumsum(copies) - copies + rank * copies // ranks]


def moves(before: Placement, after: Placement, ranks: int) -> list[tuple[int, int]]:
    """Returns (from, to), two physical experts, of every copy from one placement to another; experts come from near
    ranks."""
    own = len(before) // ranks
    pairs = []
    for to in np.flatnonzero(before != after):
        sources = np.flatnonzero(before == after[to])
        near = np.argmin(np.abs(sources // own - to // own))
        pairs.append((int(sources[near]), int(to)))
    return pairs


def _copies(counts: Counts, ranks: int, own: int) -> NDArray[np.int64]:
    """Returns the number of copies of each expert: one, and each further one where copies have the most tokens."""
    copies = np.ones(len(counts), np.int64)
    for _ in range(ranks * own - len(counts)):
        copies[np.argmax(np.where(copies < ranks, counts / copies, -1.0))] += 1
    return copies


def _packed(counts: Counts, ranks: int, own: int, before: Placement | None) -> Placement:
    """Copies with the most tokens first, each to the rank with the least to do that has room and no copy of it yet."""
    copies = _copies(counts, ranks, own)
    per_copy = counts / copies  # tokens of a copy
    stays = np.zeros((ranks, len(counts)))
    if before is not None:
        stays[np.arange(ranks * own) // own, before] = SLACK * counts.sum() / ranks
    has, loads, room = np.zeros(stays.shape, np.bool_), np.zeros(ranks), np.full(ranks, own)

    def put(rank: int, expert: int) -> None:
        has[rank, expert] = True
        loads[rank] += per_copy[expert]
        room[rank] -= 1

    hottest = np.argsort(-per_copy, kind="stable")
    for expert in np.repeat(hottest, copies[hottest]).tolist():
        costs = np.where(has[:, expert], np.inf, loads - stays[:, expert])
        if np.isinf(costs[room > 0]).all():  # every rank with room has it: a full one makes room for it
            full, other = int(np.argmin(costs)), int(np.argmax(room))
            given = int(np.flatnonzero(has[full] & ~has[other])[-1])
            put(other, given)
            has[full, given] = False
            loads[full] -= per_copy[given]
            room[full] += 1
            put(full, expert)
        else:
            put(int(np.argmin(np.where(room > 0, costs, np.inf))), expert)
    return _numbered(has, own, before)


def _numbered(has: NDArray[np.bool_], own: int, before: Placement | None) -> Placement:
    """The placement of the experts that each rank `has` (ranks, experts). Those that a rank had already keep their
    numbers."""
    held = np.full((len(has), own), -1) if before is None else before.reshape(-1, own).copy()
    for of_rank, here in zip(held, has, strict=True):
        of_rank[~np.isin(of_rank, np.flatnonzero(here))] = -1
        of_rank[of_rank < 0] = np.setdiff1d(np.flatnonzero(here), of_rank)
    return held.reshape(-1)

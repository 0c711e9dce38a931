"""Cache policies for comparison. Each runs through a trace with a number of slots and returns its hits and copies.

LRU, LFU and the optimum may copy at every miss, within a step, at no cost; the residency policy copies only between
steps.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cpu_offload.policy.residency import Residency, ResidencySettings
from tools.benchmarks.routing_traces import Trace

NEVER = 1 << 40
LEARNING = 10  # the first 1 / LEARNING of a trace: `static` learns from it, and its hits are not counted


@dataclass(frozen=True)
class Run:
    """The hits and copies of each step. (steps)"""

    uses: npt.NDArray[np.int64]
    hits: npt.NDArray[np.int64]
    copies: npt.NDArray[np.int64]

    def measured(self) -> tuple[float, float, float]:
        """(hit rate, copies a step, misses saved a step if a copy costs as much as a miss)"""
        start = len(self.uses) // LEARNING
        uses, hits, copies = (float(a[start:].mean()) for a in (self.uses, self.hits, self.copies))
        return hits / uses, copies, hits - copies


Policy = Callable[[Trace, int], Run]


def by_step(trace: Trace, hits: list[bool], copies: list[bool]) -> Run:
    """Sums up each step from what happened at each use."""
    keys, starts = trace.uses()
    sums = [np.add.reduceat(np.array(a, np.int64), starts) for a in (hits, copies)]
    return Run(np.diff(np.r_[starts, len(keys)]), *sums)


def lru(trace: Trace, slots: int, pools: int = 1) -> Run:
    """Least recently used. `pools` is 1, or the number of layers, each with an equal share of the slots."""
    most, each = slots // pools, trace.size // pools
    kept: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(pools)]
    hits = []
    for key in trace.uses()[0].tolist():
        pool = kept[key // each]
        hits.append(key in pool)
        pool[key] = None
        pool.move_to_end(key)
        if len(pool) > most:
            pool.popitem(last=False)
    return by_step(trace, hits, [not hit for hit in hits])


def lru_by_layer(trace: Trace, slots: int) -> Run:
    return lru(trace, slots, trace.layers)


def lfu(trace: Trace, slots: int) -> Run:
    """Counts all uses since the start. Every miss replaces the least used resident, of several the oldest."""
    times = [0] * trace.size
    kept: dict[int, tuple[int, int]] = {}  # key: (uses, last use)
    heap: list[tuple[int, int, int]] = []  # the same, with outdated entries
    hits = []
    for now, key in enumerate(trace.uses()[0].tolist()):
        hits.append(key in kept)
        if not hits[-1] and len(kept) == slots:
            while True:
                uses, last, out = heapq.heappop(heap)
                if kept.get(out) == (uses, last):
                    break
            del kept[out]
        times[key] += 1
        kept[key] = (times[key], now)
        heapq.heappush(heap, (times[key], now, key))
    return by_step(trace, hits, [not hit for hit in hits])


def static(trace: Trace, slots: int) -> Run:
    """Keeps the experts that were used most in the learning part."""
    keys, starts = trace.uses()
    counts = np.bincount(keys[: starts[len(starts) // LEARNING]], minlength=trace.size)
    kept = np.zeros(trace.size, bool)
    kept[np.argsort(-counts, kind="stable")[:slots]] = True
    return by_step(trace, kept[keys].tolist(), [False] * len(keys))


def optimum(trace: Trace, slots: int) -> Run:
    """Belady's optimum: keeps the experts that are used soonest. A missing expert is not copied if all residents are
    used sooner."""
    keys = trace.uses()[0]
    order = np.argsort(keys, kind="stable")
    following = np.full(len(keys), NEVER)
    same = keys[order][1:] == keys[order][:-1]
    following[order[:-1][same]] = order[1:][same]
    kept: dict[int, int] = {}  # key: its next use
    heap: list[tuple[int, int]] = []  # (-next use, key), with outdated entries
    hits, copies = [], []
    for key, next_use in zip(keys.tolist(), following.tolist(), strict=True):
        hits.append(key in kept)
        copies.append(False)
        if not hits[-1]:
            if next_use == NEVER:
                continue
            if len(kept) == slots:
                while kept.get(heap[0][1]) != -heap[0][0]:
                    heapq.heappop(heap)
                if -heap[0][0] <= next_use:
                    continue
                del kept[heapq.heappop(heap)[1]]
            copies[-1] = True
        kept[key] = next_use
        heapq.heappush(heap, (-next_use, key))
    return by_step(trace, hits, copies)


def residency(settings: ResidencySettings) -> Policy:
    """Umbra's policy, which decides after every step."""

    def run(trace: Trace, slots: int) -> Run:
        policy, resident, free = Residency(trace.layers, trace.experts, settings), np.zeros(trace.size, bool), slots
        uses, hits, copies = [], [], [0]
        for keys in trace.places():
            counts = np.bincount(keys, minlength=trace.size)
            uses.append(np.count_nonzero(counts))
            hits.append(np.count_nonzero(counts[resident]))
            policy.observe(counts.reshape(trace.layers, trace.experts))
            swaps = policy.swaps(resident.reshape(trace.layers, trace.experts), free)
            for swap in swaps:
                if swap.expert_out is None:
                    free -= 1
                else:
                    resident[swap.expert_out[0] * trace.experts + swap.expert_out[1]] = False
                resident[swap.layer * trace.experts + swap.expert_in] = True
            copies.append(len(swaps))
        return Run(np.array(uses), np.array(hits), np.array(copies[:-1]))

    return run

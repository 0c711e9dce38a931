"""Cache policies for comparison. Each runs through a trace with a number of slots and returns its hits and copies.

LRU, LFU and the optimum may copy at every miss, within a step, at no cost, and LRU and LFU learn from each token of a
prompt as from a decode step; the residency policy copies only between steps.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from umbra.cpu_offload.policy.residency import ResidencyPolicy, ResidencySettings
from umbra.tools.benchmarks.routing_traces import Trace, pairs

Bools = npt.NDArray[np.bool_]

NEVER = 1 << 40
STREAMED, TAIL = 512, 64  # tokens: the rival's shortest prompt that chooses experts, and its prompts' last ones
LEARNING = 10  # the first 1 / LEARNING of a trace: `static` learns from it, and its hits are not counted


@dataclass(frozen=True)
class PolicyRun:
    """The hits and copies of each step. (steps)"""

    uses: npt.NDArray[np.int64]
    hits: npt.NDArray[np.int64]
    copies: npt.NDArray[np.int64]

    def measured(self) -> tuple[float, float, float]:
        """(hit rate, copies a step, misses saved a step if a copy costs as much as a miss)"""
        start = len(self.uses) // LEARNING
        uses, hits, copies = (float(a[start:].mean()) for a in (self.uses, self.hits, self.copies))
        return hits / uses, copies, hits - copies


Policy = Callable[[Trace, int], PolicyRun]


def by_step(trace: Trace, hits: Bools, copies: Bools) -> PolicyRun:
    """Sums up each step from what happened at each use."""
    keys, starts = trace.uses()
    sums = [np.add.reduceat(a.astype(np.int64), starts) for a in (hits, copies)]
    return PolicyRun(np.diff(np.r_[starts, len(keys)]), *sums)


def with_prompts(trace: Trace) -> tuple[list[int], npt.NDArray[np.bool_]]:
    """Keys of all uses in order, and whether each is of a decode step rather than of a prompt."""
    keys, starts = trace.uses()
    parts, begin = [], 0
    for prompt in trace.prompts:
        end = starts[prompt.before]
        parts += [(keys[begin:end], True), (pairs(prompt.ids, trace.experts).ravel(), False)]
        begin = end
    parts.append((keys[begin:], True))
    return np.concatenate([of for of, _ in parts]).tolist(), np.repeat(
        [d for _, d in parts], [len(of) for of, _ in parts]
    )


def lru(trace: Trace, slots: int, pools: int = 1) -> PolicyRun:
    """Least recently used. `pools` is 1, or the number of layers, each with an equal share of the slots."""
    most, per_pool = slots // pools, trace.size // pools
    kept: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(pools)]
    hits = []
    keys, decoded = with_prompts(trace)
    for key in keys:
        pool = kept[key // per_pool]
        hits.append(key in pool)
        pool[key] = None
        pool.move_to_end(key)
        if len(pool) > most:
            pool.popitem(last=False)
    counted = np.array(hits)[decoded]
    return by_step(trace, counted, ~counted)


def lru_by_layer(trace: Trace, slots: int) -> PolicyRun:
    return lru(trace, slots, trace.layers)


def lfu(trace: Trace, slots: int) -> PolicyRun:
    """Counts all uses since the start. Every miss replaces the least used resident, of several the oldest."""
    times = [0] * trace.size
    kept: dict[int, tuple[int, int]] = {}  # key: (uses, last use)
    heap: list[tuple[int, int, int]] = []  # the same, with outdated entries
    hits = []
    keys, decoded = with_prompts(trace)
    for now, key in enumerate(keys):
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
    counted = np.array(hits)[decoded]
    return by_step(trace, counted, ~counted)


def static(trace: Trace, slots: int) -> PolicyRun:
    """Keeps the experts that were used most in the learning part."""
    keys, starts = trace.uses()
    counts = np.bincount(keys[: starts[len(starts) // LEARNING]], minlength=trace.size)
    kept = np.zeros(trace.size, bool)
    kept[np.argsort(-counts, kind="stable")[:slots]] = True
    return by_step(trace, kept[keys], np.zeros(len(keys), bool))


def by_prompt(trace: Trace, slots: int, last: int = 0) -> PolicyRun:
    """The rule of cann-recipes-infer: each prompt of at least `STREAMED` tokens chooses the same number of experts in
    each layer, those most used by its `last` tokens or, if 0, by all; decoding changes nothing. At first these are the
    first experts."""
    per_layer = slots // trace.layers
    kept = np.zeros((trace.layers, trace.experts), bool)
    kept[:, :per_layer] = True
    uses, hits, copies, begin = [], [], [], 0
    changes = [prompt for prompt in trace.prompts if len(prompt.ids) >= STREAMED]
    keys = trace.places()
    for prompt in [*changes, None]:
        for step in keys[begin : prompt.before if prompt else len(keys)]:
            used = np.unique(step)
            uses.append(len(used))
            hits.append(np.count_nonzero(kept.reshape(-1)[used]))
            copies.append(0)
        if prompt:
            begin, counted = prompt.before, pairs(prompt.ids[-last:], trace.experts).ravel()
            counts = np.bincount(counted, minlength=trace.size).reshape(kept.shape)
            kept = np.zeros_like(kept)
            np.put_along_axis(kept, np.argsort(-counts, axis=1, kind="stable")[:, :per_layer], True, axis=1)
    return PolicyRun(np.array(uses), np.array(hits), np.array(copies))


def by_tail(trace: Trace, slots: int) -> PolicyRun:
    return by_prompt(trace, slots, TAIL)


def known(trace: Trace, slots: int) -> PolicyRun:
    """Knows the probability of every expert in the next step, but not what is drawn. No policy that does not know the
    future can do better on a trace whose draws are independent."""
    here = slots // trace.layers
    hits = trace.ranks < here if trace.ranks is not None else np.zeros_like(trace.ids, bool)
    by_step = hits.reshape(len(hits), -1).sum(axis=1)
    return PolicyRun(np.full(len(hits), hits[0].size), by_step, np.zeros_like(by_step))


def optimum(trace: Trace, slots: int) -> PolicyRun:
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
    return by_step(trace, np.array(hits), np.array(copies))


def residency(settings: ResidencySettings, link: float = math.inf, warm: bool = True) -> Policy:
    """Umbra's policy, which decides after every step. Its copies are made one after another from then on, `link` of
    them in the time of a step. A use is a hit if the copy is complete at the layer's turn; turns are evenly spread over
    the step. Not `warm`: the policy does not learn from prompts."""

    def run(trace: Trace, slots: int) -> PolicyRun:
        policy = ResidencyPolicy(trace.layers, trace.experts, settings)
        here = np.zeros(trace.size, bool)
        arrival = np.zeros(trace.size)  # of those here: when the copy is complete, in steps
        turns = np.repeat((np.arange(trace.layers) + 0.5) / trace.layers, trace.experts)  # of the layers, in a step
        uses, hits, copies, free = [], [], [], 0.0  # free: when all copies are complete
        prompts = deque(trace.prompts if warm else ())

        def decide(now: int) -> int:
            nonlocal free
            under_way = int(((arrival > now) & here).sum())
            swaps = policy.swaps(here.reshape(trace.layers, trace.experts), slots - int(here.sum()), under_way)
            for swap in swaps:
                if swap.expert_out is not None:
                    here[swap.expert_out[0] * trace.experts + swap.expert_out[1]] = False
                key = swap.layer * trace.experts + swap.expert_in
                free = max(free, now) + 1 / link
                here[key], arrival[key] = True, free
            return len(swaps)

        for step, keys in enumerate(trace.places()):
            while prompts and prompts[0].before == step:
                ids = prompts.popleft().ids.astype(np.int64)
                others = np.full((trace.sequences - 1, *ids.shape[1:]), -1)  # they decode in the same step
                routed = list(np.concatenate([ids, others]).transpose(1, 0, 2))
                policy.observe_long(routed, [len(ids), *[1] * len(others)], trace.tokens_of(step))
                arrival, free = np.minimum(arrival, step), step  # prompts take longer than copies
                decide(step)
            counts = np.bincount(keys, minlength=trace.size)
            uses.append(np.count_nonzero(counts))
            hits.append(np.count_nonzero(counts[here & (arrival <= step + turns)]))
            policy.observe(counts.reshape(trace.layers, trace.experts), trace.tokens_of(step + 1))
            copies.append(decide(step + 1))
        return PolicyRun(np.array(uses), np.array(hits), np.array(copies))

    return run

"""A ring of groups of blocks on the device, which experts are copied to in steps of many tokens. All layers share it,
and copies run ahead of the layers:

    link    l: e7 e3 e9 e1 | l: e4 e0 .. | l+1: e5 ..  | l+1: ..          groups of experts, in the order of layers and,
    device       l: e7 e3 e9 e1 | l: residents | l: e4 e0 .. | attention  in a layer, of tokens
    CPU          l: the experts of few tokens                | -

A group is free, or it holds experts of one layer: being copied (until its ready event), then computed (until its
release event, after which the link may write to it again). Before a layer's routing is known, only experts that are
nearly sure to be used (SURE expected pairs) are copied; their numbers come from the routing of earlier long steps, so a
step of a few tokens copies nothing ahead. Once a layer's routing is known, `plan` divides what is missing by measured
costs (prefill_split.py): what is copied already stays with the device, whose kernels skip experts without tokens;
what else is worth a copy follows, and the shadow pool computes the rest. The division knows how long device and shadow
pool have nothing to compute of a layer (`lead`), as in attention, while the link fills the ring. The longer a step is,
the more groups it uses.

One step:

    ring.begin(tokens, resident)             copies for the first layers begin
    in each layer, once its routing is known:
        computed = ring.plan(layer, pairs)   the experts for the shadow pool, which starts on them
        for group, experts in ring.groups(layer, there):
            ... the device computes `experts`, of the first groups, whose copies have been made
        ... the device computes the residents
        for group, experts in ring.groups(layer):
            ... the device computes `experts`, which lie in the group's blocks in this order
        ... the shadow pool's rows are waited for, and added
    ring.end()                               no copy outlives a step

The result has the same bits whatever was copied, guessed wrongly, or left to the shadow pool."""

import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np

from umbra.cpu_offload.costs import Costs
from umbra.cpu_offload.prefill_split import Bools, Pairs, split

GROUPS = 4  # at least: three in use, a fourth absorbs jitter
USED = 2  # at once: one is computed, one is copied; the others are filled while the device computes the rest of a layer
AHEAD_BYTES = 32 << 10  # which a link copies in the rest of a layer for each token: 27 GB/s in 1.2 us
LEAST, MOST = 4, 8  # experts of a group
GROUP_BYTES = 112 << 20  # of a group, within these bounds
SURE = 3.0  # expected pairs of an expert: fewer than one in twenty such experts gets no token
JOB_ROWS = 512  # rows of a job of the shadow pool in long steps, whose tokens may be any number
LEARN = 0.5  # the weight of the newest step in the expected routing
Bank = TypeVar("Bank")


def group_size(slot_bytes: int, experts: int) -> int:
    """Experts of a group, where the largest expert has `slot_bytes` bytes and a layer so many experts."""
    return min(max(LEAST, min(MOST, GROUP_BYTES // max(slot_bytes, 1))), experts)


def group_count(tokens: int, slot_bytes: int, experts: int) -> int:
    """Groups of a ring for steps of so many tokens. With half of a layer's experts there when its routing is known, the
    device has enough to do while the others are copied."""
    per_group = group_size(slot_bytes, experts)
    return max(GROUPS, min(USED + tokens * AHEAD_BYTES // (per_group * max(slot_bytes, 1)), experts // 2 // per_group))


class Link(ABC):
    """The blocks of a ring on one platform, and the copies to them. Copies are made in the order of `begin`, so a group
    may be begun again although nothing was computed from it. `layer` is a number among the layers with shadows. Where
    the device has streams and events, every method but `drain` returns at once."""

    def __init__(self, groups: int, per_group: int):
        """Each of `groups` groups has room for `per_group` of the largest experts."""
        self.count, self.per_group = groups, per_group

    @abstractmethod
    def begin(self, group: int, layer: int, experts: Sequence[int]) -> None:
        """Begins to copy `experts`, at most `per_group`, to the group's blocks, the first to its first block, once the
        device has computed all that it was given before the group's last `release`."""

    @abstractmethod
    def ready(self, group: int) -> None:
        """Makes everything that the device is given from now on wait for the group's copies. Raises an error if one has
        failed."""

    @abstractmethod
    def release(self, group: int) -> None:
        """The device has been given all that reads the group."""

    @abstractmethod
    def drain(self) -> None:
        """Returns once no copy is in flight. Raises no error: a failed copy is of no use to anybody."""


class Held(NamedTuple):
    """The experts that a group holds, from the beginning of its copies to its release."""

    layer: int
    experts: list[int]


class ExpertRing:
    """Which experts are in which group of `link`, and which are copied next."""

    def __init__(self, link: Link, layers: int, experts: int, top_k: float, costs: Costs):
        """`experts` are those of a layer on this rank, of which a token uses `top_k` on average."""
        self.link, self.costs = link, costs
        self.per_token = np.full((layers, experts), top_k / experts)  # expected pairs of each expert for a token
        self.copied = np.zeros(layers, np.int64)  # experts copied for each layer in this step
        # Milliseconds from the end of a layer's experts to the beginning of the next one's, as last measured.
        self.lead = 0.0
        self.tokens, self._held, self._wanted, self._empty = 0, dict[int, Held](), dict[int, list[int]](), list[int]()

    def begin(self, tokens: int, resident: Bools) -> None:
        """To be called before a long step of `tokens` tokens. `resident` (layers, experts) holds for the whole step."""
        self.end()  # a step before it may have failed
        self.lead *= tokens / max(self.tokens, 1)
        count = min(self.link.count, group_count(tokens, self.costs.block_bytes, self.per_token.shape[1]))
        self.tokens, self.resident, self._empty = tokens, resident, list(range(count))
        self._planned = -1  # the last layer whose routing is known
        self.copied[:] = 0
        expected = tokens * self.per_token
        for layer in np.flatnonzero(expected.max(axis=1) >= SURE).tolist():
            likely = np.where(expected[layer] >= SURE, expected[layer], 0.0)
            self._wanted[layer] = split(likely, resident[layer], self.costs, self.link.per_group).copied
        self._copy()

    def plan(self, layer: int, pairs: Pairs) -> list[int]:
        """Takes the layer's routing, the number of (token, expert) pairs of each expert. -> the experts that the shadow
        pool is to compute. Layers come in their order; one may be left out or come again."""
        self.pairs, self._planned = pairs, layer
        self.per_token[layer] += LEARN * (pairs / self.tokens - self.per_token[layer])
        for group in [group for group, held in self._held.items() if held.layer < layer]:
            self._free(group)
        begun = [expert for held in self._held.values() if held.layer == layer for expert in held.experts]
        here = self.resident[layer].copy()
        here[begun] = True
        parts = split(pairs, here, self.costs, self.link.per_group, int(self.copied[layer]), self.lead)
        # Where later layers hold every group, no group will be free before this layer ends.
        reached = bool(begun or self._empty)
        self._wanted = {of: experts for of, experts in self._wanted.items() if of > layer}
        self._wanted[layer] = parts.copied if reached else []
        self._copy()
        return parts.computed if reached else parts.copied + parts.computed

    def order(self, layer: int) -> tuple[list[list[int]], int]:
        """After `plan`: the experts of the groups that `groups` is going to yield, and how many of the first of these
        the link has had time for."""
        held = [experts for of, experts in self._held.values() if of == layer]
        wanted, per_group = self._wanted.get(layer, []), self.link.per_group
        later = [wanted[start : start + per_group] for start in range(0, len(wanted), per_group)]
        done = bisect_right([count * self.costs.copy for count in accumulate(map(len, held))], self.lead)
        first, others = (
            [experts for experts in groups if self.pairs[experts].any()]
            for groups in (held[:done], held[done:] + later)
        )
        return first + others, len(first)

    def groups(self, layer: int, most: int = sys.maxsize) -> Iterator[tuple[int, list[int]]]:
        """The layer's next groups with used experts, `most` of them, and the experts in their blocks, each as soon as
        the device may be given work that reads it. It is released when the next one is asked for."""
        while most and (group := next((g for g, held in self._held.items() if held.layer == layer), None)) is not None:
            experts = self._held[group].experts
            if self.pairs[experts].any():
                self.link.ready(group)
                yield group, experts
                self.link.release(group)
                most -= 1
            self._free(group)
            self._copy()

    def banks(
        self, layer: int, first: int, residents: Iterable[Bank], bank_of: Callable[[int, list[int]], Bank]
    ) -> Iterator[Bank]:
        """The layer's banks in the order of its rows: those of the `first` groups, as `order` has it, the residents'
        and those of the other groups. Asking for the next one releases the last group."""
        for group, experts in self.groups(layer, first):
            yield bank_of(group, experts)
        yield from residents
        for group, experts in self.groups(layer):
            yield bank_of(group, experts)

    def end(self) -> None:
        """To be called after a step, also after one that failed: no copy outlives it."""
        if self._held:
            self.link.drain()
        self._held.clear()
        self._wanted.clear()

    def _free(self, group: int) -> None:
        del self._held[group]
        self._empty.append(group)

    def _copy(self) -> None:
        """Begins copies into free groups, in the order of layers. Layers after the next one get whole groups, and not
        the last free one unless the next one has some: it would find none."""
        for layer in sorted(self._wanted):
            wanted, later = self._wanted[layer], layer > self._planned + 1
            least = self.link.per_group if later else 1
            kept = int(later and all(held.layer != self._planned + 1 for held in self._held.values()))
            while len(wanted) >= least and len(self._empty) > kept:
                group, experts = self._empty.pop(0), wanted[: self.link.per_group]
                self._wanted[layer] = wanted = wanted[self.link.per_group :]
                self._held[group] = Held(layer, experts)
                self.copied[layer] += len(experts)
                self.link.begin(group, layer, experts)


class LeadTimer:
    """Measures the time from the end of a layer's experts to the beginning of the next one's, by events of a device,
    which `event` makes; they have `record` and `elapsed_time`, as torch's."""

    def __init__(self, event: Callable[[], Any]):
        self._before, self._after, self._sorted = (event() for _ in range(3))
        self._timed = (
            False  # whether `_before`, the end of a layer, and `_sorted`, the next one's rows, are of this step
        )

    def begin(self) -> None:
        """To be called before a long step."""
        self._after.record()
        self._timed = False

    def lead(self, last: float) -> float:
        """The milliseconds before the layer before this one, whose ids the host has; `last` if there is none."""
        return float(self._before.elapsed_time(self._sorted)) if self._timed else last

    def sorted(self) -> None:
        """The device has been given all before a layer's experts."""
        self._sorted.record()
        self._before, self._after, self._timed = self._after, self._before, True

    def end(self) -> None:
        """The device has been given all of a layer's experts."""
        self._after.record()

"""Which experts stay on the device: learns from routing counts, proposes swaps, judges its own proposals.

Between two replays, after every interval of one or more steps, the caller does

    residency.observe(counts)                         # (layers, experts): the routing of the interval
    for swap in residency.swaps(resident, free): ...  # at most max_swaps copies

Slots are one pool over all layers. An expert is worth what it will save, in misses, over the next `horizon`
intervals: forecast.next for the first and forecast.lasting for the others. A swap's gain is the worth of the one that
comes less that of the one that goes. It is done if its gain, as far as gains are to be trusted, exceeds `swap_cost`,
what a copy costs in misses. A swap that two experts of like worth would cause is never worth its cost: the hysteresis.
Where copies are dear the horizon is long and residents change as slowly as the traffic; where they are nearly free
(0.02) the horizon is one interval and experts are fetched ahead on the forecast of the very next step.

Own benefit. Routing counts tell what every expert was used for, resident or not; so a proposal can be judged whether it
was done or not. One batch of proposals at a time (those whose gain exceeds the cost) is kept on paper; `horizon`
intervals later its uses (of those that would have come, less those that would have gone) are added to what was seen,
and its gains to what was predicted. `trust` = (seen - 2 standard errors) / predicted, 0..1, the past decayed. It
starts at 0: no swap before proposals have proved right; it falls to 0 on traffic that nothing predicts, and rises again
without any copy when there is something to gain. Free slots are filled at any trust: an empty slot saves nothing.

Everything follows from the calls alone: the same calls give the same swaps.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cpu_offload.policy.forecast import Counts, Floats, Forecast

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]  # layer * experts + expert

PAYBACK = 24  # intervals in which a swap whose cost is one miss must have paid
ERRORS = 2  # standard errors that what was seen may owe to chance
JUDGED = 64  # batches of proposals: half-life of the trust


@dataclass(frozen=True)
class Settings:
    max_swaps: int = 32  # copies an interval, into free slots or others'
    swap_cost: float = 0.02  # of one copy, in misses that it must save

    def __post_init__(self) -> None:
        if self.max_swaps < 0 or self.swap_cost < 0:
            raise ValueError(f"{self}: neither may be negative")

    @property
    def horizon(self) -> int:
        """Intervals that a swap has to pay for itself."""
        return max(1, round(PAYBACK * self.swap_cost))


@dataclass(frozen=True)
class Swap:
    layer: int
    expert_in: int
    expert_out: tuple[int, int] | None  # (layer, expert) that gives its slot; None: a free slot


@dataclass(frozen=True)
class Proposals:
    """Swaps on paper."""

    due: int  # interval after which they are judged
    come: Indices
    go: Indices
    gains: Floats
    uses_before: npt.NDArray[np.int64]  # of those that come less those that go


class Residency:
    def __init__(self, layers: int, experts: int, settings: Settings = Settings()):
        self.experts, self.settings = experts, settings
        self.forecast = Forecast(layers, experts)
        self.trust = 0.0  # 0..1: how much of a predicted gain comes true
        self._uses = np.zeros(layers * experts, np.int64)
        self._paper: Proposals | None = None
        self._seen, self._predicted, self._variance = 0.0, 0.0, 0.0

    def observe(self, counts: Counts) -> None:
        """Routing of one interval, decode steps only. (layers, experts)"""
        self.forecast.learn(counts)
        self._uses += counts.reshape(-1)
        if self._paper and self.forecast.intervals >= self._paper.due:
            self._judge(self._paper)
            self._paper = None

    def swaps(self, resident: Bools, free_slots: int) -> list[Swap]:
        """What to copy before the next interval; `resident` (layers, experts) as it will be after copies under way.

        Experts for free slots come first, the most valuable before others, then swaps, best gain first.
        """
        worth, here = self._worth(), resident.reshape(-1)
        inside, outside = np.flatnonzero(here), np.flatnonzero(~here)
        if not free_slots:
            inside, outside = self._worth_swapping(worth, inside, outside)
            if not len(inside):
                return []
        come = highest(worth, outside, self.settings.max_swaps)
        filling = come[:free_slots][worth[come[:free_slots]] > 0]
        come = come[free_slots:]
        go = highest(-worth, inside, len(come))
        come = come[: len(go)]
        gains = worth[come] - worth[go]
        if self._paper is None:
            self._propose(come, go, gains)
        done = self.trust * gains > self.settings.swap_cost
        pairs = zip(come[done].tolist(), go[done].tolist(), strict=True)
        free = [Swap(*self._place(i), None) for i in filling.tolist()]
        return free + [Swap(*self._place(i), self._place(o)) for i, o in pairs]

    def coldest(self, resident: Bools, n: int) -> list[tuple[int, int]]:
        """(layer, expert) of the n residents worth least, the least first: who leaves when memory is needed."""
        return [self._place(i) for i in highest(-self._worth(), np.flatnonzero(resident), n).tolist()]

    def _worth(self) -> Floats:
        """Misses that each expert saves over the horizon. (layers * experts)"""
        return self.forecast.next + (self.settings.horizon - 1) * self.forecast.lasting

    def _worth_swapping(self, worth: Floats, inside: Indices, outside: Indices) -> tuple[Indices, Indices]:
        """Of those, who could be part of a swap that is done or kept on paper: a few of many, or nobody."""
        if not len(inside) or not len(outside):
            return inside[:0], outside[:0]
        ours, others, cost = worth[inside], worth[outside], self.settings.swap_cost
        least, most = ours.min(), others.max()
        if self._paper and self.trust * (most - least) <= cost:
            return inside[:0], outside[:0]
        return inside[most - ours > cost], outside[others - least > cost]

    def _propose(self, come: Indices, go: Indices, gains: Floats) -> None:
        kept = gains > self.settings.swap_cost
        if kept.any():
            come, go, due = come[kept], go[kept], self.forecast.intervals + self.settings.horizon
            self._paper = Proposals(due, come, go, gains[kept], self._uses[come] - self._uses[go])

    def _judge(self, paper: Proposals) -> None:
        seen = self._uses[paper.come] - self._uses[paper.go] - paper.uses_before
        decay = 0.5 ** (1 / JUDGED)
        self._seen = decay * self._seen + float(seen.sum())
        self._predicted = decay * self._predicted + float(paper.gains.sum())
        self._variance = decay * self._variance + float(np.square(seen).sum())
        self.trust = min(max((self._seen - ERRORS * self._variance**0.5) / self._predicted, 0.0), 1.0)

    def _place(self, index: int) -> tuple[int, int]:
        layer, expert = divmod(index, self.experts)
        return layer, expert


def highest(worth: Floats, among: Indices, n: int) -> Indices:
    """The n of `among` that are worth most, the best first."""
    if n < len(among):
        among = among[np.argpartition(-worth[among], n)[:n]]
    return among[np.argsort(-worth[among], kind="stable")]

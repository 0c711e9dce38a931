"""Decides which experts are resident: forecasts uses from routing counts, proposes swaps, and judges its proposals.

Between two steps, after every interval of one or more steps, the caller runs

    residency.observe(counts)                         # (layers, experts): the routing of the interval
    for swap in residency.swaps(resident, free): ...  # at most max_swaps copies

All layers share one pool of slots. An expert's worth is the number of misses it is forecast to save over the next
`horizon` intervals: `forecast.next` for the first and `forecast.lasting` for each of the others. A swap's gain is the
worth of the expert that comes minus that of the expert that goes. A swap is done if its gain times `trust` exceeds
`swap_cost`, the cost of a copy in misses. This is also the hysteresis: two experts of similar worth are never swapped.
If copies are expensive the horizon is long and residents change as slowly as the traffic. If they are nearly free
(0.02) it is one interval, and experts are fetched ahead by the forecast of the next step alone.

Trust. Routing counts have the use of every expert, resident or not, so a proposal can be judged whether it was done or
not. One batch of proposals at a time, those whose gain exceeds the cost, is kept on paper. After `horizon` intervals,
the uses of the experts that would have come, minus those of the experts that would have gone, are added to `seen`, and
the gains to `predicted`; `trust` = (seen - 2 standard errors) / predicted, within 0..1, with the past decayed. It
starts at 0, so nothing is swapped before proposals have proved right; it falls to 0 on traffic that cannot be
predicted, and rises again without any copy once there is something to gain. Free slots are filled whatever the trust:
an empty slot saves nothing.

The result depends on the calls alone: the same calls give the same swaps.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cpu_offload.policy.forecast import Counts, Floats, Forecast

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]  # layer * experts + expert

PAYBACK = 24  # intervals in which a swap that costs one miss must have saved it
ERRORS = 2  # standard errors that are subtracted from what was seen, since that may be chance
JUDGED = 64  # batches of proposals: half-life of what `trust` is computed from


@dataclass(frozen=True)
class ResidencySettings:
    max_swaps: int = 32  # most copies at one decision, including those into free slots
    swap_cost: float = 0.02  # what one copy costs, in misses that it must save

    def __post_init__(self) -> None:
        if self.max_swaps < 0 or self.swap_cost < 0:
            raise ValueError(f"{self}: neither may be negative")

    @property
    def horizon(self) -> int:
        """Intervals in which a swap has to save what it costs."""
        return max(1, round(PAYBACK * self.swap_cost))


@dataclass(frozen=True)
class Swap:
    layer: int
    expert_in: int
    expert_out: tuple[int, int] | None  # (layer, expert) to evict for it; None: it takes a free slot


@dataclass(frozen=True)
class Proposals:
    """Swaps that are recorded, whether they were done or not, and judged later."""

    due: int  # the interval after which they are judged
    come: Indices
    go: Indices
    gains: Floats
    uses_before: npt.NDArray[np.int64]  # uses so far of each expert that comes, minus those of the one that goes


class Residency:
    def __init__(self, layers: int, experts: int, settings: ResidencySettings = ResidencySettings()):
        self.experts, self.settings = experts, settings
        self.forecast = Forecast(layers, experts)
        self.trust = 0.0  # 0..1: the part of a predicted gain to count on
        self._uses = np.zeros(layers * experts, np.int64)
        self._paper: Proposals | None = None
        self._seen, self._predicted, self._variance = 0.0, 0.0, 0.0

    def observe(self, counts: Counts) -> None:
        """Learns from the routing counts of an interval of decode steps. (layers, experts)"""
        self.forecast.learn(counts)
        self._uses += counts.reshape(-1)
        if self._paper and self.forecast.intervals >= self._paper.due:
            self._judge(self._paper)
            self._paper = None

    def swaps(self, resident: Bools, free_slots: int) -> list[Swap]:
        """The copies to begin before the next interval. `resident` (layers, experts) counts copies in flight as done.

        Experts for free slots come first, in order of worth, then swaps, in order of gain.
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
        """(layer, expert) of the n resident experts of least worth, in order of worth: to be evicted for memory."""
        return [self._place(i) for i in highest(-self._worth(), np.flatnonzero(resident), n).tolist()]

    def _worth(self) -> Floats:
        """Number of misses that each expert would save over the horizon. (layers * experts)"""
        return self.forecast.next + (self.settings.horizon - 1) * self.forecast.lasting

    def _worth_swapping(self, worth: Floats, inside: Indices, outside: Indices) -> tuple[Indices, Indices]:
        """The experts of `inside` and `outside` that can be part of a swap that is done or recorded; they are few."""
        if not len(inside) or not len(outside):
            return inside[:0], outside[:0]
        kept, others, cost = worth[inside], worth[outside], self.settings.swap_cost
        least, most = kept.min(), others.max()
        if self._paper and self.trust * (most - least) <= cost:
            return inside[:0], outside[:0]
        return inside[most - kept > cost], outside[others - least > cost]

    def _propose(self, come: Indices, go: Indices, gains: Floats) -> None:
        """Records the swaps whose gain exceeds the cost, to judge them after the horizon."""
        kept = gains > self.settings.swap_cost
        if kept.any():
            come, go, due = come[kept], go[kept], self.forecast.intervals + self.settings.horizon
            self._paper = Proposals(due, come, go, gains[kept], self._uses[come] - self._uses[go])

    def _judge(self, paper: Proposals) -> None:
        """Updates `trust` by what the recorded swaps would have saved."""
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
    """The n indices in `among` with the highest worth, the highest first."""
    if n < len(among):
        among = among[np.argpartition(-worth[among], n)[:n]]
    return among[np.argsort(-worth[among], kind="stable")]

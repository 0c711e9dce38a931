"""Decides which experts are resident: forecasts uses from routing counts, proposes swaps, and judges its proposals.

Between two steps, after every interval of one or more steps, the caller runs

    residency.observe(counts, tokens)                 # (layers, experts): the routing of the interval
    residency.observe_long(routed, lengths, tokens)   # in its place after a step with prompts
    for swap in residency.swaps(resident, free, under_way): ...  # copies in this order

All layers share one pool of slots. An expert's worth is the number of misses it is forecast to save over `horizon`
intervals, beginning with the next, for whose layers most copies that begin now are in time. A swap's gain is the worth
of the expert that comes minus that of the expert that goes. A swap is done if its gain times `trust` exceeds
`swap_cost`, the cost of a copy in misses. This is also the hysteresis: two experts of similar worth are never swapped.
If copies are expensive the horizon is long and residents change as slowly as the traffic. If they are nearly free
(0.02) it is one interval.

Trust. Routing counts have the use of every expert, resident or not, so a proposal can be judged whether it was done or
not. One batch of proposals at a time, those whose gain exceeds the cost, is kept on paper. After `horizon` intervals,
the uses of the experts that would have come, minus those of the experts that would have gone, are added to `seen`, and
the gains to `predicted`; `trust` = (seen - its standard error) / predicted, within 0..1, with the past decayed. It
starts at 1, for as little as `BELIEVED` misses; it falls to 0 on traffic that cannot be predicted, and rises again
without any copy once there is something to gain. Free slots are filled whatever the trust: an empty slot saves nothing.

The result depends on the calls alone: the same calls give the same swaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from umbra.cpu_offload.policy.forecast import Counts, Floats, Forecast

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]  # layer * experts + expert

PAYBACK = 24  # intervals in which a swap that costs one miss must have saved it
BELIEVED = 16.0  # misses that proposals are believed to have saved at the start
JUDGED = 64  # batches of proposals: half-life of what `trust` is computed from
# Copies are made in the order of layers, but those of the first 1 / LAST of the layers, whose turn is over soonest, are
# the last ones: so the others are in time even if all together take a whole step.
LAST = 8


@dataclass(frozen=True)
class ResidencySettings:
    max_swaps: int = 32  # most copies under way after a decision, including those into free slots
    swap_cost: float = 0.02  # what one copy costs, in misses that it must save
    interval: int = 1  # decode steps between two decisions

    def __post_init__(self) -> None:
        if self.max_swaps < 0 or self.swap_cost < 0:
            raise ValueError(f"{self}: none may be negative")

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

    decoded: int  # intervals before
    come: Indices
    go: Indices
    gains: Floats
    uses: npt.NDArray[np.int64]  # until now: of each expert that comes, minus those of the one that goes


class ResidencyPolicy:
    def __init__(self, layers: int, experts: int, settings: ResidencySettings = ResidencySettings()):
        self.experts, self.settings = experts, settings
        self.forecast = Forecast(layers, experts)
        self.trust = 1.0  # 0..1: the part of a predicted gain to count on
        self._uses = np.zeros(layers * experts, np.int64)
        self._paper: Proposals | None = None
        self._seen, self._predicted, self._variance = BELIEVED, BELIEVED, 0.0

    def observe(self, counts: Counts, tokens: Sequence[int] = ()) -> None:
        """Learns from the routing counts of an interval of decode steps (layers, experts). `tokens` are those that the
        sequences take next."""
        self.forecast.learn(counts, tokens)
        self._uses += counts.reshape(-1)
        if (paper := self._paper) and self.forecast.decoded >= paper.decoded + self.settings.horizon:
            self._judge(paper)
            self._paper = None

    def observe_long(
        self, routed: Sequence[Indices | None], lengths: Sequence[int], tokens: Sequence[int] = ()
    ) -> None:
        """Learns from the routing of a step with prompts, as of `Forecast.learn_long`."""
        self.forecast.learn_long(routed, lengths, self.settings.interval, tokens)

    def swaps(self, resident: Bools, free_slots: int, under_way: int = 0) -> list[Swap]:
        """The copies to begin before the next interval, in the order in which they are to be made. `resident` (layers,
        experts) counts copies in flight as done; `under_way` is their number.

        Experts for free slots are chosen first, in order of worth, then swaps, in order of gain.
        """
        most = self.settings.max_swaps - under_way
        if most <= 0:
            return []
        worth, here = self._worth(), resident.reshape(-1)
        inside, outside = np.flatnonzero(here), np.flatnonzero(~here)
        if not free_slots:
            inside, outside = self._worth_swapping(worth, inside, outside)
            if not len(inside):
                return []
        come = highest(worth, outside, most)
        filling = come[:free_slots][worth[come[:free_slots]] > 0]
        come = come[free_slots:]
        go = highest(-worth, inside, len(come))
        come = come[: len(go)]
        gains = worth[come] - worth[go]
        if self._paper is None:
            self._propose(come, go, gains)
        done = self.trust * gains > self.settings.swap_cost
        pairs = zip(come[done].tolist(), go[done].tolist(), strict=True)
        chosen = [Swap(*self._place(i), None) for i in filling.tolist()]
        chosen += [Swap(*self._place(i), self._place(o)) for i, o in pairs]
        layers = len(resident)
        return sorted(chosen, key=lambda swap: (swap.layer - layers // LAST) % layers)

    def coldest(self, resident: Bools, n: int) -> list[tuple[int, int]]:
        """(layer, expert) of the n resident experts of least worth, in order of worth: to be evicted for memory."""
        return [self._place(i) for i in highest(-self._worth(), np.flatnonzero(resident), n).tolist()]

    def _worth(self) -> Floats:
        """Number of misses that each expert would save over the horizon. (layers * experts)"""
        return self.forecast.coming + (self.settings.horizon - 1) * self.forecast.lasting

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
            come, go = come[kept], go[kept]
            self._paper = Proposals(self.forecast.decoded, come, go, gains[kept], self._uses[come] - self._uses[go])

    def _judge(self, paper: Proposals) -> None:
        """Updates `trust` by what the recorded swaps would have saved."""
        seen = self._uses[paper.come] - self._uses[paper.go] - paper.uses
        decay = 0.5 ** (1 / JUDGED)
        self._seen = decay * self._seen + float(seen.sum())
        self._predicted = decay * self._predicted + float(paper.gains.sum())
        self._variance = decay * self._variance + float(np.square(seen).sum())
        self.trust = min(max((self._seen - self._variance**0.5) / self._predicted, 0.0), 1.0)

    def _place(self, index: int) -> tuple[int, int]:
        layer, expert = divmod(index, self.experts)
        return layer, expert


def highest(worth: Floats, among: Indices, n: int) -> Indices:
    """The n indices in `among` with the highest worth, the highest first."""
    if n < len(among):
        among = among[np.argpartition(-worth[among], n)[:n]]
    return among[np.argsort(-worth[among], kind="stable")]

"""The time of a long step whose experts run through the ring: a run's own ring (`cpu_offload/expert_ring.py`) with a
clock in the place of a link, a device and a shadow pool.

The host waits for the device once a layer, for the routing; otherwise it only gives it work. So a copy may begin once
the link is free, the host has asked for it, and the device has computed what the group held before.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cpu_offload.costs import Costs
from cpu_offload.expert_ring import GROUPS, ExpertRing, Link, group_size


@dataclass
class Clock(Link):
    """Seconds at which each side has done all that it was given, and for how long it was busy."""

    each: int
    copy: float  # seconds of an expert
    count: int = GROUPS
    host: float = 0.0
    device: float = 0.0
    link: float = 0.0
    copied: float = 0.0  # seconds of copies

    def __post_init__(self) -> None:
        self.readied, self.released = [0.0] * self.count, [0.0] * self.count

    def begin(self, group: int, layer: int, experts: Sequence[int]) -> None:
        seconds = len(experts) * self.copy
        self.link = max(self.link, self.host, self.released[group]) + seconds
        self.readied[group] = self.link
        self.copied += seconds

    def ready(self, group: int) -> None:
        self.device = max(self.device, self.readied[group])

    def release(self, group: int) -> None:
        self.released[group] = self.device

    def drain(self) -> None:
        """Copies that nobody waits for delay nobody."""


@dataclass(frozen=True)
class Sides:
    """Seconds of a step, and those for which each side is busy."""

    total: float = 0.0
    link: float = 0.0
    device: float = 0.0
    host: float = 0.0

    @property
    def longest(self) -> str:
        return max(("device", "link", "host"), key=lambda side: float(getattr(self, side)))

    def __add__(self, other: "Sides") -> "Sides":
        return Sides(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def clocked(
    pairs: npt.NDArray[np.int64], here: npt.NDArray[np.bool_], costs: Costs, expert_bytes: int, other: float
) -> Sides:
    """A step with so many (token, expert) pairs (layers, experts). Experts that are `here` (layers, experts) are
    resident; `other` is the time of the device's work before the routing of a layer. `costs` are in seconds."""
    layers, experts = pairs.shape
    clock = Clock(group_size(expert_bytes, experts), costs.copy)
    ring = ExpertRing(clock, layers, experts, 1.0, costs)  # as if each pair were of another token
    ring.begin(int(pairs[0].sum()), here)
    device = host = 0.0
    for layer, counts in enumerate(pairs):
        clock.device += other
        clock.host = clock.device
        computed = ring.plan(layer, counts)
        shadow = costs.shadow.ms(len(computed), float(counts[computed].sum()), float(bool(computed)))
        present = np.flatnonzero((counts > 0) & here[layer])
        busy = costs.device.ms(len(present), float(counts[present].sum()), float(len(present) > 0))
        clock.device += busy
        for _, found in ring.groups(layer):
            used = [expert for expert in found if counts[expert]]
            seconds = costs.device.ms(len(used), float(counts[used].sum()))
            clock.device += seconds
            busy += seconds
        clock.device = max(clock.device, clock.host + shadow)
        device, host = device + busy + other, host + shadow
    ring.end()
    return Sides(clock.device, clock.copied, device, host)

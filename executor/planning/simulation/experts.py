"""Experts of a simulated rank: the real policy, arena and balance decide which are resident. Only the routing is made
up, and copies take the time that the hardware needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cpu_offload.device import Device, Place
from cpu_offload.experts import ShadowedExperts
from cpu_offload.history import LongLayer
from cpu_offload.manager import Offload, Settings
from cpu_offload.memory.arena import Arena
from executor.engine.pages import ElasticPages
from executor.engine.shadows import expert_frames
from ops.cpu.shadow import ShadowPool
from ops.format import Format

FORGET = 256  # steps whose history is kept
INTERVAL = 8  # decode steps between two decisions
MOST_SWAPS = 4  # copies at one decision


@dataclass(frozen=True)
class Sizes:
    """Of one rank's experts and of its memory for them and for pages."""

    layers: int
    experts: int  # of a layer, on this rank
    all_experts: int  # of a layer, on all ranks
    top_k: int
    slot_bytes: int
    frame_bytes: int
    page_size: int
    arena_bytes: int
    copy_s: float  # seconds to copy one expert


def uses_of(choose: np.random.Generator, skew: float, layers: int, experts: int) -> NDArray[np.float64]:
    """Made-up shares of the experts in the pairs of their layer. (layers, experts)"""
    uses = np.exp(choose.normal(0, skew, (layers, experts)))
    return np.asarray(uses / uses.sum(axis=1, keepdims=True))


class Clock:
    now = 0.0


class Copies(Device):
    """Copies experts one after another, in the simulation's time."""

    alignment = 1

    def __init__(self, clock: Clock, seconds: float):
        self.clock, self.seconds = clock, seconds
        self.ends: dict[int, float] = {}
        self.last = 0.0

    @property
    def staging_bytes(self) -> int:
        return 0

    def experts(
        self, pool: ShadowPool, number: int, here: slice, inner: int, hidden: int, format: Format
    ) -> ShadowedExperts:
        raise NotImplementedError("a simulated layer has no weights")

    def open(self, memory: Tensor, end: int, note: Callable[[LongLayer], None]) -> None:
        self.memory = memory

    def copy(self, place: Place, start: int) -> int:
        self.last = max(self.last, self.clock.now) + self.seconds
        self.ends[ticket := len(self.ends)] = self.last
        return ticket

    def done(self, ticket: int) -> bool:
        return self.ends[ticket] <= self.clock.now

    def wait(self, ticket: int) -> None:
        """A step does not begin while a copy into a slot that another takes over is under way: too short to count."""

    def publish(self, place: Place, start: int) -> None:
        """Tables have no simulated counterpart."""

    def withdraw(self, place: Place) -> None:
        """As above."""

    def begin(self, step: int, tokens: Sequence[int], live: Sequence[int]) -> None:
        """As above."""

    def finish(self) -> None:
        """As above."""


@dataclass
class SimulatedLayer:
    count: int
    slot_bytes: int
    counts: Tensor | None = None

    def share(self, counts: Tensor, times: Tensor) -> None:
        self.counts = counts


class Steps:
    """Stands for the shadow pool, of which a simulation only needs the count of steps."""

    def __init__(self) -> None:
        self.steps = 0

    def count_step(self) -> int:
        self.steps += 1
        return self.steps


class SimulatedExperts:
    def __init__(self, sizes: Sizes, slots: int | None, skew: float, seed: int):
        """`slots` is the number of resident experts; None: elastic. `skew`: the standard deviation of the logarithm of
        how often experts are used."""
        self.sizes, self.clock = sizes, Clock()
        mode = "elastic" if slots is None else "fixed"
        settings = Settings(mode, 0, slots or 0, INTERVAL, MOST_SWAPS)
        device = Copies(self.clock, sizes.copy_s)
        self.offload = Offload(settings, device, cast(ShadowPool, Steps()))
        layers = [SimulatedLayer(sizes.experts, sizes.slot_bytes) for _ in range(sizes.layers)]
        self.offload.layers = cast(list[ShadowedExperts], layers)
        pinned = 0 if slots is None else expert_frames(sizes.frame_bytes, sizes.slot_bytes, slots)
        arena = Arena(sizes.arena_bytes // sizes.frame_bytes, sizes.frame_bytes, sizes.slot_bytes, 1, 1)
        self.pages = ElasticPages(arena, sizes.page_size, pinned, self.offload.make_room, lambda old, new: None)
        self.offload.open(arena, torch.empty(0, dtype=torch.uint8), self.pages.gather)
        self.choose = np.random.default_rng([seed, 3])
        self.uses = uses_of(self.choose, skew, sizes.layers, sizes.experts)  # in the layer's pairs on this rank

    def begin(self, now: float) -> None:
        self.clock.now = now
        self.offload.begin()

    def route(self, tokens: int) -> float:
        """Routes a step's tokens, of all ranks. -> the share of the experts that they use here which is resident"""
        sizes, offload = self.sizes, self.offload
        pairs = tokens * sizes.top_k * sizes.experts / sizes.all_experts
        counts = self.choose.poisson(pairs * self.uses)
        offload.counts += counts
        offload.started([tokens], [tokens])
        used = counts > 0
        return float((used & offload.published).sum()) / max(int(used.sum()), 1)

    def end(self, decode: bool) -> None:
        self.offload.end(decode)
        if len(self.offload.history.steps) > FORGET:
            self.offload.forget()

    @property
    def resident(self) -> float:
        return float(self.offload.published.mean())

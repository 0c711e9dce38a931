"""Experts of a simulated rank: the real policy, arena and balance decide which are resident. Only the routing is made
up, and copies take the time that the hardware needs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbra.cpu_offload.device import ExpertId, ShadowDevice
from umbra.cpu_offload.experts import ShadowedExperts
from umbra.cpu_offload.history import LongLayer
from umbra.cpu_offload.manager import ShadowExperts, ShadowSettings
from umbra.cpu_offload.memory.arena import Arena, StateSizes
from umbra.executor.engine.memory.pages import ElasticPages
from umbra.executor.plan.arena_sizes import expert_frames
from umbra.ops.cpu.shadow import ShadowPool
from umbra.ops.formats import Format
from umbra.ops.interface import ExpertKind

INTERVAL = 32  # decode steps between two decisions; a server may decide after each, about as many copies in all
EXACT = 64  # larger numbers of tokens are rounded to so many steps for each power of two


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of one rank's experts and of its memory for them and for pages."""

    layers: int
    experts: int  # of a layer, on this rank
    all_experts: int  # of a layer, on all ranks
    top_k: int
    slot_bytes: int
    frame_bytes: int
    page_size: int
    arena_bytes: int
    copy_s: float  # seconds to copy one expert
    most_swaps: int  # copies at one decision
    units: int  # of a frame
    states: StateSizes  # of a sequence's recurrent states


def uses_of(choose: np.random.Generator, skew: float, layers: int, experts: int) -> NDArray[np.float64]:
    """Synthetic shares of the experts in the pairs of their layer. (layers, experts)"""
    uses = np.exp(choose.normal(0, skew, (layers, experts)))
    return np.asarray(uses / uses.sum(axis=1, keepdims=True))


class SimulatedClock:
    now = 0.0


class Copies(ShadowDevice):
    """Copies experts one after another, in the simulation's time."""

    alignment = 1

    def __init__(self, clock: SimulatedClock, seconds: float):
        self.clock, self.seconds = clock, seconds
        self.ends: deque[float] = deque()  # of copies that are under way, in order
        self.ended = 0  # number of copies that are done
        self.last = 0.0

    @property
    def staging_bytes(self) -> int:
        return 0

    def experts(
        self, pool: ShadowPool, number: int, here: slice, inner: int, hidden: int, format: Format, kind: ExpertKind
    ) -> ShadowedExperts:
        raise NotImplementedError("a simulated layer has no weights")

    def open(self, memory: Tensor, end: int, note: Callable[[LongLayer], None]) -> None:
        self.memory = memory

    def copy(self, id: ExpertId, start: int) -> int:
        self.last = max(self.last, self.clock.now) + self.seconds
        self.ends.append(self.last)
        return self.ended + len(self.ends) - 1

    def done(self, ticket: int) -> bool:
        while self.ends and self.ends[0] <= self.clock.now:
            self.ends.popleft()
            self.ended += 1
        return ticket < self.ended

    def wait(self, ticket: int) -> None:
        """A step does not begin while a copy into a slot that another takes over is under way: too short to count."""

    def publish(self, id: ExpertId, start: int) -> None:
        """Tables have no simulated counterpart."""

    def withdraw(self, id: ExpertId) -> None:
        """Tables have no simulated counterpart."""

    def begin(self, step: int, tokens: Sequence[int], live: Sequence[int]) -> None:
        """Tables have no simulated counterpart."""

    def finish(self) -> None:
        """Tables have no simulated counterpart."""


@dataclass
class SimulatedLayer:
    count: int
    slot_bytes: int

    def share(self, counts: Tensor, hits: Tensor, times: Tensor) -> None:
        """Only `SimulatedExperts` counts."""

    def take_long(self) -> None:
        """Residency learns from decode steps alone here: the routing of prompts is not simulated."""


class StepCounter:
    """Stands for the shadow pool, of which a simulation only needs the count of steps."""

    def __init__(self) -> None:
        self.steps = 0

    def count_step(self) -> int:
        self.steps += 1
        return self.steps


class SimulatedExperts:
    def __init__(self, sizes: ExpertSizes, slots: int | None, skew: float, seed: int):
        """`slots` is the number of resident experts; None: elastic. `skew`: the standard deviation of the logarithm of
        how often experts are used."""
        self.sizes, self.clock, self.elastic = sizes, SimulatedClock(), slots is None
        settings = ShadowSettings("elastic" if self.elastic else "fixed", 0, slots or 0, INTERVAL, sizes.most_swaps)
        device = Copies(self.clock, sizes.copy_s)
        self.shadows = ShadowExperts(settings, device, cast(ShadowPool, StepCounter()))
        layers = [SimulatedLayer(sizes.experts, sizes.slot_bytes) for _ in range(sizes.layers)]
        self.shadows.layers = cast(list[ShadowedExperts], layers)
        pinned = 0 if slots is None else expert_frames(sizes.frame_bytes, sizes.slot_bytes, slots, sizes.states)
        frames = sizes.arena_bytes // sizes.frame_bytes
        arena = Arena(frames, sizes.frame_bytes, sizes.slot_bytes, sizes.units, 1, sizes.states)
        self.pages = ElasticPages(arena, sizes.page_size, pinned, self.shadows.make_room, lambda old, new: None)
        self.shadows.open(arena, torch.empty(0, dtype=torch.uint8), self.pages.gather)
        self.choose = np.random.default_rng([seed, 3])
        self.uses = uses_of(self.choose, skew, sizes.layers, sizes.experts)  # in the layer's pairs on this rank
        self.pairs = sizes.top_k * sizes.experts / sizes.all_experts  # of a token and an expert here, in a layer
        self.routed = 0  # tokens of decode steps since the last decision
        self.chances = lru_cache(256)(self._chances)

    def begin(self, now: float) -> None:
        self.clock.now = now
        self.shadows.begin()

    def share(self, tokens: int) -> float:
        """The share of the experts that a step of `tokens` tokens, of all ranks, is expected to use here which is
        resident."""
        coarse = max(tokens.bit_length() - EXACT.bit_length(), 0)
        chances = self.chances(tokens >> coarse << coarse)
        return float(chances @ self.shadows.published.reshape(-1))

    def _chances(self, tokens: int) -> NDArray[np.float64]:
        """Returns the probability that each expert is used by a step of so many tokens, as a share of all these.
        (layers * experts)"""
        used = -np.expm1(-tokens * self.pairs * self.uses.reshape(-1))
        return np.asarray(used / used.sum())

    def alike(self) -> int:
        """Number of decode steps, the next one included, before anything is decided or done about experts, unless pages
        need their memory."""
        return 1 if self.shadows.copies else INTERVAL - self.shadows.step_number % INTERVAL

    def end(self, steps: int, tokens: int, exposed: float) -> None:
        """To be called after `steps` equal steps, more than one only as `alike` allows. `tokens`: those of each, on all
        ranks, of decode steps; 0: other steps. `exposed`: seconds of all of them in which the devices waited."""
        shadows = self.shadows
        for _ in range(steps - 1 if self.elastic else 0):  # whether memory has long been free is counted in steps
            shadows.balance.step()
        self.routed += steps * tokens
        shadows.step_number += steps - 1 if tokens else 0
        if tokens and (shadows.step_number + 1) % INTERVAL == 0:
            routed = self.choose.poisson(self.routed * self.pairs * self.uses)
            shadows.counts += routed
            shadows.hits[:, 0] += np.vecdot(routed, shadows.published)
            self.routed = 0
        shadows.times[:, 2] = 1
        shadows.times[:, 3] = 1 + round(exposed * 1e9 / self.sizes.layers)
        shadows.started([tokens], [[tokens]])
        shadows.end(tokens > 0)

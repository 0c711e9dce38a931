"""The manager of resident experts with a made-up device: what is copied, published, evicted, counted, and when."""

from typing import Any

import numpy as np
import torch

from cpu_offload.manager import Offload, Settings
from cpu_offload.memory.arena import Arena
from cpu_offload.policy.residency import Swap

LAYERS, EXPERTS, FRAME = 2, 4, 64
SLOT = 2 * FRAME  # one in two frames, without a loss


class Layer:
    """Of layers that share their size."""

    count, slot_bytes = EXPERTS, SLOT

    def share(self, counts: torch.Tensor, times: torch.Tensor) -> None:
        self.counts, self.times = counts, times


class Device:
    """Notes what it is told, as (what, id, ...); copies are done once their ticket is in `ready`."""

    def __init__(self) -> None:
        self.done_: list[Any] = []
        self.ready: set[int] = set()
        self.tickets = 0

    def experts(self, *given: Any) -> Any:
        self.done_.append(("experts", *given))
        return Layer()

    def open(self, memory: Any, end: int, note: Any) -> None:
        self.done_.append(("open", memory, end))
        self.note = note

    def copy(self, id: Any, start: int) -> int:
        self.tickets += 1
        self.done_.append(("copy", id, start))
        return self.tickets

    def done(self, ticket: int) -> bool:
        return ticket in self.ready

    def wait(self, ticket: int) -> None:
        self.done_.append(("wait", ticket))

    def publish(self, id: Any, start: int) -> None:
        self.done_.append(("publish", id, start))

    def withdraw(self, id: Any) -> None:
        self.done_.append(("withdraw", id))

    def begin(self, *given: Any) -> None:
        self.done_.append(("begin", *given))

    def finish(self) -> None:
        self.done_.append("finish")


class Policies:
    """A residency policy that says what the test wants."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.next: list[Swap] = []
        self.cold: list[Any] = []

    def observe(self, counts: np.ndarray) -> None:
        self.seen.append(counts.tolist())

    def swaps(self, here: np.ndarray, free: int) -> list[Swap]:
        self.seen.append((int(here.sum()), free))
        return self.next

    def coldest(self, here: np.ndarray, count: int) -> Any:
        self.seen.append((int(here.sum()), count))
        return self.cold


class Pool:
    """A shadow pool that only counts steps."""

    steps = 0

    def count_step(self) -> int:
        self.steps += 1
        return self.steps


def opened(
    mode: str = "fixed", slots: int = 3, frames: int = 40, interval: int = 2,
    max_swaps: int = 5, layers: int = LAYERS,
) -> Any:  # fmt: skip
    given: Any = ShadowSettings(mode, 1, slots, interval, max_swaps), Device(), Pool()
    made: Any = ShadowExperts(*given)
    made.layers = [Layer() for _ in range(layers)]
    made.open(Arena(frames, FRAME, SLOT, 4), "memory", "gather")
    made.residency = Policies()
    return made


def told(shadows: Any) -> list[Any]:
    """What the device was told since the last call."""
    found = [*shadows.device.done_]
    shadows.device.done_.clear()
    return found


def decoded(shadows: Any, counts: list[list[int]] | None = None) -> Any:
    """Runs a decode step with this routing; -> its record."""
    shadows.begin()
    shadows.started((2,), (1,))
    if counts:
        shadows.counts += np.array(counts)
    shadows.end(True)
    return shadows.history.steps[-1]


def test_a_decode_step_is_recorded() -> None:
    shadows = opened()  # (0, 0), (0, 1) and (1, 0) are resident
    shadows.begin()
    shadows.counts += 5  # of a prefill
    shadows.end(False)
    shadows.layers[1].times += torch.tensor([1, 2, 3, 4])
    page = shadows.arena.take_page()
    step = decoded(shadows, [[4, 3, 2, 1], [1, 0, 0, 7]])
    assert step.hits.tolist() == [7, 1]
    assert step.misses.tolist() == [3, 7]
    assert step.times.tolist() == [[0] * 4, [1, 2, 3, 4]]
    assert step.resident.tolist() == shadows.published.tolist()
    assert (step.experts, step.kv_frames, step.expert_frames, step.free_frames) == (4, 1, 6, 33)
    assert step.end > step.start
    shadows.layers[1].times += 1
    assert step.times[1].tolist() == [1, 2, 3, 4]
    shadows.arena.give_page(page)
    assert decoded(shadows, [[1, 0, 0, 0], [0, 0, 0, 0]]).kv_frames == 0
    assert shadows.history.routed.tolist() == [[5, 3, 2, 1], [1, 0, 0, 7]]
    assert (len(shadows.history.steps), shadows.step_number) == (2, 2)
    shadows.forget()
    assert (shadows.history.steps, shadows.history.frames, int(shadows.history.routed.sum())) == ([], 40, 0)


def test_the_policy_is_asked_after_each_interval() -> None:
    shadows = opened(slots=3)
    shadows.evict((0, 1))
    for counts in ([[1, 0, 0, 0], [0] * 4], [[1, 2, 0, 0], [0] * 4], [[0, 0, 3, 0], [0] * 4], None):
        decoded(shadows, counts)
    assert shadows.residency.seen == [
        [[2, 2, 0, 0], [0] * 4], (2, 1), [[0, 0, 3, 0], [0] * 4], (2, 1),
    ]  # fmt: skip
    resident = opened("resident", interval=1)
    decoded(resident)
    assert resident.residency.seen == []


def test_swaps_evict_and_then_fetch() -> None:
    shadows = opened(interval=1)
    told(shadows)
    gone = shadows.slots[0, 1]
    shadows.residency.next = [
        Swap(0, 3, (1, 3)),  # who has no slot cannot leave
        Swap(1, 2, (0, 1)),
        Swap(0, 2, None),
    ]
    decoded(shadows)
    last = shadows.slots[0, 2]
    assert last not in (shadows.slots[0, 0], shadows.slots[1, 0], gone)
    assert shadows.slots[1, 2] == gone
    assert told(shadows) == [
        ("begin", 1, (2,), (1,)), "finish", ("withdraw", (0, 1)), ("copy", (1, 2), shadows.arena.slot_offset(gone)),
        ("copy", (0, 2), shadows.arena.slot_offset(last)),
    ]  # fmt: skip
    assert shadows.history.evicted == [0]
    assert shadows.in_slot.tolist() == [[True, False, True, False], [True, False, True, False]]
    assert shadows.published.tolist() == [[True, False, False, False], [True, False, False, False]]
    assert list(shadows.copies) == [(1, 2), (0, 2)]
    shadows.residency.next = []
    shadows.device.ready = {5}  # the second copy
    decoded(shadows)
    assert ("publish", (0, 2), shadows.arena.slot_offset(last)) in told(shadows)
    assert list(shadows.copies) == [(1, 2)]
    assert shadows.published[0, 2]
    assert not shadows.published[1, 2]
    [(start, end, layer, expert)] = shadows.history.copies
    assert (layer, expert) == (0, 2)
    assert start < end
    offload.evict((1, 2))  # its copy is in flight
    assert told(offload) == [("wait", 4), ("withdraw", (1, 2))]
    assert (offload.copies, (1, 2) in offload.slots, offload.here[1, 2]) == ({}, False, False)
    assert offload.arena.slot_frames == 6
    assert offload.history.evicted == [0, 1]

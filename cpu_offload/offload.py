"""Runs the experts of all layers that have shadows: who is resident, copies between steps, memory for the KV cache.

    begin() --- the step's ops read tables --- end()         one thread; tables change only outside of these two

An expert comes in two halves: at the end of a step its slot is taken and a copy begun, which runs beside the next
steps; at the beginning of the first step after the copy is done its address is written into the device's table. It
leaves in one: its address becomes 0, and from then on nobody reads the slot, since no op runs. So a slot that is in use
is never written, and no step sees half of an expert. Captured steps read tables at fixed addresses and stay captured.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from cpu_offload.arena import Arena
from cpu_offload.balance import Balance
from cpu_offload.device import Device, Place
from cpu_offload.experts import ShadowedExperts
from cpu_offload.history import History, Step
from cpu_offload.residency import Residency
from cpu_offload.residency import Settings as Policy
from errors import UserError
from ops.cpu.engine import shadow_teams
from ops.cpu.shadow import ShadowPool
from ops.interface import Format

PATIENCE = 8  # steps with much free memory before experts return
AHEAD = 32  # one frame in so many is kept free for the KV cache
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    mode: str  # resident, fixed, elastic
    start_layer: int
    slots: int  # fixed: how many
    shadow_threads: int
    interval: int
    max_swaps: int
    timeout_s: int


def the_one(sizes: set[T], start_layer: int) -> T:
    """Slots are interchangeable, so all layers with shadows have experts of one size."""
    if len(sizes) != 1:
        raise UserError(f"offload_config.start_layer: {start_layer}: no layers with experts of one size")
    return next(iter(sizes))


def layer_number(path: str) -> int:
    """Of the layer that a module is in."""
    return int(re.findall(r"\.(\d+)\.", path)[0])


@dataclass(frozen=True)
class Copy:
    place: Place
    slot: int
    ticket: int
    start: int


class Offload:
    def __init__(self, settings: Settings, device: Device):
        self.settings, self.device = settings, device
        self.layers: list[ShadowedExperts] = []
        self.pool = ShadowPool(shadow_teams(settings.shadow_threads), settings.timeout_s)
        self.history = History()

    def experts(self, path: str, here: slice, inner: int, hidden: int, format: Format) -> ShadowedExperts | None:
        """`here` of all of the layer that `path` is in; None: they stay on the device for good."""
        number = layer_number(path)
        if number < self.settings.start_layer:
            return None
        self.layers.append(self.device.experts(self.pool, number, here, inner, hidden, format))
        return self.layers[-1]

    @property
    def slot_bytes(self) -> int:
        return the_one({layer.slot_bytes for layer in self.layers}, self.settings.start_layer)

    @property
    def most_slots(self) -> int:
        """Experts that may be resident at once."""
        return self.settings.slots if self.settings.mode == "fixed" else sum(layer.count for layer in self.layers)

    def open(self, arena: Arena, memory: Tensor) -> None:
        """The shadow store is filled; `memory` (bytes) is the arena's buffer."""
        self.arena = arena
        self.device.open(memory, arena.frames * arena.frame_bytes, lambda layer: self.history.long.append(layer))
        counts = self.layers[0].count
        self.residency = Residency(len(self.layers), counts, Policy(max_swaps=self.settings.max_swaps))
        low = max(1, arena.frames // AHEAD)
        high = low + arena.extent_frames
        self.balance = Balance(arena, low, high, PATIENCE, self.make_room)
        self.slots: dict[Place, int] = {}  # of residents and of those whose copy is under way
        self.copies: list[Copy] = []
        self.seen = self._counts()
        self.step_number = 0
        self.history.frames = arena.frames
        self._place_first()

    def begin(self) -> None:
        """Before a step's pages are taken: publishes experts whose copies are done, keeps frames ahead of demand."""
        self.pool.step += 1
        if self.settings.mode == "elastic":
            self.balance.step()
        for copy in [copy for copy in self.copies if self.device.done(copy.ticket)]:
            self._publish(copy)

    def started(self, tokens: Sequence[int], live: Sequence[int]) -> None:
        """The step's ops run from here on, for so many tokens of each data-parallel group, `live` ones and padding."""
        self.device.begin(int(self.pool.step), tokens, live)
        self.started_at = time.monotonic_ns()
        self.during = self.resident(published=True)

    def end(self, decode: bool) -> None:
        """After a step: records it, and at every `interval`-th decode step decides who comes and goes."""
        self.device.finish()
        counts = self._counts()
        seen, self.seen = counts - self.seen, counts
        if not decode:
            return
        self._record(seen)
        self.step_number += 1
        self.residency.observe(seen)
        if self.step_number % self.settings.interval or self.settings.mode == "resident":
            return
        for swap in self.residency.swaps(self.resident(), self._free_slots()):
            if swap.expert_out is not None:
                if swap.expert_out not in self.slots:
                    continue
                self.evict(swap.expert_out)
            self._fetch((swap.layer, swap.expert_in))

    def make_room(self, frames: int) -> None:
        """The coldest experts leave until so many frames more are free, or nobody is left."""
        coldest = [self.slots[place] for place in self.residency.coldest(self.resident(), len(self.slots))]
        owner = {slot: place for place, slot in self.slots.items()}
        for slot in self.arena.leaving(coldest, frames):
            self.evict(owner[slot])
            self.history.for_cache += 1

    def evict(self, place: Place) -> None:
        for copy in [copy for copy in self.copies if copy.place == place]:
            self.device.wait(copy.ticket)  # somebody else will write there
            self.copies.remove(copy)
        self.device.withdraw(place)
        self.arena.give_slot(self.slots.pop(place))
        self.history.evictions += 1

    def resident(self, published: bool = False) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """(layers, experts); `published`: without those whose copies are under way."""
        here = np.zeros((len(self.layers), self.layers[0].count), np.bool_)
        if self.slots:
            here[tuple(zip(*self.slots, strict=True))] = True
        for copy in self.copies if published else ():
            here[copy.place] = False
        return here

    def value_copies(self, swap_cost: float, max_swaps: int) -> None:
        """What one costs, in misses that it must save; how many may be made at one decision."""
        self.residency.settings = Policy(max_swaps=max_swaps, swap_cost=swap_cost)

    def forget(self) -> None:
        """What was recorded so far, such as a warm-up; what was learned stays."""
        self.history = History(frames=self.arena.frames)

    def _free_slots(self) -> int:
        """That may be filled now."""
        if self.settings.mode == "elastic":
            return self.balance.room()
        return self.most_slots - len(self.slots)

    def _place_first(self) -> None:
        """Before anything is known of the traffic: the first experts of each layer, as many as there is room for."""
        spared = self.balance.high if self.settings.mode == "elastic" else 0
        for expert in range(self.layers[0].count):
            for layer in range(len(self.layers)):
                full = self.arena.free_frames - self.arena.extent_frames < spared and not self.arena.free_slots
                if len(self.slots) == self.most_slots or full:
                    return
                if (slot := self.arena.take_slot()) is None:
                    return
                self.slots[layer, expert] = slot
                start = self.arena.slot_offset(slot)
                self.device.wait(self.device.copy((layer, expert), start))
                self.device.publish((layer, expert), start)

    def _fetch(self, place: Place) -> None:
        slot = self.arena.take_slot()
        if slot is None:
            return
        self.slots[place] = slot
        ticket = self.device.copy(place, self.arena.slot_offset(slot))
        self.copies.append(Copy(place, slot, ticket, time.monotonic_ns()))

    def _publish(self, copy: Copy) -> None:
        self.device.publish(copy.place, self.arena.slot_offset(copy.slot))
        self.copies.remove(copy)
        self.history.copies.append((copy.start, time.monotonic_ns(), *copy.place))

    def _counts(self) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        return torch.stack([layer.layer.counts for layer in self.layers]).numpy()

    def _record(self, seen: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> None:
        free, experts = self.arena.free_frames, self.arena.slot_frames
        self.history.steps.append(
            Step(
                start=self.started_at,
                end=time.monotonic_ns(),
                hits=(seen * self.during).sum(1),
                misses=(seen * ~self.during).sum(1),
                times=torch.stack([layer.layer.times for layer in self.layers]).numpy(),
                resident=self.during,
                kv_frames=self.arena.frames - free - experts,
                expert_frames=experts,
                free_frames=free,
            )
        )

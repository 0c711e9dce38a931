"""Manages the experts of all layers with shadows: it decides which are resident, copies them, and makes room for the KV
cache.

    begin() --- the step's ops read the tables --- end()     one thread calls both

An expert becomes resident in two halves. At the end of a step it is given a slot, and a copy begins that runs
concurrently with the next steps. Once the copy is complete the address of its slot enters the device's table: at the
turn of its layer, where the device decides which side computes which expert, even within a step (on the CPU, see
csrc/shadow/copier.h), and at the latest at the beginning of the next step. An eviction is a single action: after the
copy, if it is in flight, the address becomes 0 while no op runs, so no later op reads the slot. So a slot in use is
never written, and no step sees half of an expert. Captured steps read the tables at fixed addresses and stay valid."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.cpu_offload.device import ExpertId, ShadowDevice
from umbra.cpu_offload.experts import ShadowedExperts
from umbra.cpu_offload.history import Counts, History, StepRecord
from umbra.cpu_offload.memory.arena import Arena
from umbra.cpu_offload.memory.balance import Balance
from umbra.cpu_offload.policy.residency import ResidencyPolicy, ResidencySettings
from umbra.ops.cpu.shadow import ShadowPool
from umbra.ops.formats import Format
from umbra.ops.interface import ExpertKind

PATIENCE = 8  # consecutive steps with much free memory before experts return
LEAST = 0.6  # of a slot that an expert takes, such as one of q4_k beside one with downs of q6_k
LOW = 1  # frames kept free; few are enough, since an eviction is only a write to a table
T = TypeVar("T")


@dataclass(frozen=True)
class ShadowSettings:
    mode: str  # resident, fixed or elastic
    start_layer: int  # the first layer with shadows
    slots: int  # number of resident experts in mode fixed
    interval: int  # decode steps between two decisions
    max_swaps: int  # most copies at one decision


def largest_of(sizes: Mapping[T, int], start_layer: int) -> T:
    """Returns the key of the largest size. Slots are interchangeable, so every slot has this size. Raises UserError if
    the sizes of the layers from `start_layer` on differ much."""
    largest = max(sizes.values(), default=0)
    if not largest or min(sizes.values()) < LEAST * largest:
        raise UserError(
            f"offload_config.start_layer: {start_layer}: no layers with experts of one size and format from there on"
        )
    return max(sizes, key=sizes.__getitem__)


def layer_number(path: str) -> int:
    """The number of the layer that contains the module at `path`."""
    return int(re.findall(r"\.(\d+)(?:\.|$)", path)[0])


@dataclass(frozen=True)
class Copy:
    """A copy in flight of an expert into its slot."""

    id: ExpertId
    slot: int
    ticket: int
    start: int  # ns


class ShadowExperts:
    def __init__(self, settings: ShadowSettings, device: ShadowDevice, pool: ShadowPool):
        self.settings, self.device, self.pool = settings, device, pool
        self.layers: list[ShadowedExperts] = []
        self.history = History()

    def experts(
        self, path: str, here: slice, inner: int, hidden: int, format: Format, kind: ExpertKind
    ) -> ShadowedExperts | None:
        """Makes the experts with shadows of the module at `path`. `here` is this rank's slice of the layer's experts.
        Returns None for a layer without shadows, whose experts all stay on the device."""
        number = layer_number(path)
        if number < self.settings.start_layer:
            return None
        self.layers.append(self.device.experts(self.pool, number, here, inner, hidden, format, kind))
        return self.layers[-1]

    @cached_property
    def slot_bytes(self) -> int:
        sizes = {layer.slot_bytes: layer.slot_bytes for layer in self.layers}
        return largest_of(sizes, self.settings.start_layer)

    @property
    def most_slots(self) -> int:
        """The most experts that may be resident at once."""
        return self.settings.slots if self.settings.mode == "fixed" else sum(layer.count for layer in self.layers)

    def open(self, arena: Arena, memory: Tensor, gather: Callable[[], object]) -> None:
        """To be called once the shadow store is filled. `memory` (uint8) is the arena's buffer; `gather` moves
        scattered KV pages together. Places the first experts."""
        self.arena = arena
        self.device.open(memory, arena.frames * arena.frame_bytes, lambda layer: self.history.long.append(layer))
        experts = self.layers[0].count
        chosen = ResidencySettings(max_swaps=self.settings.max_swaps, interval=self.settings.interval)
        self.residency = ResidencyPolicy(len(self.layers), experts, chosen)
        self.balance = Balance(arena, LOW, LOW + arena.extent_frames, PATIENCE, self.make_room, gather)
        self.slots: dict[ExpertId, int] = {}  # of resident experts and of those whose copy is in flight
        self.copies: dict[ExpertId, Copy] = {}  # copies in flight, in order of their start
        shape = len(self.layers), experts
        self.in_slot = np.zeros(shape, np.bool_)  # whether the expert has a slot
        self.published = np.zeros(shape, np.bool_)  # whether its copy is complete as well: the expert is resident
        # Steps add to these tensors.
        self.counts, self.hits, self.times = (np.zeros((len(self.layers), n), np.int64) for n in (experts, 1, 4))
        for layer, *rows in zip(self.layers, self.counts, self.hits, self.times, strict=True):
            layer.share(*map(torch.from_numpy, rows))
        # The values of `counts` and `hits` when they were last read, and the routing of the interval so far.
        self.seen, self.seen_hits, self.routed = self.counts.copy(), self.hits.copy(), np.zeros(shape, np.int64)
        self.step = self.step_number = 0  # number of this step, and of decode steps so far
        self.forget()
        self._place_first()

    def begin(self) -> None:
        """To be called before a step takes its KV pages. Publishes experts whose copies are complete, and keeps frames
        free ahead of demand."""
        self.step = self.pool.count_step()
        if self.settings.mode == "elastic":
            self.balance.step()
        self._publish_complete()

    def started(self, tokens: Sequence[int], lengths: Sequence[Sequence[int]]) -> None:
        """To be called before the step's ops run. `tokens` has the number of tokens of each data-parallel group, with
        padding, and `lengths` those of each of its sequences."""
        self.tokens, self.lengths = tokens, lengths
        self.device.begin(self.step, tokens, [sum(of) for of in lengths])
        self.started_at = time.monotonic_ns()

    def end(self, decode: bool, coming: Sequence[int] = ()) -> None:
        """To be called after a step; `coming` are the tokens that sequences take in the next one. Records a decode
        step, and decides which experts are to be resident after every `interval` of these and after a long step."""
        self.device.finish()
        self._publish_complete()
        seen = self.counts - self.seen
        self.seen += seen
        hits = (self.hits - self.seen_hits)[:, 0]
        self.seen_hits[:] = self.hits
        if not decode:
            self._learn_long(coming)
            return
        self._record(seen, hits)
        self.step_number += 1
        self.routed += seen
        if self.step_number % self.settings.interval or self.settings.mode == "resident":
            return
        self.residency.observe(self.routed, coming)
        self.routed[:] = 0
        self._swap(self._free_slots())

    def _learn_long(self, coming: Sequence[int]) -> None:
        """Learns from the routing of a long step, and moves experts for the requests that have begun."""
        routed = [layer.take_long() for layer in self.layers]
        long = [ids.numpy() for ids in routed if ids is not None]
        if len(long) < len(routed) or self.settings.mode == "resident":
            return
        starts = np.cumsum([0, *self.tokens[:-1]])
        rows = np.concatenate([start + np.arange(sum(of)) for start, of in zip(starts, self.lengths, strict=True)])
        lengths = [length for of in self.lengths for length in of]
        # The last layer may have routed the sequences' last tokens only, too few to learn from.
        whole = [ids[rows] if len(ids) == sum(self.tokens) else None for ids in long]
        self.residency.observe_long(whole, lengths, coming)
        self._swap(0)  # no more memory for experts while prompts come

    def _swap(self, free_slots: int) -> None:
        for swap in self.residency.swaps(self.in_slot, free_slots, len(self.copies)):
            if swap.expert_out is not None:
                if swap.expert_out not in self.slots:
                    continue
                self.evict(swap.expert_out)
            self.fetch((swap.layer, swap.expert_in))

    def make_room(self, frames: int) -> None:
        """Evicts the coldest experts until `frames` more frames are free or no expert is left."""
        coldest = [self.slots[id] for id in self.residency.coldest(self.in_slot, len(self.slots))]
        owner = {slot: id for id, slot in self.slots.items()}
        for slot in self.arena.leaving(coldest, frames):
            self.evict(owner[slot])
            self.history.for_cache += 1

    def fetch(self, id: ExpertId) -> None:
        """Takes a slot and begins to copy the expert into it; does nothing if no slot is free."""
        slot = self.arena.take_slot()
        if slot is None:
            return
        self.slots[id], self.in_slot[id] = slot, True
        ticket = self.device.copy(id, self.arena.slot_offset(slot))
        self.copies[id] = Copy(id, slot, ticket, time.monotonic_ns())

    def evict(self, id: ExpertId) -> None:
        """Makes the expert missing and frees its slot."""
        if copy := self.copies.pop(id, None):
            self.device.wait(copy.ticket)  # the slot may be written again at once
        self.device.withdraw(id)
        self.in_slot[id] = self.published[id] = False
        self.arena.give_slot(self.slots.pop(id))
        self.history.evicted.append(id[0])

    def value_copies(self, swap_cost: float, max_swaps: int) -> None:
        """Sets the cost of a copy that the policy assumes, in misses that it must save, and the most copies at one
        decision."""
        self.residency.settings = replace(self.residency.settings, max_swaps=max_swaps, swap_cost=swap_cost)

    def forget(self) -> None:
        """Drops the history so far, such as that of a warm-up. The policy's forecasts are kept."""
        self.history = History(frames=self.arena.frames, routed=np.zeros_like(self.counts))

    def _free_slots(self) -> int:
        """Number of slots that may be filled now."""
        if self.settings.mode == "elastic":
            return self.balance.room()
        return self.most_slots - len(self.slots)

    def _place_first(self) -> None:
        """Makes the first experts of each layer resident, as many as fit, before any routing was recorded."""
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
                self.in_slot[layer, expert] = self.published[layer, expert] = True

    def _publish_complete(self) -> None:
        """Publishes the experts whose copies are complete."""
        for copy in [copy for copy in self.copies.values() if self.device.done(copy.ticket)]:
            self.device.publish(copy.id, self.arena.slot_offset(copy.slot))
            self.published[copy.id] = True
            del self.copies[copy.id]
            self.history.copies.append((copy.start, time.monotonic_ns(), *copy.id))

    def _record(self, seen: Counts, hits: Counts) -> None:
        free, experts = self.arena.free_frames, self.arena.slot_frames
        self.history.routed += seen
        self.history.steps.append(
            StepRecord(
                start=self.started_at,
                end=time.monotonic_ns(),
                hits=hits,
                misses=seen.sum(axis=1) - hits,
                times=self.times.copy(),
                packed=np.packbits(self.published, axis=1),
                experts=self.published.shape[1],
                kv_frames=self.arena.frames - free - experts,
                expert_frames=experts,
                free_frames=free,
            )
        )

"""The CPU as the device of shadow experts. The engine's thread pool computes resident experts, whose slots hold blocks
of the same layout as the shadow store.

In long steps it computes the missing experts as well: in place, in the shadow store, with the threads of both pools,
since a copy would read the same memory once more. Where the pools are on different NUMA nodes it takes what is copied
to a ring, and the shadow pool the rest.

The result has the same bits as that of `ops.moe`, whichever experts are resident.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from umbra.cpu_offload.costs import Costs
from umbra.cpu_offload.device import ExpertId, ShadowDevice
from umbra.cpu_offload.expert_ring import ExpertRing
from umbra.cpu_offload.experts import ShadowedExperts
from umbra.cpu_offload.history import LongLayer
from umbra.executor.platform.cpu.link import CpuLink
from umbra.ops.cpu.engine import native
from umbra.ops.cpu.shadow import Copier, ExpertBlocks, ShadowPool, in_place, join, pairs_of, resident_rows, submit
from umbra.ops.cpu.store import ExpertStore
from umbra.ops.formats import Format
from umbra.ops.interface import ExpertKind

ALIGNMENT = 64  # alignment of slots in bytes


def expert_slot(inner: int, hidden: int, format: Format, kind: ExpertKind, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes, alignment) of one expert's slot, which holds a block of the shadow store. `dtype`, the type of
    activations, makes no difference."""
    return ExpertBlocks(inner, hidden, format, kind).block_bytes, ALIGNMENT


def expert_blocks(inner: int, hidden: int, format: Format, kind: ExpertKind, dtype: torch.dtype) -> ExpertBlocks:
    """The blocks of the shadow store. `dtype` makes no difference."""
    return ExpertBlocks(inner, hidden, format, kind)


class CpuExperts(ShadowedExperts):
    def __init__(self, pool: ShadowPool, number: int, here: slice, blocks: ExpertBlocks):
        self.store = ExpertStore(here.stop - here.start, blocks, pool)
        super().__init__(pool, number, here, self.store)
        self.arrived = np.zeros(self.count, np.int64)  # slots of complete copies; the copier writes it while steps run
        self.arrived_at = self.arrived.ctypes.data
        self.layer = dataclasses.replace(self.layer, arrived=torch.from_numpy(self.arrived))

    def open(self, device: "CpuDevice", index: int, note: Callable[[LongLayer], None]) -> None:
        """To be called before the first step. `index` is the layer's number among those with shadows; `note` is called
        with each layer of a long step, one that has more tokens than a decode step and is never captured."""
        self.device, self.index, self.note = device, index, note

    @property
    def slot_bytes(self) -> int:
        return self.blocks.block_bytes

    def mixture(self, x: Tensor, weights: Tensor, ids: Tensor, first_expert: int | None) -> Tensor:
        device, layer, start = self.device, self.layer, time.perf_counter()
        if not device.streams and len(x) <= device.decode_tokens:
            return self._by_both(x, weights, ids)
        self.long_ids = ids
        before, streamed = layer.counts.clone(), 0
        if not device.streams:
            out = self._by_both(x, weights, ids)
        elif device.ring:
            out = self._divided(device.ring, device.link, x, weights, ids)
            streamed = int(device.ring.copied[self.index]) * self.blocks.block_bytes
        else:
            out = in_place(layer, x, weights, ids)
        if len(x) <= device.decode_tokens:  # the last layer's rows, of which only some are wanted
            return out
        ms = 1e3 * (time.perf_counter() - start)
        routed = layer.counts - before
        hits, step = int(routed[layer.device != 0].sum()), int(self.pool.step)
        self.note(LongLayer(step, len(x), hits, int(routed.sum()) - hits, streamed, ms))
        return out

    def _by_both(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The shadow pool computes the missing experts while the engine computes the resident ones."""
        job = submit(self.pool, self.layer, x, ids)
        resident_rows(job)
        return join(job, weights)

    def _divided(self, ring: ExpertRing, link: CpuLink, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The engine computes the resident experts and those that are copied to the ring, the shadow pool the rest."""
        device, layer = self.device, self.layer
        ring.lead = 1e3 * (time.perf_counter() - device.since)
        computed = ring.plan(self.index, pairs_of(layer, ids).numpy())
        table = torch.ones_like(layer.device)
        table[computed] = 0
        shown = dataclasses.replace(layer, device=table, arrived=None)
        job = submit(self.pool, shown, x, ids)  # reads the table before it returns
        table.copy_(layer.device)
        resident_rows(job)
        for group, experts in ring.groups(self.index):
            table.zero_()
            table[experts] = torch.tensor([block.data_ptr() for block in link.blocks[group, : len(experts)]])
            resident_rows(job)
        out = join(job, weights)
        device.since = time.perf_counter()
        return out


class CpuDevice(ShadowDevice):
    alignment: ClassVar[int] = ALIGNMENT
    narrows: ClassVar[bool] = True

    def __init__(self, decode_tokens: int, top_k: int = 1, stream_tokens: int = 0, costs: Costs | None = None):
        """`decode_tokens` are the most tokens of a decode step. From `stream_tokens` tokens on, 0: never, the engine
        computes missing experts as well, of which a token uses `top_k`."""
        self.decode_tokens, self.top_k, self.stream_tokens, self.costs = decode_tokens, top_k, stream_tokens, costs
        self.layers: list[CpuExperts] = []
        self.ring: ExpertRing | None = None
        self.streams = False  # whether the engine computes missing experts in this step

    def experts(
        self, pool: ShadowPool, number: int, here: slice, inner: int, hidden: int, format: Format, kind: ExpertKind
    ) -> ShadowedExperts:
        self.layers.append(CpuExperts(pool, number, here, ExpertBlocks(inner, hidden, format, kind)))
        return self.layers[-1]

    def open(self, memory: Tensor, end: int, note: Callable[[LongLayer], None]) -> None:
        self.memory, self.start, self.copier = memory, memory.data_ptr(), Copier()
        if self.stream_tokens > 0 and self.costs and not self.costs.whole:
            experts = self.layers[0].count
            self.link = CpuLink([layer.store for layer in self.layers], experts)
            self.ring = ExpertRing(self.link, len(self.layers), experts, self.top_k, self.costs)
        for index, layer in enumerate(self.layers):
            layer.open(self, index, note)

    @property
    def staging_bytes(self) -> int:
        return self.link.blocks.nbytes if self.ring else 0

    def copy(self, id: ExpertId, start: int) -> int:
        layer, expert = self.layers[id[0]], id[1]
        return self.copier.fill(self.start + start, layer.store[expert], layer.arrived_at + 8 * expert)

    def done(self, ticket: int) -> bool:
        return self.copier.done(ticket)

    def wait(self, ticket: int) -> None:
        self.copier.wait(ticket)

    def publish(self, id: ExpertId, start: int) -> None:
        self.layers[id[0]].set_address(id[1], self.start + start)

    def withdraw(self, id: ExpertId) -> None:
        layer, expert = self.layers[id[0]], id[1]
        layer.set_address(expert, 0)
        layer.arrived[expert] = 0

    def begin(self, step: int, tokens: Sequence[int], live: Sequence[int]) -> None:
        self.streams = 0 < self.stream_tokens <= sum(tokens)
        native.widen(self.streams and not self.ring)
        if self.streams and self.ring:
            self.since = time.perf_counter()  # the end of a layer, or the beginning of the step
            self.ring.begin(sum(tokens), np.stack([layer.table != 0 for layer in self.layers]))

    def finish(self) -> None:  # `join` has waited for the shadow pool
        self.streams = False
        native.widen(False)
        if self.ring:
            self.ring.end()

"""Shadow experts of a GPU: slots hold experts in the host's own blocks, and a table on the device has the offset of
each resident expert in the arena.

    shadow pool            missing experts, from the blocks on the host          ops/cuda/shadow.py
    GPU          submit |  residents, from their slots                  | join   ops/cuda/kernels/experts.py

An expert may become resident within a step: a side stream copies its block to a slot and then writes its place to the
table, so an expert with a place has been copied completely. Both sides of a layer go by one snapshot of its row. The
host's own table, which it sends before a step if it has changed, has only what was published; it may erase a place that
came before that, and the expert is then missing until the next step. Experts leave between steps, after their copies
have ended: the host's table, without them, precedes the step's first look in the main stream.

The host keeps one copy of every expert, registered with the device once it is filled. In long steps, too, the shadow
pool computes all that is not resident: none is streamed to the device yet.
"""

import atexit
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from umbra.cpu_offload.device import ExpertId, ShadowDevice
from umbra.cpu_offload.experts import ShadowedExperts
from umbra.cpu_offload.history import LongLayer
from umbra.ops.cpu.matrix import ALIGNMENT
from umbra.ops.cpu.shadow import BridgeWorker, ExpertBlocks, ShadowPool
from umbra.ops.cpu.store import ExpertStore
from umbra.ops.cuda.host_memory import RegisteredRange
from umbra.ops.cuda.ops import CudaOps
from umbra.ops.cuda.shadow import GpuCopies, GpuNodes
from umbra.ops.cuda.weights import ResidentExperts
from umbra.ops.formats import Format
from umbra.ops.interface import ExpertKind, fixed

NOWHERE = -1  # place of an expert that is not resident


class CudaExperts(ShadowedExperts):
    def __init__(self, device: "CudaDevice", pool: ShadowPool, number: int, here: slice, blocks: ExpertBlocks):
        self.store = ExpertStore(here.stop - here.start, blocks, pool)
        super().__init__(pool, number, here, self.store)
        self.shape, self.device, self.number, self.index = blocks, device, number, len(device.layers)

    @property
    def slot_bytes(self) -> int:
        return self.shape.block_bytes

    def mixture(self, x: Tensor, weights: Tensor, ids: Tensor, first_expert: int | None) -> Tensor:
        device = self.device
        if len(x) > device.captured:
            self.long_ids = ids
        here = device.nodes.submit(x, ids, weights, device.places[self.index], self.number)
        resident = ResidentExperts(self.shape, device.memory, here)
        own = device.ops.moe(x, weights, ids, resident, first_expert)
        return device.nodes.join(own, self.number)


class CudaDevice(ShadowDevice):
    """Steps of at most `captured` tokens may be captured."""

    alignment: ClassVar[int] = ALIGNMENT
    staging_bytes: ClassVar[int] = 0

    def __init__(self, ops: CudaOps, device: torch.device, top_k: int, captured: int, timeout_s: float):
        self.ops, self.device, self.top_k, self.timeout_s = ops, device, top_k, timeout_s
        self.captured = captured
        self.layers: list[CudaExperts] = []
        self.prepared: set[int] = set()  # numbers of tokens

    def experts(
        self, pool: ShadowPool, number: int, here: slice, inner: int, hidden: int, format: Format, kind: ExpertKind
    ) -> ShadowedExperts:
        self.pool = pool
        self.layers.append(CudaExperts(self, pool, number, here, ExpertBlocks(inner, hidden, format, kind)))
        return self.layers[-1]

    def open(self, memory: Tensor, end: int, note: Callable[[LongLayer], None]) -> None:
        self.memory, first = memory.view(-1), self.layers[0]
        self.registered = [
            RegisteredRange(storage.data_ptr(), storage.nbytes, f"layer {layer.number}")
            for layer in self.layers
            for storage in layer.store.storages
        ]
        shape = len(self.layers), first.count
        self.on_host = torch.full(shape, NOWHERE, pin_memory=self.device.type == "cuda")
        self.places = fixed(self.on_host.to(self.device, copy=True))
        self.changed = False
        self.worker = BridgeWorker(self.pool)
        self.nodes = GpuNodes(
            self.worker,
            [layer.number for layer in self.layers],
            first.count,
            first.shape.hidden,
            self.top_k,
            self.ops.dtype,
            self.captured,
            self.timeout_s,
        )
        self.copies = GpuCopies(self.nodes.bridge)
        print(self.nodes.bridge.how)
        atexit.register(self.close)  # keeps memory alive that the GPU uses, until it uses it no more

    def copy(self, id: ExpertId, start: int) -> int:
        to, entry = self.memory.data_ptr() + start, self.places[id].data_ptr()
        return self.copies.begin(to, self.layers[id[0]].store[id[1]], entry, start)

    def done(self, ticket: int) -> bool:
        return self.copies.done(ticket)

    def wait(self, ticket: int) -> None:
        self.copies.wait(ticket)

    def publish(self, id: ExpertId, start: int) -> None:
        self._place(id, start)

    def withdraw(self, id: ExpertId) -> None:
        self._place(id, NOWHERE)

    def _place(self, id: ExpertId, start: int) -> None:
        self.on_host[id] = start
        self.changed = True

    def begin(self, step: int, tokens: Sequence[int], live: Sequence[int]) -> None:
        if self.changed:
            self.places.copy_(self.on_host, non_blocking=True)
            self.changed = False
        total = sum(tokens)
        if total not in self.prepared:  # nothing can be allocated during a capture
            self.nodes.prepare(total)
            for layer in self.layers:
                self.worker.layer(layer.layer, total, self.top_k, self.ops.dtype)
            self.prepared.add(total)
        self.worker.note_live(tokens, live)
        self.nodes.begin(step, total)

    def finish(self) -> None:
        self.nodes.finish()

    def close(self) -> None:
        self.nodes.close()
        for memory in self.registered:
            memory.end()

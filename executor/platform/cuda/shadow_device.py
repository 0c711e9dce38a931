"""Shadow experts of a GPU: slots hold experts in the host's own blocks, and a table on the device has the offset of
each resident expert in the arena.

    shadow pool            missing experts, from the blocks on the host          ops/cuda/shadow.py
    GPU          submit |  residents, from their slots                  | join   ops/cuda/kernels/experts.py
    long steps   residents, groups of experts that are copied from the host, the shadow pool       long_steps.py

An expert may become resident within a step: a side stream copies its block to a slot and then writes its place to the
table, so an expert with a place has been copied completely. Both sides of a layer go by one snapshot of its row. The
host's own table, which it sends before a step if it has changed, has only what was published; it may erase a place that
came before that, and the expert is then missing until the next step. Experts leave between steps, after their copies
have ended: the host's table, without them, precedes the step's first look in the main stream.

A long step goes by the host's table, in which nobody comes or leaves meanwhile.

The host keeps one copy of every expert, registered with the device once it is filled.
"""

import atexit
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from umbra.cpu_offload.device import ExpertId, ShadowDevice
from umbra.cpu_offload.experts import ShadowedExperts
from umbra.cpu_offload.history import LongLayer
from umbra.executor.platform.cuda.long_steps import RingedExperts, RingedSteps, Streamed
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


class CudaExperts(RingedExperts):
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
        if device.long and len(x) >= device.long.least:
            return device.long.mixture(self, x, weights, ids, first_expert)
        here = device.nodes.submit(x, ids, weights, device.places[self.index], self.number)
        resident = ResidentExperts(self.shape, device.memory, here)
        own = device.ops.moe(x, weights, ids, resident, first_expert)
        return device.nodes.join(own, self.number)


class CudaDevice(ShadowDevice):
    """Steps of at most `captured` tokens may be captured. Without `streamed` no expert is copied for a long step."""

    alignment: ClassVar[int] = ALIGNMENT

    def __init__(
        self,
        ops: CudaOps,
        device: torch.device,
        top_k: int,
        captured: int,
        timeout_s: float,
        streamed: Streamed | None = None,
    ):
        self.ops, self.device, self.top_k, self.timeout_s = ops, device, top_k, timeout_s
        self.captured, self.streamed = captured, streamed
        self.long: RingedSteps | None = None  # if experts are streamed
        self.layers: list[CudaExperts] = []
        self.prepared: set[int] = set()  # sizes of jobs

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
        if self.streamed:
            self.long = RingedSteps(
                self.layers,
                self.on_host,
                self.memory,
                self.nodes,
                self.copies,
                self.ops.unpack,
                self.top_k,
                self.streamed,
            )
        print(self.nodes.bridge.how)
        atexit.register(self.close)  # keeps memory alive that the GPU uses, until it uses it no more

    @property
    def staging_bytes(self) -> int:
        return self.long.nbytes if self.long else 0

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
        size = self.nodes.size_of(total)
        if size not in self.prepared:  # nothing can be allocated during a capture
            self.nodes.prepare(size)
            for layer in self.layers:
                self.worker.layer(layer.layer, size, self.top_k, self.ops.dtype)
            self.prepared.add(size)
        self.worker.note_live((*tokens, size - total), (*live, 0))
        self.nodes.begin(step, total)
        if self.long and total >= self.long.least:
            self.long.begin(total)

    def finish(self) -> None:
        self.nodes.finish()
        if self.long:
            self.long.end()

    def close(self) -> None:
        self.nodes.close()
        for memory in self.registered:
            memory.end()

"""Shadow experts of an NPU: slots hold experts in the device's layout, and a table on the device has the address of
each resident expert.

    decode    shadow_submit | residents' sums, from their slots | shadow_join            ops/ascend/shadow.py
    prefill   residents, groups of experts that are copied from the host, the shadow pool       long_steps.py

An expert may become resident within a step: a side stream copies its bytes to a slot and then its place to the table,
so an expert with an address has been copied completely. The table changes at any moment, so both sides of a layer go by
one copy of its row. The host's own table, which it sends before a step if it has changed, has only what was published;
it may erase a place that came before that, and the expert is then missing until the next step. Experts leave between
steps, after their copies have ended: the host's table, without them, precedes the step's first look in the main stream.
A long step goes by the host's table, in which nobody comes or leaves meanwhile; a place that comes early is not looked
at.

The host keeps one copy of every expert, in the device's layout, from which the shadow pool computes and slots are
filled (slot_store.py). Its memory is registered with the device. Nothing here was run on an NPU.
"""

import atexit
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from typing import ClassVar

import torch
import torch_npu
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from umbra.cpu_offload.costs import Costs
from umbra.cpu_offload.device import ExpertId, ShadowDevice
from umbra.cpu_offload.experts import ShadowedExperts
from umbra.cpu_offload.history import LongLayer
from umbra.executor.platform.ascend.facts import FACTS
from umbra.executor.platform.ascend.long_steps import HostExperts, LongSteps
from umbra.executor.platform.ascend.slot_store import SlotStore
from umbra.ops.ascend.host_memory import Registered, pinned, send
from umbra.ops.ascend.moe import resident
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.ascend.shadow import ShadowNodes
from umbra.ops.ascend.slots import ArenaSlots
from umbra.ops.ascend.vector_core import calls
from umbra.ops.ascend.vector_core.blocks import PLACE, parts_of
from umbra.ops.ascend.weights import StoredMatrices
from umbra.ops.cpu.shadow import BridgeWorker, ShadowPool
from umbra.ops.formats import Format
from umbra.ops.interface import ExpertKind, fixed


class NpuExperts(HostExperts):
    def __init__(
        self,
        device: "AscendDevice",
        pool: ShadowPool,
        number: int,
        here: slice,
        inner: int,
        hidden: int,
        format: Format,
        kind: ExpertKind,
    ):
        plain = dataclasses.replace(format, tiled=False)  # slots hold no tiled matrices
        ops = device.ops
        self.store = SlotStore(here.stop - here.start, inner, hidden, plain, kind, ops.dtype, ops.in_planes, pool)
        super().__init__(pool, number, here, self.store)
        self.device, self.number, self.kind, self.index = device, number, kind, len(device.layers)
        self.layout = self.store.layout
        self.parts = parts_of(self.count, self.slot_bytes)

    @property
    def slot_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def w13(self) -> StoredMatrices:
        return self.store.experts.w13

    @property
    def w2(self) -> StoredMatrices:
        return self.store.experts.w2

    def planes(self, expert: int) -> dict[str, Tensor]:
        """The planes of the host's copy, by their names in a block."""
        return self.store.planes(expert)

    def mixture(self, x: Tensor, weights: Tensor, ids: Tensor, first_expert: int | None) -> Tensor:
        if self.device.long and len(x) > self.device.most:
            self.long_ids = ids
            return self.device.long.mixture(self, x, weights, ids, first_expert)
        nodes, places = self.device.nodes.number, self.device.places[self.index]
        sums, here = torch.ops.umbra.shadow_submit(x, ids, weights, places, self.number, nodes)
        own = self._own(x, weights, ids, here, first_expert)
        return torch.ops.umbra.shadow_join(sums, own, self.number, nodes)

    def _own(self, x: Tensor, weights: Tensor, ids: Tensor, here: Tensor, first: int | None) -> Tensor:
        """The weighted sums of the experts that are resident by `here`, places as `AscendDevice.open` has them. The
        vector cores read them from their slots, other kernels from a gathered bank, which has one expert for each pair
        of token and expert or, if these are more, from banks of all experts."""
        device, ops = self.device, self.device.ops
        if ops.few(len(x), self):
            return calls.moe_slots(x, weights, ids, device.slots.memory, here, self.layout, first, ops.float_sums)
        if not device.by_pair(len(x), self.count):
            return self._of_all(x, weights, ids, here.abs(), first)
        if first is not None:
            weights, ids = resident(weights, ids, first, self.count)
        bank = device.slots.bank(here.index_select(0, ids.flatten()).abs())
        return ops.moe(x, weights, device.orders[len(x)], bank, None)

    def _of_all(self, x: Tensor, weights: Tensor, ids: Tensor, rows: Tensor, first: int | None) -> Tensor:
        """The weighted sums of banks of all experts, part by part; those that are not resident are zeros."""

        def of(part: slice) -> Tensor:
            bank = self.device.slots.bank(rows[part])
            begin = first if len(self.parts) == 1 else (first or 0) + part.start
            return self.device.ops.moe(x, weights, ids, bank, begin)

        return reduce(torch.add, map(of, self.parts))


class AscendDevice(ShadowDevice):
    """In steps of at most `most` tokens the CPU computes the experts that are not resident; in longer steps some of
    these are copied to the device, as `costs` say. A data-parallel group has at most `longest` tokens in a step."""

    alignment: ClassVar[int] = PLACE
    spare_slots: ClassVar[int] = FACTS.spare_slots

    def __init__(
        self,
        ops: AscendOps,
        device: torch.device,
        top_k: int,
        most: int,
        longest: int,
        costs: Costs,
        timeout_s: float,
        cann: str | None,
    ):
        self.ops, self.device, self.top_k, self.most, self.longest = ops, device, top_k, most, longest
        self.costs, self.timeout_s, self.cann = costs, timeout_s, cann
        self.long: LongSteps | None = None  # if there are such
        self.layers: list[NpuExperts] = []
        self.tickets = itertools.count()
        self.under_way: dict[int, torch_npu.npu.Event] = {}
        self.orders: dict[int, Tensor] = {}  # number of tokens -> the numbers of their (token, expert) pairs
        self.side = torch_npu.npu.Stream()

    def experts(
        self, pool: ShadowPool, number: int, here: slice, inner: int, hidden: int, format: Format, kind: ExpertKind
    ) -> ShadowedExperts:
        self.pool = pool
        self.layers.append(NpuExperts(self, pool, number, here, inner, hidden, format, kind))
        return self.layers[-1]

    def open(self, memory: Tensor, end: int, note: Callable[[LongLayer], None]) -> None:
        self.memory, first = memory, self.layers[0]
        self.registered = [Registered(layer.store.memory, f"layer {layer.number}") for layer in self.layers]
        self.slots = ArenaSlots(memory, end, first.layout, first.store.experts)
        # Tables of each expert's place, its first row. An expert that is not resident has minus the row of the zeros:
        # below 0, so that kernels skip it, or the zeros by `abs`. The third has the places to which copies go.
        shape = len(self.layers), first.count
        self.on_host, self.coming = (pinned(shape, torch.int32, "table of experts") for _ in range(2))
        self.on_host.fill_(-self.slots.nowhere)
        self.on_device = torch.empty(shape, dtype=torch.int32, device=self.device)
        self.places = [fixed(from_dlpack(row)) for row in self.on_device]
        self.changed = True
        self.worker = BridgeWorker(self.pool)
        numbers = [layer.number for layer in self.layers]
        self.nodes = ShadowNodes(
            self.worker.submit,
            self.worker.context,
            numbers,
            first.count,
            first.layout.hidden,
            self.top_k,
            self.ops.dtype,
            self.timeout_s,
            self.cann,
        )
        if self.most < sys.maxsize:
            self.long = LongSteps(
                self.ops,
                self.layers,
                self.on_host,
                self.slots,
                self.nodes,
                self.worker,
                self.most,
                self.longest,
                self.costs,
            )
        print(self.nodes.bridge.how)
        atexit.register(self.close)  # keeps memory that callbacks use alive until none can be called

    @property
    def most_at_once(self) -> int:
        """Experts of the largest bank."""
        return max(part.stop - part.start for part in self.layers[0].parts)

    @property
    def staging_bytes(self) -> int:
        return self.long.nbytes if self.long else 0

    def by_pair(self, tokens: int, count: int) -> bool:
        pairs = tokens * self.top_k
        return 2 <= pairs < count and pairs <= self.most_at_once  # a bank has two experts at least

    def copy(self, id: ExpertId, start: int) -> int:
        layer, ticket, event = self.layers[id[0]], next(self.tickets), torch_npu.npu.Event()
        slot = layer.layout.views(self.memory[start : start + layer.slot_bytes])
        self.coming[id] = start // PLACE
        with torch_npu.npu.stream(self.side):
            send((slot[name], plane) for name, plane in layer.planes(id[1]).items())
            send([(self.on_device[id], self.coming[id])])
            event.record()
        self.under_way[ticket] = event
        return ticket

    def done(self, ticket: int) -> bool:
        if done := self.under_way[ticket].query():
            del self.under_way[ticket]
        return bool(done)

    def wait(self, ticket: int) -> None:
        # Not the event's own wait: torch_npu 2.13 spins there for ever once a copy before it has failed. The event goes
        # after that: an event that is destroyed takes the error of a failed copy with it.
        self.side.synchronize()
        del self.under_way[ticket]

    def publish(self, id: ExpertId, start: int) -> None:
        self._place(id, start // PLACE)

    def withdraw(self, id: ExpertId) -> None:
        self._place(id, -self.slots.nowhere)

    def _place(self, id: ExpertId, row: int) -> None:
        self.on_host[id] = row
        self.changed = True

    def begin(self, step: int, tokens: Sequence[int], live: Sequence[int]) -> None:
        if self.changed:
            self.on_device.copy_(self.on_host, non_blocking=True)
            self.changed = False
        total = sum(tokens)
        self.nodes.begin(step, total)
        if self.long and total > self.most:
            self.long.begin(total)
        else:
            self._prepare(total)
            self.worker.note_live(tokens, live)

    def _prepare(self, tokens: int) -> None:
        """Allocates the tensors for a step of `tokens` tokens, which must not be allocated during a capture."""
        if tokens in self.orders:
            return
        pairs = tokens * self.top_k
        order = torch.arange(pairs, dtype=torch.int32).view(tokens, self.top_k).to(self.device)
        self.orders[tokens] = fixed(order)
        self.nodes.prepare(tokens)
        for layer in self.layers:
            self.worker.layer(layer.layer, tokens, self.top_k, self.ops.dtype)
        if self.by_pair(tokens, self.layers[0].count):
            self.slots.prepare(pairs)
        else:
            for part in self.layers[0].parts:
                self.slots.prepare(part.stop - part.start)

    def finish(self) -> None:
        self.nodes.finish()
        for event in self.under_way.values():
            event.query()  # raises an error if the copy has failed, whose expert the step may have taken for resident
        if self.long:
            self.long.end()

    def close(self) -> None:
        self.nodes.close()
        for memory in self.registered:
            memory.end()

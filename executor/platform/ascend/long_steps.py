"""Long steps on an NPU, such as prefills: of the experts that are not resident, those of many tokens are copied to it,
and the shadow pool computes the others (expert_ring.py).

    copies   e7 e3 e9 e1 | e4 e0 .. | next layer: e5 ..           into groups of the ring
    main     ids to the host | rows | e7 e3 e9 e1 | residents | e4 e0 .. | sums
    side                            | D2H, callback, H2D ..              |      the shadow pool's experts

The host reads a layer's ids and sorts its (token, expert) pairs by groups of residents, groups of the ring and what is
left to the shadow pool, each of which then has a slice of the rows. Rows and sums are those of `ops.moe`; only what the
shadow pool computes differs, within its rounding. Nothing here was run on an NPU.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import torch_npu
from torch import Tensor

from umbra.cpu_offload.costs import Costs
from umbra.cpu_offload.expert_ring import JOB_ROWS, ExpertRing, LeadTimer, Link, group_count, group_size
from umbra.cpu_offload.experts import ShadowedExperts
from umbra.ops.ascend.grouped import COUNTS
from umbra.ops.ascend.host_memory import pinned, send
from umbra.ops.ascend.moe import check_ids, products, resident
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.ascend.shadow import ShadowNodes, happened
from umbra.ops.ascend.slots import ArenaSlots, SlotBank
from umbra.ops.bridge.calls import BridgeError
from umbra.ops.cpu.shadow import BridgeWorker

Ints = npt.NDArray[np.integer]


class HostExperts(ShadowedExperts):
    """The host's experts of layer `number`, the `index`-th layer with shadows."""

    number: int
    index: int

    @abstractmethod
    def planes(self, expert: int) -> dict[str, Tensor]:
        """The planes of the host's copy of the expert, by their names in a block."""


class NpuLink(Link):
    """Copies on a stream of its own from the host's experts."""

    def __init__(
        self, layers: Sequence[HostExperts], slots: ArenaSlots, nodes: ShadowNodes, groups: int, per_group: int
    ):
        super().__init__(groups, per_group)
        self.layers, self.nodes = layers, nodes
        self.banks = [slots.room(per_group) for _ in range(groups)]
        self.stream = torch_npu.npu.Stream()
        self.stream.wait_stream(torch_npu.npu.current_stream())
        self.copied, self.released = ([torch_npu.npu.Event() for _ in range(groups)] for _ in range(2))
        self.numbers = [-1] * groups  # of the layer whose experts a group has
        self.awaited: set[int] = set()  # groups that the main stream may be waiting for

    def begin(self, group: int, layer: int, experts: Sequence[int]) -> None:
        source, to = self.layers[layer], self.banks[group].planes
        self.numbers[group] = source.number
        self.awaited.discard(group)
        try:
            with torch_npu.npu.stream(self.stream):
                self.released[group].wait()
                send(
                    (to[name][index], plane)
                    for index, expert in enumerate(experts)
                    for name, plane in source.planes(expert).items()
                )
                self.copied[group].record()
        except RuntimeError as error:
            raise BridgeError(f"{self._where(group)}: a copy of its experts: {error}") from None

    def ready(self, group: int) -> None:
        self.awaited.add(group)
        self.copied[group].wait()

    def release(self, group: int) -> None:
        self.released[group].record()

    def drain(self) -> None:
        try:
            self.stream.synchronize()
        except RuntimeError:  # its step has failed already
            return

    def late(self) -> str | None:
        """The first group whose copies the main stream waits for."""
        late = [group for group in self.awaited if not happened(self.copied[group])]
        return f"{self._where(late[0])}: copies of its experts were not done" if late else None

    def _where(self, group: int) -> str:
        return f"layer {self.numbers[group]}, step {self.nodes.step}"


class LongSteps:
    def __init__(
        self,
        ops: AscendOps,
        layers: Sequence[HostExperts],
        places: Tensor,
        slots: ArenaSlots,
        nodes: ShadowNodes,
        worker: BridgeWorker,
        most: int,
        longest: int,
        costs: Costs,
    ):
        """`places` (layers, experts) int32, on the host, has each resident expert's first row in `slots`, and numbers
        below 0 for the others; it does not change within a step. Long steps have more than `most` tokens, and at most
        `longest` in a data-parallel group."""
        first = layers[0]
        self.ops, self.layers, self.places, self.slots, self.nodes = ops, layers, places.numpy(), slots, nodes
        self.per_group = group_size(first.slot_bytes, first.count)
        groups = group_count(longest, first.slot_bytes, first.count)
        self.link = NpuLink(layers, slots, nodes, groups, self.per_group)
        self.ring = ExpertRing(self.link, len(layers), first.count, nodes.top_k, costs)
        self.timer = LeadTimer(partial(torch_npu.npu.Event, enable_timing=True))
        self.job_rows = max(JOB_ROWS, most + 1)
        nodes.prepare_rows(self.job_rows)
        nodes.late = self.link.late
        slots.prepare(self.per_group)
        for layer in (experts.layer for experts in layers):  # the host counts
            counts, hits, times = map(torch.zeros_like, (layer.counts, layer.hits, layer.times))
            aside = replace(layer, counts=counts, hits=hits, times=times)
            worker.layer(aside, self.job_rows, 1, ops.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the ring."""
        return sum(plane.nbytes for bank in self.link.banks for plane in bank.planes.values())

    def begin(self, tokens: int) -> None:
        self.timer.begin()
        self.ring.begin(tokens, self.places >= 0)

    def end(self) -> None:
        self.ring.end()

    def mixture(
        self, experts: HostExperts, x: Tensor, weights: Tensor, ids: Tensor, first_expert: int | None
    ) -> Tensor:
        count, first, per_group = experts.count, first_expert or 0, self.per_group
        local = self._on_host(ids, experts) - first
        local[(local < 0) | (local >= count)] = count
        pairs = np.bincount(local, minlength=count + 1)[:count]
        experts.layer.counts.add_(torch.from_numpy(pairs))
        self.ring.lead = self.timer.lead(self.ring.lead)
        computed = self.ring.plan(experts.index, pairs)
        rows_of = self.places[experts.index]
        here = np.flatnonzero((rows_of >= 0) & (pairs > 0)).tolist()
        residents = [here[start : start + per_group] for start in range(0, len(here), per_group)]
        copied, first_copied = self.ring.order(experts.index)
        groups = [*copied[:first_copied], *residents, *copied[first_copied:]]
        order = by_group(local, count, [*groups, computed])
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        *ends, used = accumulate(int(pairs[group].sum()) for group in [*groups, computed])
        shared = ends[-1] if ends else 0
        jobs = np.full(-(-(used - shared) // self.job_rows) * self.job_rows, -1)
        jobs[: used - shared] = np.repeat(computed, pairs[computed]) + first
        amounts = [[*pairs[group], *[0] * (per_group - len(group))] for group in groups]
        padded = [expert for group in residents for expert in group + group[:1] * (per_group - len(group))]
        tokens, back_there, chosen, counts, slots = self._on_device(
            order[:used] // ids.shape[1], back, jobs, np.ravel(amounts), rows_of[padded]
        )

        rows, out = x.index_select(0, tokens), x.new_empty(len(order), x.shape[1])
        self.timer.sorted()
        if used < len(order):
            out[used:] = 0  # experts elsewhere: rows without weight
        if computed:
            torch.ops.umbra.shadow_rows(rows[shared:], chosen, out[shared:used], experts.number, self.nodes.number)
        slices, given = map(slice, [0, *ends], ends), counts.long().view(-1, per_group)
        there = (self.slots.bank(places) for places in (slots.split(per_group) if len(slots) else ()))
        banks = self.ring.banks(experts.index, first_copied, there, lambda group, _: self.link.banks[group])
        # The banks come first: asking for the next one releases the last.
        for bank, part, of_each in zip(banks, slices, given, strict=True):
            self._products(rows, out, part, of_each, bank)
        if computed:
            self.nodes.join_rows(experts.number)
        if first_expert is not None:
            weights, _ = resident(weights, ids, first, count)
        sums = self.ops.sum_rows(out, weights, back_there, ids)
        self.timer.end()
        return sums

    def _products(self, rows: Tensor, out: Tensor, part: slice, counts: Tensor, bank: SlotBank) -> None:
        x, order = rows[part], bank.w13.order
        x = x if order is None else x.index_select(1, order)
        out[part] = products(x, None, counts, COUNTS, bank, self.ops.can, x.dtype)

    def _on_host(self, ids: Tensor, experts: HostExperts) -> Ints:
        check_ids(ids)
        host = pinned(tuple(ids.shape), ids.dtype, f"layer {experts.number}")
        host.copy_(ids, non_blocking=True)
        self.nodes.finish()
        return host.numpy().ravel()

    def _on_device(self, *given: Ints) -> Sequence[Tensor]:
        """These numbers in int32, by one copy."""
        host = pinned((sum(map(len, given)),), torch.int32, "long steps")
        np.concatenate(given, out=host.numpy(), casting="unsafe")
        return host.to(self.slots.memory.device, non_blocking=True).split([len(numbers) for numbers in given])


def by_group(local: Ints, count: int, groups: Sequence[Sequence[int]]) -> Ints:
    """The numbers of pairs, whose experts are `local`, in the order of experts in `groups`; those of others, which are
    `count`, come last."""
    rank = np.full(count + 1, count, np.int16)  # which numpy sorts fastest
    flat = [expert for group in groups for expert in group]
    rank[flat] = np.arange(len(flat))
    return np.argsort(rank[local], kind="stable")

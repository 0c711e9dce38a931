"""Long steps on a GPU, such as prefills: of the experts that are not resident, those of many tokens are copied to a
ring on it, and the shadow pool computes the others (expert_ring.py).

    copies   e7 e3 e9 e1 | e4 e0 .. | next layer: e5 ..           into groups of the ring
    GPU      ids to the host | rows | e7 e3 e9 e1 | residents | e4 e0 .. | sums + the host's
    host                       publish |  the shadow pool's experts     |

The host reads a layer's ids, and the pairs of tokens and experts are sorted by groups of residents and of the ring.
What the pool is to compute goes by the same nodes as in decode steps, which are told that all other experts are there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from umbra.cpu_offload.costs import Costs
from umbra.cpu_offload.expert_ring import ExpertRing, LeadTimer, Link, group_count, group_size
from umbra.cpu_offload.experts import ShadowedExperts
from umbra.ops.cpu.shadow import ExpertBlocks
from umbra.ops.cpu.store import ExpertStore
from umbra.ops.cuda.grouped import Bank, Rows, Unpack, pairs_of, parts, to_device
from umbra.ops.cuda.shadow import GpuCopies, GpuNodes

HERE, MISSING = 0, -1  # places in the table of a long step's nodes


class RingedExperts(ShadowedExperts):
    """The host's experts of layer `number`, the `index`-th layer with shadows, in blocks of `shape`."""

    store: ExpertStore
    shape: ExpertBlocks
    number: int
    index: int


class CudaLink(Link):
    """Copies on a stream of their own from the host's experts to `memory`, blocks of the largest expert's size."""

    def __init__(
        self, layers: Sequence[RingedExperts], copies: GpuCopies, device: torch.device, groups: int, per_group: int
    ):
        super().__init__(groups, per_group)
        self.layers, self.copies = layers, copies
        size = max(layer.slot_bytes for layer in layers)
        self.memory = torch.empty(groups * per_group * size, dtype=torch.uint8, device=device)
        self.starts = (torch.arange(groups * per_group, device=device) * size).view(groups, per_group)
        self.addresses = (self.starts + self.memory.data_ptr()).tolist()
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        self.copied, self.released = ([torch.cuda.Event() for _ in range(groups)] for _ in range(2))

    def begin(self, group: int, layer: int, experts: Sequence[int]) -> None:
        self.stream.wait_event(self.released[group])
        for to, expert in zip(self.addresses[group], experts, strict=False):
            self.copies.send(to, self.layers[layer].store[expert], self.stream)
        self.copied[group].record(self.stream)

    def ready(self, group: int) -> None:
        torch.cuda.current_stream().wait_event(self.copied[group])

    def release(self, group: int) -> None:
        self.released[group].record()

    def bank(self, group: int, experts: Sequence[int]) -> Bank:
        return self.memory, self.starts[group, : len(experts)]

    def drain(self) -> None:
        try:
            self.stream.synchronize()
        except RuntimeError:  # its step has failed already
            return


@dataclass(frozen=True)
class Streamed:
    """Steps whose missing experts are divided by `costs`."""

    least: int  # tokens of such a step
    longest: int  # tokens that a data-parallel group has in one at most
    costs: Costs


class RingedSteps:
    """Steps of which a token uses `top_k` experts of this rank on average. `places` (layers, experts) is the host's
    table of residents in `memory`."""

    def __init__(
        self,
        layers: Sequence[RingedExperts],
        places: Tensor,
        memory: Tensor,
        nodes: GpuNodes,
        copies: GpuCopies,
        unpack: Unpack,
        top_k: int,
        streamed: Streamed,
    ):
        self.places, self.memory, self.nodes, self.unpack = places.numpy(), memory, nodes, unpack
        count, size = layers[0].count, max(layer.slot_bytes for layer in layers)
        groups, self.least = group_count(streamed.longest, size, count), streamed.least
        self.link = CudaLink(layers, copies, memory.device, groups, group_size(size, count))
        self.ring = ExpertRing(self.link, len(layers), count, top_k, streamed.costs)
        self.timer = LeadTimer(partial(torch.cuda.Event, enable_timing=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the ring."""
        return self.link.memory.nbytes

    def begin(self, tokens: int) -> None:
        self.timer.begin()
        self.ring.begin(tokens, self.places >= 0)

    def end(self) -> None:
        self.ring.end()

    def mixture(
        self, experts: RingedExperts, x: Tensor, weights: Tensor, ids: Tensor, first_expert: int | None
    ) -> Tensor:
        shape, index, number, local = experts.shape, experts.index, experts.number, ids - (first_expert or 0)
        pairs = pairs_of(self._on_host(local), experts.count)
        self.ring.lead = self.timer.lead(self.ring.lead)
        computed = self.ring.plan(index, pairs)
        here = np.flatnonzero((self.places[index] >= 0) & (pairs > 0))
        residents = parts(here.tolist(), shape)
        copied, first_copied = self.ring.order(index)
        shown = np.full(len(pairs), HERE)
        shown[computed] = MISSING
        shown_there, starts = to_device(x.device, shown, self.places[index][here])
        if computed:
            self.nodes.submit(x, ids, weights, shown_there, number)
        rows = Rows.sort(x, local, [*copied[:first_copied], *residents, *copied[first_copied:]], pairs)
        self.timer.sorted()
        of_residents = starts.split([len(part) for part in residents]) if residents else ()
        there = ((self.memory, part) for part in of_residents)
        rows.multiply(self.ring.banks(index, first_copied, there, self.link.bank), shape, self.unpack)
        sums = rows.sums(weights)
        if computed:
            sums = self.nodes.join(sums, number)
        self.timer.end()
        return sums

    def _on_host(self, ids: Tensor) -> Tensor:
        host = torch.empty_like(ids, device="cpu", pin_memory=ids.is_cuda)
        host.copy_(ids, non_blocking=True)
        self.nodes.finish()  # the host's part of the layer before may fail
        return host

"""One layer's experts with their shadows: the node that stands in the decode graph."""

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ops.cpu.shadow import ExpertBlocks, ShadowLayer, ShadowPool, join, resident_rows, submit
from ops.cpu.store import ExpertStore
from ops.format import Format, Quantised

if TYPE_CHECKING:
    from cpu_offload.streaming import Streaming

INT = torch.int64


class ShadowedExperts(ABC):
    """`ops.interface.ExpertMatrices` in the shadow store, and their mixture wherever they are resident."""

    def __init__(self, pool: ShadowPool, number: int, here: slice, inner: int, hidden: int, format: Format):
        """`here`: of all experts, those of this rank."""
        self.pool, self.count = pool, here.stop - here.start
        self.blocks = ExpertBlocks(inner, hidden, format)
        self.store = ExpertStore(self.count, self.blocks, pool)
        self.storages = self.store.storages
        resident, counts, times = (torch.zeros(size, dtype=INT) for size in (self.count, self.count, 4))
        self.layer = ShadowLayer(
            number, self.blocks, self.store.addresses, resident, counts, times, self.store, here.start,
            self.store.handles,
        )  # fmt: skip
        self.table = resident.numpy()  # faster to write to, one by one

    def share(self, counts: Tensor, times: Tensor) -> None:
        """Writes there from now on, a row of what all layers have; before anything is captured."""
        self.layer = dataclasses.replace(self.layer, counts=counts, times=times)

    def place(self, expert: int, address: int) -> None:
        """Where the device finds it; 0: nowhere. Between two steps."""
        self.table[expert] = address

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages)

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """That an expert takes on the device."""

    def fill(self, expert: int, which: str, part: Tensor | Quantised) -> None:
        self.store.fill(expert, which, part)

    @abstractmethod
    def mixture(self, x: Tensor, weights: Tensor, ids: Tensor, first_expert: int | None) -> Tensor:
        """`ops.moe`: the shadow pool computes what is not resident, meanwhile the device the rest."""


class CpuExperts(ShadowedExperts):
    """The device has the same blocks; wherever experts are, `mixture` is `ops.moe` bit for bit."""

    streaming: "Streaming"  # from the device, once it is open

    @property
    def slot_bytes(self) -> int:
        return self.blocks.block_bytes

    def mixture(self, x: Tensor, weights: Tensor, ids: Tensor, first_expert: int | None) -> Tensor:
        streaming = self.streaming
        return streaming.long_step(self, x, weights, ids) if streaming.is_long(x) else self.shadowed(x, weights, ids)

    def shadowed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The shadow pool computes what is not resident, meanwhile the device the rest."""
        job = submit(self.pool, self.layer, x, ids)
        resident_rows(job)
        return join(job, weights)

"""One layer's experts with their shadows: the node that stands in the decode graph."""

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ops.cpu.engine import native
from ops.cpu.shadow import ExpertBlocks, ShadowLayer, join, resident_rows, submit
from ops.interface import Format
from ops.quantised import Quantised

if TYPE_CHECKING:
    from cpu_offload.offload import Offload

INT = torch.int64


class ShadowedExperts:
    """`ops.interface.ExpertMatrices` in the shadow store, and their mixture wherever they are resident."""

    def __init__(self, offload: "Offload", number: int, count: int, inner: int, hidden: int, format: Format):
        self.offload, self.count = offload, count
        self.blocks = ExpertBlocks(inner, hidden, format)
        self.buffer = native().Buffer(count * self.blocks.block_bytes, 0)  # zeroed: padding must add nothing
        self.store = torch.frombuffer(self.buffer, dtype=torch.uint8).view(count, self.blocks.block_bytes)
        self.nbytes, self.storages = self.store.nbytes, [self.store]
        addresses = torch.tensor([block.data_ptr() for block in self.store])
        resident, counts, times = (torch.zeros(size, dtype=INT) for size in (count, count, 4))
        self.layer = ShadowLayer(number, self.blocks, addresses, resident, counts, times, self.buffer)
        self.table = resident.numpy()  # faster to write to, one by one

    def share(self, counts: Tensor, times: Tensor) -> None:
        """Writes there from now on, a row of what all layers have; before anything is captured."""
        self.layer = dataclasses.replace(self.layer, counts=counts, times=times)

    def place(self, expert: int, address: int) -> None:
        """Where the device finds it; 0: nowhere. Between two steps."""
        self.table[expert] = address

    def fill(self, expert: int, which: str, part: Tensor | Quantised) -> None:
        self.blocks.fill(self.store[expert].data_ptr(), which, part)

    def mixture(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The shadow pool computes what is not resident, meanwhile the device the rest: `ops.moe`, bit for bit."""
        job = submit(self.offload.pool, self.layer, x, ids)
        resident_rows(job)
        return join(job, weights)

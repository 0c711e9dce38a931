"""Copies experts of a long step to a ring of blocks, for a CPU whose device cannot read the shadow store in place."""

from collections.abc import Sequence
from contextlib import suppress

import torch

from umbra.base.errors import UserError
from umbra.cpu_offload.expert_ring import GROUPS, Link, group_size
from umbra.ops.cpu.engine import native
from umbra.ops.cpu.shadow import Copier
from umbra.ops.cpu.store import ExpertStore


class CpuLink(Link):
    """The device computes while its caller waits, so it has read a group when the group is released."""

    def __init__(self, stores: Sequence[ExpertStore], experts: int):
        """`stores` are those of all layers with shadows, `experts` the experts of each."""
        size = max(store.blocks.block_bytes for store in stores)
        super().__init__(GROUPS, group_size(size, experts))
        self.stores, self.copier = stores, Copier()
        self._buffer = native.Buffer(bytes=self.count * self.per_group * size, team=0)
        blocks = torch.frombuffer(self._buffer, dtype=torch.uint8)[: self.count * self.per_group * size]
        self.blocks = blocks.view(self.count, self.per_group, size)
        self._tickets: dict[int, list[int]] = {}

    def begin(self, group: int, layer: int, experts: Sequence[int]) -> None:
        store, blocks = self.stores[layer], self.blocks[group]
        self._tickets[group] = [
            self.copier.submit(blocks[i, : store.blocks.block_bytes], store[expert]) for i, expert in enumerate(experts)
        ]

    def ready(self, group: int) -> None:
        for ticket in self._tickets[group]:
            self.copier.wait(ticket)

    def release(self, group: int) -> None:
        pass

    def drain(self) -> None:
        for group in self._tickets:
            with suppress(UserError):
                self.ready(group)

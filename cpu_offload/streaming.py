"""Streaming: in a step of many tokens, such as a prefill, missing experts are copied to the device and computed there,
instead of being computed by the shadow pool.

    copier   e1 e2 e3 e4 | e5 e6 e7 e8 | ...          into a ring of two chunks
    device   residents   | e1 .. e4    | e5 .. e8 ... then the sum of all rows, in order of expert

Such steps run eagerly, since the host reads which experts are missing. A chunk of the ring is overwritten only after
the device has computed from it. The row of each (token, expert) pair is the one that the shadow pool would have made,
so the result has the same bits.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ops.cpu.engine import native
from ops.cpu.shadow import Copier, ShadowLayer, ShadowPool, join, prepare, resident_rows
from ops.cpu.store import ExpertStore

CHUNK = 4  # experts that are computed at once
RING = 2 * CHUNK  # blocks


class Streaming:
    """The ring and the copies into it, shared by all layers."""

    def __init__(self, tokens: int, block_bytes: int):
        """Steps of `tokens` tokens or more are streamed; 0: no step is, and no ring is allocated. `block_bytes` are
        those of the largest expert."""
        self.tokens = tokens
        blocks = RING if tokens > 0 else 0
        self._copier, self._buffer = Copier(), native.Buffer(bytes=max(blocks * block_bytes, 1), team=0)
        self.ring = torch.frombuffer(self._buffer, dtype=torch.uint8)[: blocks * block_bytes].view(blocks, block_bytes)

    def mixture(
        self, pool: ShadowPool, layer: ShadowLayer, store: ExpertStore, x: Tensor, weights: Tensor, ids: Tensor
    ) -> tuple[Tensor, int]:
        """Returns the layer's mixture and the number of bytes copied to the device. Counts the routing, as `submit`
        does."""
        table, experts = layer.device.clone(), len(layer.store)
        own = ids.flatten() - layer.first_expert
        counts = own[(own >= 0) & (own < experts)].bincount(minlength=experts)
        layer.counts.add_(counts)
        missing = torch.nonzero((counts > 0) & (table == 0)).flatten().tolist()
        chunks = [missing[i : i + CHUNK] for i in range(0, len(missing), CHUNK)]
        job = prepare(pool, replace(layer, device=table), x, ids)
        tickets = [self._fetch(store, number, chunk) for number, chunk in enumerate(chunks[:2])]
        resident_rows(job)
        for number, chunk in enumerate(chunks):
            for ticket in tickets[number]:
                self._copier.wait(ticket)
            table.zero_()
            table[chunk] = torch.tensor([block.data_ptr() for block in self._blocks(number)[: len(chunk)]])
            resident_rows(job)
            if number + 2 < len(chunks):
                tickets.append(self._fetch(store, number + 2, chunks[number + 2]))
        return join(job, weights), len(missing) * store.blocks.block_bytes

    def _blocks(self, number: int) -> Tensor:
        """The half of the ring that chunk `number` is copied to. (CHUNK, block bytes)"""
        return self.ring[number % 2 * CHUNK :][:CHUNK]

    def _fetch(self, store: ExpertStore, number: int, chunk: list[int]) -> list[int]:
        """Begins the chunk's copies. -> their tickets"""
        blocks = self._blocks(number)[:, : store.blocks.block_bytes]
        return [self._copier.submit(blocks[i], store[expert]) for i, expert in enumerate(chunk)]

"""Long steps, such as prefills: where they have enough tokens, missing experts come to the device instead of being
computed on the CPU. Such steps are eager: which experts are missing is read on the host.

    copier   e1 e2 e3 e4 | e5 e6 e7 e8 | ...          into a ring of two chunks
    device   residents   | e1 .. e4    | e5 .. e8 ... then the sum of all rows, in order of expert

A chunk of the ring is copied into again only after the device has computed from it. Every pair's row is the one that
the shadow pool would have made, so the result has the same bits.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpu_offload.history import LongLayer
from ops.cpu.engine import native
from ops.cpu.shadow import Copier, join, prepare, resident_rows

if TYPE_CHECKING:
    from cpu_offload.experts import CpuExperts

CHUNK = 4  # experts that are computed at once
RING = 2 * CHUNK  # blocks


class Streaming:
    def __init__(self, tokens: int, decode_tokens: int, block_bytes: int, note: Callable[[LongLayer], None]):
        """Steps of more than `decode_tokens` are long; those of `tokens` or more are streamed; -1: none. `note` is told
        of each layer of a long step."""
        self.tokens, self.decode_tokens, self.note = tokens, decode_tokens, note
        blocks = RING if tokens > 0 else 0
        self._copier, self._buffer = Copier(), native.Buffer(bytes=max(blocks * block_bytes, 1), team=0)
        self.ring = torch.frombuffer(self._buffer, dtype=torch.uint8)[: blocks * block_bytes].view(blocks, block_bytes)

    def is_long(self, x: Tensor) -> bool:
        """Whether x (T, hidden) is of no decode step: never captured."""
        return len(x) > self.decode_tokens

    def long_step(self, experts: "CpuExperts", x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """A layer's mixture the one way or the other, written down."""
        layer, start = experts.layer, time.perf_counter()
        before, here, streamed = layer.counts.clone(), layer.device != 0, 0
        if 0 < self.tokens <= len(x):
            out, streamed = self._streamed(experts, x, weights, ids)
        else:
            out = experts.shadowed(x, weights, ids)
        ms = 1e3 * (time.perf_counter() - start)
        seen = layer.counts - before
        hits, step = int(seen[here].sum()), int(experts.pool.step)
        self.note(LongLayer(step, len(x), hits, int(seen.sum()) - hits, streamed, ms))
        return out

    def _streamed(self, experts: "CpuExperts", x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, int]:
        """(mixture, bytes that came)"""
        layer, table = experts.layer, experts.layer.device.clone()
        here = ids.flatten() - layer.first_expert
        counts = here[(here >= 0) & (here < experts.count)].bincount(minlength=experts.count)
        layer.counts.add_(counts)
        missing = torch.nonzero((counts > 0) & (table == 0)).flatten().tolist()
        chunks = [missing[i : i + CHUNK] for i in range(0, len(missing), CHUNK)]
        job = prepare(experts.pool, replace(layer, device=table), x, ids)
        tickets = [self._fetch(experts, number, chunk) for number, chunk in enumerate(chunks[:2])]
        resident_rows(job)
        for number, chunk in enumerate(chunks):
            for ticket in tickets[number]:
                self._copier.wait(ticket)
            table.zero_()
            table[chunk] = torch.tensor([room.data_ptr() for room in self._rooms(number)[: len(chunk)]])
            resident_rows(job)
            if number + 2 < len(chunks):
                tickets.append(self._fetch(experts, number + 2, chunks[number + 2]))
        return join(job, weights), len(missing) * self.ring.shape[1]

    def _rooms(self, number: int) -> Tensor:
        """Of the ring, for the chunk of this number."""
        return self.ring[number % 2 * CHUNK :][:CHUNK]

    def _fetch(self, experts: "CpuExperts", number: int, chunk: list[int]) -> list[int]:
        """Tickets for the chunk's copies, which begin."""
        rooms = self._rooms(number)
        return [self._copier.submit(rooms[i], experts.store[expert]) for i, expert in enumerate(chunk)]

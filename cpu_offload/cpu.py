"""The CPU as the device of shadow experts. The engine's thread pool computes resident experts, whose slots hold blocks
of the same layout as the shadow store.

The result has the same bits as that of `ops.moe`, whichever experts are resident.
"""

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from cpu_offload.device import Device, ExpertId
from cpu_offload.experts import ShadowedExperts
from cpu_offload.history import LongLayer
from cpu_offload.streaming import Streaming
from ops.cpu.shadow import Copier, ExpertBlocks, ShadowPool, join, resident_rows, submit
from ops.format import Format
from ops.interface import ExpertKind

ALIGNMENT = 64  # alignment of slots in bytes


def expert_slot(inner: int, hidden: int, format: Format, kind: ExpertKind, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes, alignment) of one expert's slot, which holds a block of the shadow store. `dtype`, the type of
    activations, makes no difference."""
    return ExpertBlocks(inner, hidden, format, kind).block_bytes, ALIGNMENT


class CpuExperts(ShadowedExperts):
    def open(self, streaming: Streaming, decode_tokens: int, note: Callable[[LongLayer], None]) -> None:
        """To be called before the first step. Steps of more than `decode_tokens` tokens are long steps: they are never
        captured, some are streamed, and `note` is called with each of their layers."""
        self.streaming, self.decode_tokens, self.note = streaming, decode_tokens, note

    @property
    def slot_bytes(self) -> int:
        return self.blocks.block_bytes

    def mixture(self, x: Tensor, weights: Tensor, ids: Tensor, first_expert: int | None) -> Tensor:
        if len(x) <= self.decode_tokens:
            return self._by_both(x, weights, ids)
        layer, start = self.layer, time.perf_counter()
        before, resident, streamed = layer.counts.clone(), layer.device != 0, 0
        if 0 < self.streaming.tokens <= len(x):
            out, streamed = self.streaming.mixture(self.pool, layer, self.store, x, weights, ids)
        else:
            out = self._by_both(x, weights, ids)
        ms = 1e3 * (time.perf_counter() - start)
        routed = layer.counts - before
        hits, step = int(routed[resident].sum()), int(self.pool.step)
        self.note(LongLayer(step, len(x), hits, int(routed.sum()) - hits, streamed, ms))
        return out

    def _by_both(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The shadow pool computes the missing experts while the engine computes the resident ones."""
        job = submit(self.pool, self.layer, x, ids)
        resident_rows(job)
        return join(job, weights)


class CpuDevice(Device):
    alignment: ClassVar[int] = ALIGNMENT

    def __init__(self, stream_tokens: int, decode_tokens: int):
        """`stream_tokens` is the argument of `Streaming`, `decode_tokens` the most tokens of a decode step."""
        self.stream_tokens, self.decode_tokens = stream_tokens, decode_tokens
        self.layers: list[CpuExperts] = []

    def experts(
        self, pool: ShadowPool, number: int, here: slice, inner: int, hidden: int, format: Format, kind: ExpertKind
    ) -> ShadowedExperts:
        self.layers.append(CpuExperts(pool, number, here, inner, hidden, format, kind))
        return self.layers[-1]

    def open(self, memory: Tensor, end: int, note: Callable[[LongLayer], None]) -> None:
        self.memory, self.start, self.copier = memory, memory.data_ptr(), Copier()
        self.streaming = Streaming(self.stream_tokens, max(layer.slot_bytes for layer in self.layers))
        for layer in self.layers:
            layer.open(self.streaming, self.decode_tokens, note)

    @property
    def staging_bytes(self) -> int:
        return self.streaming.ring.nbytes

    def copy(self, id: ExpertId, start: int) -> int:
        return self.copier.fill(self.start + start, self.layers[id[0]].store[id[1]])

    def done(self, ticket: int) -> bool:
        return self.copier.done(ticket)

    def wait(self, ticket: int) -> None:
        self.copier.wait(ticket)

    def publish(self, id: ExpertId, start: int) -> None:
        self.layers[id[0]].set_address(id[1], self.start + start)

    def withdraw(self, id: ExpertId) -> None:
        self.layers[id[0]].set_address(id[1], 0)

    def begin(self, step: int, tokens: Sequence[int], live: Sequence[int]) -> None:
        pass  # the ops read the number of the step from the pool

    def finish(self) -> None:
        pass  # `join` has waited for the shadow pool

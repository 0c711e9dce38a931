"""What shadow experts need of the device that has the resident ones, and the CPU as such a device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from cpu_offload.experts import CpuExperts, ShadowedExperts
from cpu_offload.history import LongLayer
from cpu_offload.streaming import Streaming
from ops.cpu.shadow import Copier, ShadowPool
from ops.format import Format

Place = tuple[int, int]  # layer among those with shadows, expert


class Device(ABC):
    """All but `done` is called between two steps, by the thread that prepares them."""

    alignment: ClassVar[int]  # bytes, of slots and of the arena's frames
    memory: Tensor  # the arena's buffer, bytes

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Beside the arena, for experts that are streamed; once it is open."""

    @abstractmethod
    def experts(
        self, pool: ShadowPool, number: int, here: slice, inner: int, hidden: int, format: Format
    ) -> ShadowedExperts:
        """`here` of all of layer `number`, none of them resident."""

    def spare(self, slot_bytes: int) -> int:
        """Bytes that it needs of the buffer beside the arena's own."""
        return 0

    @abstractmethod
    def open(self, memory: Tensor, end: int, note: Callable[[LongLayer], None]) -> None:
        """Weights are loaded; `memory` is the buffer, the arena's own bytes reach to `end`. `note`: of what it knows of
        a layer of a long step."""

    @abstractmethod
    def copy(self, place: Place, start: int) -> int:
        """Begins to copy an expert into the slot at `start` of the arena, beside the steps. -> a ticket"""

    @abstractmethod
    def done(self, ticket: int) -> bool:
        """Whether that copy was made; an error if it will not be."""

    @abstractmethod
    def wait(self, ticket: int) -> None: ...

    @abstractmethod
    def publish(self, place: Place, start: int) -> None:
        """From the next step on it is computed from the slot at `start`."""

    @abstractmethod
    def withdraw(self, place: Place) -> None:
        """From the next step on it is not resident."""

    @abstractmethod
    def begin(self, step: int, tokens: Sequence[int], live: Sequence[int]) -> None:
        """A step follows: of so many tokens of each data-parallel group, of which the first `live` are not padding."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for the step; an error if a part of it is missing."""


class CpuDevice(Device):
    """The engine's own pool, whose slots hold blocks as the shadow store does."""

    alignment: ClassVar[int] = 64

    def __init__(self, stream_tokens: int, decode_tokens: int):
        """As Streaming has them."""
        self.stream_tokens, self.decode_tokens = stream_tokens, decode_tokens
        self.layers: list[CpuExperts] = []

    def experts(
        self, pool: ShadowPool, number: int, here: slice, inner: int, hidden: int, format: Format
    ) -> ShadowedExperts:
        self.layers.append(CpuExperts(pool, number, here, inner, hidden, format))
        return self.layers[-1]

    def open(self, memory: Tensor, end: int, note: Callable[[LongLayer], None]) -> None:
        self.memory, self.copier = memory, Copier()
        self.streaming = Streaming(self.stream_tokens, self.decode_tokens, self.layers[0].slot_bytes, note)
        for layer in self.layers:
            layer.streaming = self.streaming

    @property
    def staging_bytes(self) -> int:
        return self.streaming.ring.nbytes

    def copy(self, place: Place, start: int) -> int:
        layer = self.layers[place[0]]
        return self.copier.submit(self.memory[start : start + layer.slot_bytes], layer.store[place[1]])

    def done(self, ticket: int) -> bool:
        return self.copier.done(ticket)

    def wait(self, ticket: int) -> None:
        self.copier.wait(ticket)

    def publish(self, place: Place, start: int) -> None:
        self.layers[place[0]].place(place[1], self.memory.data_ptr() + start)

    def withdraw(self, place: Place) -> None:
        self.layers[place[0]].place(place[1], 0)

    def begin(self, step: int, tokens: Sequence[int], live: Sequence[int]) -> None:
        pass  # ops read the pool's own number

    def finish(self) -> None:
        pass  # `join` waited

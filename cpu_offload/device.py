"""What shadow experts need of the device that has the resident ones, and the CPU as such a device."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from cpu_offload.experts import CpuExperts, ShadowedExperts
from ops.cpu.shadow import Copier, ShadowPool
from ops.interface import Format


class Device(ABC):
    """All but `done` is called between two steps, by the thread that prepares them."""

    alignment: ClassVar[int]  # bytes, of slots and of the arena's frames
    memory: Tensor  # the arena's buffer, bytes

    @abstractmethod
    def experts(
        self, pool: ShadowPool, number: int, here: slice, inner: int, hidden: int, format: Format
    ) -> ShadowedExperts:
        """`here` of all of layer `number`, none of them resident."""

    @abstractmethod
    def open(self, memory: Tensor) -> None:
        """Weights are loaded."""

    @abstractmethod
    def copy(self, layer: ShadowedExperts, expert: int, start: int) -> int:
        """Begins to copy an expert into the slot at `start` of the arena, beside the steps. -> a ticket"""

    @abstractmethod
    def done(self, ticket: int) -> bool:
        """Whether that copy was made; an error if it will not be."""

    @abstractmethod
    def wait(self, ticket: int) -> None: ...

    @abstractmethod
    def publish(self, layer: ShadowedExperts, expert: int, start: int) -> None:
        """From the next step on it is computed from the slot at `start`."""

    @abstractmethod
    def withdraw(self, layer: ShadowedExperts, expert: int) -> None:
        """From the next step on it is not resident."""

    @abstractmethod
    def begin(self, step: int, tokens: int) -> None:
        """A step of so many tokens follows."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for the step; an error if a part of it is missing."""


class CpuDevice(Device):
    """The engine's own pool, whose slots hold blocks as the shadow store does."""

    alignment: ClassVar[int] = 64

    def experts(
        self, pool: ShadowPool, number: int, here: slice, inner: int, hidden: int, format: Format
    ) -> ShadowedExperts:
        return CpuExperts(pool, number, here, inner, hidden, format)

    def open(self, memory: Tensor) -> None:
        self.memory, self.copier = memory, Copier()

    def copy(self, layer: ShadowedExperts, expert: int, start: int) -> int:
        return self.copier.submit(self.memory[start : start + layer.slot_bytes], layer.store[expert])

    def done(self, ticket: int) -> bool:
        return self.copier.done(ticket)

    def wait(self, ticket: int) -> None:
        self.copier.wait(ticket)

    def publish(self, layer: ShadowedExperts, expert: int, start: int) -> None:
        layer.layer.device[expert] = self.memory.data_ptr() + start

    def withdraw(self, layer: ShadowedExperts, expert: int) -> None:
        layer.layer.device[expert] = 0

    def begin(self, step: int, tokens: int) -> None:
        pass  # ops read the pool's own number

    def finish(self) -> None:
        pass  # `join` waited

"""What shadow experts need of the device that holds the resident ones."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from cpu_offload.experts import ShadowedExperts
from cpu_offload.history import LongLayer
from ops.cpu.shadow import ShadowPool
from ops.format import Format

Place = tuple[int, int]  # (layer, counted among those with shadows; expert of this rank)


class Device(ABC):
    """Every method but `done` is called between two steps, by the thread that prepares them."""

    alignment: ClassVar[int]  # bytes; slots and frames of the arena begin at multiples of it
    memory: Tensor  # the arena's buffer, uint8

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Bytes beside the arena that streamed experts are copied to. Known once the device is open."""

    @abstractmethod
    def experts(
        self, pool: ShadowPool, number: int, here: slice, inner: int, hidden: int, format: Format
    ) -> ShadowedExperts:
        """The experts of layer `number`, none of them resident; `here`: this rank's slice of them."""

    def spare(self, slot_bytes: int) -> int:
        """Bytes of the buffer, behind the arena's own, that the device needs for itself."""
        return 0

    @abstractmethod
    def open(self, memory: Tensor, end: int, note: Callable[[LongLayer], None]) -> None:
        """To be called once weights are loaded. `memory` is the arena's buffer, of which the arena takes the first
        `end` bytes. `note` is called with each layer of a long step that the device measures."""

    @abstractmethod
    def copy(self, place: Place, start: int) -> int:
        """Begins to copy an expert into the slot at byte `start` of the arena, beside the steps. -> a ticket"""

    @abstractmethod
    def done(self, ticket: int) -> bool:
        """Whether that copy is complete; an error if it never will be."""

    @abstractmethod
    def wait(self, ticket: int) -> None:
        """Returns once that copy is complete."""

    @abstractmethod
    def publish(self, place: Place, start: int) -> None:
        """Makes the expert resident: from the next step on it is computed from the slot at byte `start`."""

    @abstractmethod
    def withdraw(self, place: Place) -> None:
        """Makes the expert missing: from the next step on no op reads its slot."""

    @abstractmethod
    def begin(self, step: int, tokens: Sequence[int], live: Sequence[int]) -> None:
        """To be called before a step of `tokens` tokens of each data-parallel group; all but the first `live` of a
        group are padding."""

    @abstractmethod
    def finish(self) -> None:
        """Returns once the shadow pool's part of the step is done; an error if any of it is missing."""

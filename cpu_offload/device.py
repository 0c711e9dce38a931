"""The interface of a device that holds resident experts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from umbra.cpu_offload.experts import ShadowedExperts
from umbra.cpu_offload.history import LongLayer
from umbra.ops.cpu.shadow import ShadowPool
from umbra.ops.formats import Format
from umbra.ops.interface import ExpertKind

ExpertId = tuple[int, int]  # (layer, expert): a number among the layers with shadows, and one among this rank's experts


class ShadowDevice(ABC):
    """Every method but `done` is called between two steps, by the thread that prepares them."""

    alignment: ClassVar[int]  # slots and frames of the arena begin at multiples of this number of bytes
    spare_slots: ClassVar[int] = 0  # slots after the arena's own that the device needs for itself
    narrows: ClassVar[bool] = False  # whether a layer may be given fewer rows than the step has tokens
    memory: Tensor  # the arena's buffer, uint8

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Bytes of the buffers, outside the arena, that streamed experts are copied to. Known once the device is
        open."""

    @abstractmethod
    def experts(
        self, pool: ShadowPool, number: int, here: slice, inner: int, hidden: int, format: Format, kind: ExpertKind
    ) -> ShadowedExperts:
        """Makes the experts of layer `number`, none of them resident. `here` is this rank's slice of the experts."""

    @abstractmethod
    def open(self, memory: Tensor, end: int, note: Callable[[LongLayer], None]) -> None:
        """To be called once weights are loaded. `memory` is the arena's buffer, of which the arena takes the first
        `end` bytes. `note` is called with each layer of a long step that the device measures."""

    @abstractmethod
    def copy(self, id: ExpertId, start: int) -> int:
        """Begins to copy an expert into the slot at byte `start` of the arena; steps run meanwhile. The device may take
        the expert for resident in every op of a layer that begins after the copy is complete, also within a step.
        -> a ticket"""

    @abstractmethod
    def done(self, ticket: int) -> bool:
        """Returns whether the copy with this ticket is complete. Raises an error if it has failed."""

    @abstractmethod
    def wait(self, ticket: int) -> None:
        """Returns once the copy with this ticket is complete."""

    @abstractmethod
    def publish(self, id: ExpertId, start: int) -> None:
        """Makes the expert resident, whose copy is complete: from the next step on it is computed from the slot at byte
        `start`."""

    @abstractmethod
    def withdraw(self, id: ExpertId) -> None:
        """Makes the expert missing, whose copy is not in flight: from the next step on no op reads its slot."""

    @abstractmethod
    def begin(self, step: int, tokens: Sequence[int], live: Sequence[int]) -> None:
        """To be called before a step. `tokens` has the number of tokens of each data-parallel group, of which the first
        `live` are real; the others are padding."""

    @abstractmethod
    def finish(self) -> None:
        """Returns once the shadow pool's part of the step is done; raises an error if it was not completed."""

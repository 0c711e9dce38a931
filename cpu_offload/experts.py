"""One layer's experts with shadows: the interface that every device implements.

Each expert of the layer has a shadow: its weights in host memory, where the shadow pool can compute it. A resident
expert has a copy of its weights in a slot on the device as well, and the device computes it.
"""

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from umbra.ops.cpu.shadow import BlockShape, ShadowLayer, ShadowPool
from umbra.ops.formats.quantised import Quantised

if TYPE_CHECKING:
    from umbra.ops.cpu._native import SplitMatrix

INT = torch.int64


class Store(Protocol):
    """One layer's experts in host memory."""

    @property
    def blocks(self) -> BlockShape: ...
    @property
    def addresses(self) -> Tensor: ...
    @property
    def storages(self) -> list[Tensor]: ...
    @property
    def handles(self) -> "tuple[SplitMatrix, SplitMatrix] | None": ...
    def fill(self, expert: int, which: str, part: Tensor | Quantised) -> bool | None: ...
    def fill_bias(self, expert: int, which: str, part: Tensor) -> None: ...


class ShadowedExperts(ABC):
    """An `ops.interface.ExpertMatrices` that keeps the weights in the shadow store and computes the layer's mixture."""

    def __init__(self, pool: ShadowPool, number: int, here: slice, store: Store):
        """`number` is the number of the layer, for error messages; `here` is this rank's slice of the layer's
        experts, which are in `store`."""
        self.pool, self.count = pool, here.stop - here.start
        self.blocks, self.storages = store.blocks, store.storages
        resident, counts, hits, times = (torch.zeros(size, dtype=INT) for size in (self.count, self.count, 1, 4))
        self.layer = ShadowLayer(
            number, store.blocks, store.addresses, resident, counts, hits, times, store, here.start, store.handles
        )
        self.fill, self.fill_bias = store.fill, store.fill_bias
        self.table = resident.numpy()  # a view; writing single elements is faster than through torch
        self.first_expert = here.start
        self.long_ids: Tensor | None = None  # (T, k): the routing of a long step, until the manager takes it

    def share(self, counts: Tensor, hits: Tensor, times: Tensor) -> None:
        """Makes steps write their routing counts (experts), hits (1) and times (4) to these tensors. To be called
        before any capture."""
        self.layer = dataclasses.replace(self.layer, counts=counts, hits=hits, times=times)

    def set_address(self, expert: int, address: int) -> None:
        """Sets the address of the expert on the device; 0: not resident. To be called between two steps."""
        self.table[expert] = address

    def take_long(self) -> Tensor | None:
        """The routing of the last step (T, k) if it was a long one, in numbers of this rank's experts; others lie
        outside."""
        ids, self.long_ids = self.long_ids, None
        return None if ids is None else ids.to("cpu", INT) - self.first_expert

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages)

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """Bytes that one expert takes on the device."""

    @abstractmethod
    def mixture(self, x: Tensor, weights: Tensor, ids: Tensor, first_expert: int | None) -> Tensor:
        """Returns the same as `ops.moe`. The device computes resident experts. The others are computed by the shadow
        pool at the same time, or their weights are streamed to the device."""

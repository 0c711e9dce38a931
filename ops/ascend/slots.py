"""Gathers experts from slots of an arena into a bank, for products that need experts side by side.

arena   | p | p | slot: w13 s13 w2 s2 | slot | p | .. | zeros |     rows of PLACE bytes; blocks: vector_core/blocks.py
                     |                    |              |
bank    w13: | e0 | e1 | e2 | ..   s13: | e0 | e1 | ..   w2: ..      gathered by rows; experts not resident are zeros

`places` (n) int32 holds the first row of each expert's block, or of the zeros. The device reads it, so a replay of a
captured step finds the residents of that moment. A gathered expert is read, written and read again: three times the
traffic of a product that reads the slots themselves (ops/ascend/vector_core/calls.py, moe_slots).
"""

from dataclasses import InitVar, dataclass
from math import prod

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from umbra.base.errors import UserError
from umbra.ops.ascend.vector_core.blocks import PLACE, BlockLayout
from umbra.ops.ascend.weights import Bank, StoredMatrices, Values
from umbra.ops.interface import ExpertKind, fixed

ROW = PLACE // 4  # int32


@dataclass
class Gathered:
    """Matrices of a gathered bank, else as those of `like`; implements ops.ascend.weights.Stored."""

    data: Tensor
    scales: Tensor | None
    offsets: Tensor | None
    bias: Tensor | None
    like: InitVar[StoredMatrices]
    order: Tensor | None

    def __post_init__(self, like: StoredMatrices) -> None:
        self.format, self.role, self.columns, self.planes = like.format, like.role, like.columns, like.planes
        self.values: Values | None = None
        self.gathered = True


@dataclass
class SlotBank:
    """Gathered experts; implements ops.ascend.weights.Bank."""

    count: int
    w13: Gathered
    w2: Gathered
    kind: ExpertKind
    planes: dict[str, Tensor]  # name of a plane in a block -> (count, *shape of the plane)
    number: int = 0


class ArenaSlots:
    """Slots in `memory`, the arena's bytes. A block of zeros, which stands for experts that are not resident, begins at
    byte `zeros`. `like`: experts in the same layout."""

    def __init__(self, memory: Tensor, zeros: int, layout: BlockLayout, like: Bank):
        self.layout, self.like, self.nowhere = layout, like, zeros // PLACE
        order = like.w13.order
        self.order = None if order is None else fixed(order.to(memory.device))
        memory[zeros : zeros + layout.block_bytes] = 0
        # These tensors have storages of their own, because KV caches are in the same memory.
        whole = memory[: len(memory) // PLACE * PLACE]
        self.memory, self.rows = fixed(from_dlpack(whole)), fixed(from_dlpack(whole).view(torch.int32).view(-1, ROW))
        self.indices: dict[int, tuple[Tensor, Tensor]] = {}  # number of experts in a bank -> indices
        sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in layout.planes.items()}
        for name, size in sizes.items():
            if size % PLACE and not name.startswith("w"):  # gathered with the bytes that follow, and cut
                sizes[name] = -(-size // PLACE) * PLACE
            elif size % PLACE:
                raise UserError(
                    f"offload_config.mode: plane {name} of an expert has {size} bytes on this rank, no multiple of "
                    f"{PLACE}: lower moe_tp_size, or choose a smaller quantization.group_size"
                )
        self.sizes = sizes

    def prepare(self, count: int) -> None:
        """Makes the indices that banks of `count` experts need: for each row, the expert and the row of its block."""
        if count in self.indices:
            return
        rows = {name: torch.arange(size // PLACE, dtype=torch.int32) for name, size in self.sizes.items()}
        row = torch.cat([(r + self.layout.offsets[name] // PLACE).repeat(count) for name, r in rows.items()])
        expert = torch.cat([torch.arange(count, dtype=torch.int32).repeat_interleave(len(r)) for r in rows.values()])
        device = self.rows.device
        self.indices[count] = fixed(expert.to(device)), fixed(row.to(device))

    def bank(self, places: Tensor) -> SlotBank:
        """A bank of the experts at `places` (n) int32, in that order; its indices must have been prepared."""
        count = len(places)
        expert, row = self.indices[count]
        rows = self.rows.index_select(0, places.index_select(0, expert) + row)  # (all rows, ROW)
        planes, begin = {}, 0
        for name, (shape, dtype) in self.layout.planes.items():
            end = begin + count * self.sizes[name] // PLACE
            plane = rows[begin:end].view(-1).view(dtype).view(count, -1)
            planes[name] = plane[:, : prod(shape)].contiguous().view(count, *shape)
            begin = end
        return self._bank(count, planes)

    def room(self, count: int) -> SlotBank:
        """A bank that the planes of `count` experts can be copied to."""
        sizes, device = self.layout.planes.items(), self.memory.device
        planes = {name: torch.empty(count, *shape, dtype=dtype, device=device) for name, (shape, dtype) in sizes}
        return self._bank(count, planes)

    def _bank(self, count: int, planes: dict[str, Tensor]) -> SlotBank:
        w13, w2 = (
            Gathered(planes[f"w{n}"], planes.get(f"s{n}"), planes.get(f"z{n}"), planes.get(f"b{n}"), like, order)
            for n, like, order in (("13", self.like.w13, self.order), ("2", self.like.w2, None))
        )
        return SlotBank(count, w13, w2, self.like.kind, planes)

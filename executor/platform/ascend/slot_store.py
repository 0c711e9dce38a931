"""Experts in host memory as the slots of an NPU hold them: the only copy, from which the shadow pool computes
(ops/cpu/csrc/kernels/slots.h) and which goes to the device as plain bytes.

    layer   | e0: w13 s13 w2 s2 | .. to a page | e1: ..      one range of huge pages; blocks: vector_core/blocks.py

A block is whole: a copy to a slot is one piece of memory for each plane. So where the shadow pool has teams on several
NUMA nodes, huge pages lie on them in turn, and threads read other nodes' memory. Rejected: a node's outputs of every
expert, as ops/cpu/store.py has them. Each line of inputs would be cut, and a plane's copy would be thousands of pieces.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops.ascend.vector_core.blocks import BlockLayout
from umbra.ops.ascend.vector_core.planes import planes_of
from umbra.ops.ascend.weights import AscendExperts, unfit
from umbra.ops.cpu.engine import TYPES, native
from umbra.ops.cpu.matrix import code_of, padded
from umbra.ops.cpu.memory import allocate
from umbra.ops.cpu.shadow import ShadowPool
from umbra.ops.formats import Format
from umbra.ops.formats.quantised import Quantised
from umbra.ops.interface import ExpertKind

if TYPE_CHECKING:
    from umbra.ops.cpu._native import SlotExperts, SlotMatrix, SplitMatrix

PAGE = 4096  # blocks begin at whole pages, so that experts are registered with the device one by one
COLUMNS = 32  # activations that are rounded together
HOST = torch.device("cpu")


class SlotBlocks:
    """Blocks of this layout, as ops.cpu.shadow.Blocks."""

    def __init__(self, layout: BlockLayout, format: Format, kind: ExpertKind):
        self.layout, self.format, self.kind = layout, format, kind
        self.inner, self.hidden = layout.inner, layout.hidden
        if format.quantised and (self.inner % COLUMNS or self.hidden % COLUMNS):
            raise UserError(
                f"offload_config.mode: an expert's {self.inner} x {self.hidden} columns on this rank are no multiple "
                f"of {COLUMNS}: lower moe_tp_size"
            )
        self.block_bytes = padded(layout.block_bytes, PAGE)
        w2 = planes_of(self.inner, layout.group2, ordered=True) if layout.in_planes else None
        self.slots: SlotExperts | None = native.SlotExperts(
            w13=self._matrix("13", 2 * self.inner, self.hidden, layout.group),
            w2=self._matrix("2", self.hidden, self.inner, layout.group2),
            order=[] if w2 is None else w2.order().tolist(),
        )

    def handles(self, split: Callable[[int], list[int]]) -> "tuple[SplitMatrix, SplitMatrix]":
        """Nothing: `slots` has both matrices."""
        none = native.Matrix(format=0, n=0, k=0, group=0, quants=0, scales=0, zeros=0)
        return native.SplitMatrix(parts=[none]), native.SplitMatrix(parts=[none])

    def _matrix(self, name: str, n: int, k: int, group: int) -> "SlotMatrix":
        layout, planes = self.layout, None
        if layout.in_planes:
            planes = planes_of(k, group, ordered=name == "2")
        types = {of: layout.planes[of + name][1] for of in ("w", "s", "b") if of + name in layout.planes}
        kind = self.format.kind if self.format.quantised else str(layout.dtype).removeprefix("torch.")
        return native.SlotMatrix(
            format=code_of(kind),
            type=TYPES[types.get("s", layout.dtype)],
            of_bias=TYPES[types.get("b", layout.dtype)],
            n=n,
            k=k,
            group=group,
            groups=planes.groups if planes else 0,
            lanes=planes.lanes if planes else 0,
            unit=planes.unit if planes else 0,
            data=layout.offsets["w" + name],
            scales=layout.offsets.get("s" + name, 0),
            offsets=layout.offsets.get("z" + name, 0),
            bias=layout.offsets.get("b" + name, 0),
        )


def npu_blocks(
    inner: int, hidden: int, format: Format, kind: ExpertKind, dtype: torch.dtype, in_planes: bool = True
) -> SlotBlocks:
    """Blocks of these sizes. `in_planes`: where the vector cores can read the format (see `expert_slot`)."""
    in_planes = in_planes and not unfit(format, hidden, inner, kind)
    return SlotBlocks(BlockLayout.of(inner, hidden, format, dtype, in_planes, kind.biased), format, kind)


class SlotStore:
    """One layer's experts. They are filled as `experts` are, which lie in the same memory."""

    def __init__(
        self,
        count: int,
        inner: int,
        hidden: int,
        format: Format,
        kind: ExpertKind,
        dtype: torch.dtype,
        in_planes: bool,
        pool: ShadowPool,
    ):
        self.blocks = npu_blocks(inner, hidden, format, kind, dtype, in_planes)
        self.layout = self.blocks.layout
        memory = torch.frombuffer(allocate(count * self.blocks.block_bytes, pool.teams), dtype=torch.uint8)
        self.storages, self.handles = [memory], None
        self.memory = memory.view(count, -1)
        self.addresses = memory.data_ptr() + self.blocks.block_bytes * torch.arange(count)
        self.experts = AscendExperts(count, inner, hidden, format, dtype, HOST, self._room(), in_planes, kind=kind)

    def planes(self, expert: int) -> dict[str, Tensor]:
        return self.layout.views(self.memory[expert])

    def fill(self, expert: int, which: str, part: Tensor | Quantised) -> None:
        self.experts.fill(expert, which, part)

    def fill_bias(self, expert: int, which: str, part: Tensor) -> None:
        self.experts.fill_bias(expert, which, part)

    def _room(self) -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
        """Hands out the planes of all experts in the order in which `AscendExperts` asks for them."""
        asked = iter([f"{of}{name}" for name in ("13", "2") for of in "bwsz" if f"{of}{name}" in self.layout.planes])

        def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            name = next(asked)
            one, type = self.layout.planes[name]
            if (shape[1:], dtype) != (one, type):
                raise AssertionError(f"{name} of a block is {type} {one}, not {dtype} {shape[1:]}")
            first, size = self.layout.offsets[name], torch.Size(one).numel() * type.itemsize
            return self.memory[:, first : first + size].view(type).unflatten(1, one)

        return room

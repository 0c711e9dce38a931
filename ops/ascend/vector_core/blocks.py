"""The layout of experts in an arena, one flat buffer of bytes on the device that experts and KV pages share.

An expert is a block of planes. A block begins at a multiple of PLACE bytes, so that an int32 can address it: its place
is its first byte / PLACE, or -1 if the expert is not resident. Each plane begins at the next multiple of PLACE bytes.
H: hidden, I: inner, G, G2: group, group2; ops/ascend/weights.py has the two layouts of 4-bit matrices.

w13   4 bits: (H, 2 I / 8) int32, or in planes    else (H, 2 I) int8, or as all planes below in the model's type
s13           (H / G, 2 I), or in planes               (2 I) with int8: in float32
z13           as s13                              where there are zero points
w2            (I, H / 8) int32, or in planes           (I, H)
s2            (I / G2, H), or in planes                (H) with int8: in a type of ops/ascend/weights.py
z2            as s2                               where there are zero points
b13, b2       (2 I), (H)                          where there are biases: as ops/ascend/weights.py has them
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from umbra.ops.ascend.vector_core.planes import planes_of
from umbra.ops.ascend.weights import bias_type, int8_scales, unfit
from umbra.ops.formats import Format
from umbra.ops.interface import ExpertKind

PLACE = 512  # bytes of a place
WORD = 8  # number of nibbles in an int32
LARGEST_BANK = 2 << 30  # bytes of experts that are gathered at once, of which products may unpack four times as many

PlaneShape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class BlockLayout:
    """The planes of a block. `group` and `group2` are the numbers of rows of w13 and of w2 that share a scale. They are
    0 if the matrices are not quantised; then there are no scales and no zero points. `in_planes`: as planes.py says."""

    inner: int
    hidden: int
    dtype: torch.dtype
    group: int = 0
    group2: int = 0
    zeros: bool = False
    in_planes: bool = False
    biased: bool = False
    int8: bool = False

    @classmethod
    def of(
        cls, inner: int, hidden: int, format: Format, dtype: torch.dtype, in_planes: bool = False, biased: bool = False
    ) -> "BlockLayout":
        int8 = format.spec.int8_inputs
        group = 0 if int8 else format.group
        return cls(inner, hidden, dtype, group, group, format.zeros, in_planes, biased, int8)

    @cached_property
    def planes(self) -> dict[str, PlaneShape]:
        """Shape and type of each plane, in the order of the block."""
        first = self._matrix("13", self.hidden, 2 * self.inner, self.group)
        planes = first | self._matrix("2", self.inner, self.hidden, self.group2)
        if self.biased:
            dtype = bias_type(self.dtype)
            planes |= {"b13": ((2 * self.inner,), dtype), "b2": ((self.hidden,), dtype)}
        return planes

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The first byte of each plane in the block."""
        return self._placed[0]

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block, a multiple of PLACE."""
        return self._placed[1]

    def views(self, block: Tensor) -> dict[str, Tensor]:
        """Views of the planes of `block`, (bytes) uint8."""
        return {
            name: block[self.offsets[name] :][: _bytes(plane)].view(plane[1]).view(plane[0])
            for name, plane in self.planes.items()
        }

    def _matrix(self, name: str, rows: int, columns: int, group: int) -> dict[str, PlaneShape]:
        if self.int8:
            dtype = int8_scales(self.dtype, down=name == "2")
            return {f"w{name}": ((rows, columns), torch.int8), f"s{name}": ((columns,), dtype)}
        if not group:
            return {f"w{name}": ((rows, columns), self.dtype)}
        words: PlaneShape = (rows, columns // WORD), torch.int32
        scales: PlaneShape = (rows // group, columns), self.dtype
        if self.in_planes:
            planes = planes_of(rows, group, ordered=name == "2")
            words = planes.words_shape(columns), torch.uint8
            scales = planes.scales_shape(columns), self.dtype
        quantised = {f"w{name}": words, f"s{name}": scales}
        return quantised | ({f"z{name}": scales} if self.zeros else {})

    @cached_property
    def _placed(self) -> tuple[dict[str, int], int]:
        offsets, end = {}, 0
        for name, plane in self.planes.items():
            offsets[name] = end
            end += -(-_bytes(plane) // PLACE) * PLACE
        return offsets, end


def expert_slot(inner: int, hidden: int, format: Format, kind: ExpertKind, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes, alignment) of one expert's slot. Where the vector cores can read the format, it is counted in planes,
    which take as much as rows or more: without their kernels, a slot may be smaller."""
    in_planes = not unfit(format, hidden, inner, kind)
    return BlockLayout.of(inner, hidden, format, dtype, in_planes, kind.biased).block_bytes, PLACE


def parts_of(count: int, block_bytes: int) -> list[slice]:
    """`count` experts in as few parts, about as large, as have at most LARGEST_BANK bytes and two experts or more."""
    parts = min(-(-count * block_bytes // LARGEST_BANK), count // 2) or 1
    ends = [count * part // parts for part in range(parts + 1)]
    return list(map(slice, ends[:-1], ends[1:]))


def _bytes(plane: PlaneShape) -> int:
    shape, dtype = plane
    return prod(shape) * dtype.itemsize

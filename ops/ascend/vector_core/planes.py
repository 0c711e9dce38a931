"""The layout in which the vector cores read 4-bit matrices: K in lanes, in planes.

A vector instruction multiplies `lanes` weights of one column by as many values of x; a plane holds `lanes` rows of K
for every column. All weights of a lane belong to one group of K, in all planes, so a lane's products are added up over
the planes before they are multiplied by a scale. A column of K is cut into sections of `groups` groups, each of which
has `planes` planes:

    k = (section * groups + g) * group + (t * planes + p) * unit + u    in plane p, lane (t * groups + g) * unit + u

w       (sections * planes, N, lanes / 2) uint8: two signed nibbles in a byte, the even lane in the lower half
scales  (sections, N, kept), in the model's type; zeros likewise. kept: groups, or the next multiple of 8, filled with
        0

w13 has PAIRS columns of gate and PAIRS of up in turns, in the order in which w2 has its K.

`unit` is 8 if a section has 16 groups or fewer, and 1 otherwise. With 8, a group's lanes fill whole blocks of 32 bytes
of floats, which one instruction adds up.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

LANES = 128  # most lanes of a plane: the halves of a vector
SECTION = 4096  # most rows of K in a section
BLOCK = 16  # halves in 32 bytes: lanes are whole blocks
MOST_ROWS, MOST_INNER = 8192, 4096  # most values of K in a kernel's buffers; of w2
PAIRS = 16  # columns of gate, and of up, that lie side by side


@dataclass(frozen=True)
class Planes:
    sections: int
    groups: int
    planes: int
    lanes: int
    unit: int
    group: int

    @property
    def kept(self) -> int:
        return self.groups if self.unit == 1 else -(-self.groups // 8) * 8

    @property
    def rows(self) -> int:
        """Number of values of K."""
        return self.sections * self.planes * self.lanes

    def words_shape(self, columns: int) -> tuple[int, int, int]:
        return self.sections * self.planes, columns, self.lanes // 2

    def scales_shape(self, columns: int) -> tuple[int, int, int]:
        return self.sections, columns, self.kept

    def order(self) -> Tensor:
        """The k of each plane and lane, (K)."""
        shape = self.sections, self.groups, self.lanes // (self.groups * self.unit), self.planes, self.unit
        return torch.arange(self.rows).view(shape).permute(0, 3, 2, 1, 4).flatten()

    def pack(self, nibbles: Tensor) -> Tensor:
        """Words of signed nibbles (m, K)."""
        lanes = (nibbles[:, self.order().to(nibbles.device)] & 15).to(torch.uint8)
        planes = lanes.view(len(nibbles), -1, self.lanes // 2, 2)
        return (planes[..., 0] | planes[..., 1] << 4).transpose(0, 1)

    def unpack(self, words: Tensor) -> Tensor:
        """The signed nibbles (..., N, K) int8 of words (..., planes, N, lanes / 2), K in the order of planes."""
        nibbles = torch.stack((words & 15, words >> 4), -1).view(torch.int8).flatten(-2)
        return ((nibbles ^ 8) - 8).transpose(-3, -2).flatten(-2)

    def keep(self, scales: Tensor) -> Tensor:
        """Scales or zero points (m, K / group) as they are kept, (sections, m, kept)."""
        own = scales.view(len(scales), self.sections, self.groups).transpose(0, 1)
        return torch.nn.functional.pad(own, (0, self.kept - self.groups))

    def spread(self, kept: Tensor) -> Tensor:
        """Scales or zero points (..., sections, N, kept) for each weight, (..., N, K) in the order of planes."""
        lanes = kept[..., : self.groups].repeat_interleave(self.unit, -1)
        lanes = lanes.repeat((1,) * (lanes.dim() - 1) + (self.lanes // lanes.shape[-1],))
        return lanes.transpose(-3, -2).repeat_interleave(self.planes, -2).flatten(-2)


@cache
def planes_of(rows: int, group: int, ordered: bool = False) -> Planes:
    """The layout of a matrix of `rows` values of K. A kernel brings the values that it multiplies with more than 16
    groups into order by transposing blocks of 16, unless they come `ordered` already."""
    count = rows // group
    for groups in range(min(count, LANES, SECTION // group), 0, -1):
        unit = 8 if groups <= 16 else 1
        if count % groups or (unit == 1 and groups % (8 if ordered else BLOCK)):
            continue
        split = 1 << (min(group, LANES // groups).bit_length() - 1)  # lanes of a group
        if groups * split % BLOCK == 0:
            return Planes(count // groups, groups, group // split, groups * split, unit, group)
    raise ValueError(f"{rows} rows in groups of {group}")

"""The shadow store: one layer's packed experts, near the threads that compute them.

Every expert is divided by rows over the NUMA nodes of the shadow pool, as the main pool's matrices are (see
csrc/kernels/matrix.h for why not by whole experts). Each node has one region with its rows of all experts in turn:

    node 0   | e0: w13 quants, scales, w2 quants, scales | e1 ...       `stride` bytes per expert on every node, so that
    node 1   | e0: the following rows of the same planes | e1 ...       one address and fixed offsets locate an expert

A layer is then one range of huge pages on each node. Rejected: whole blocks whose pages are bound to nodes by rows. A
node's part of a plane is tens of kilobytes, which pages of 64 KB do not divide; an expert would need 16 ranges, where a
process may have 65,530 in all; and huge pages would be impossible. The price: a block is in one piece on the device, so
a copy to the device consists of one piece for each plane and node, or of a single piece where there is one node.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from umbra.ops.cpu.matrix import ALIGNMENT, MatrixView, padded, write_bias
from umbra.ops.cpu.memory import allocate
from umbra.ops.cpu.shadow import UNITS, BytePiece, ExpertBlocks, Pieces, ShadowPool
from umbra.ops.formats.quantised import Quantised

if TYPE_CHECKING:
    from umbra.ops.cpu._native import SplitMatrix


@dataclass(frozen=True)
class Plane:
    """A node's rows of one plane of an expert."""

    name: str  # of the matrix: w13 or w2
    offset: int  # offset in a whole block
    start: int  # offset in the node's part of the expert
    nbytes: int


class ExpertStore:
    """One layer's experts: `fill` writes one, the pool's kernels read through `handles`, a Copier copies
    `store[expert]`."""

    def __init__(self, count: int, blocks: ExpertBlocks, pool: ShadowPool):
        self.blocks = blocks
        self.firsts = {
            name: [unit * i for i in pool.native.split(count=blocks.shapes[name][0] // unit)]
            for name, unit in UNITS.items()
        }
        parts = [list(self._planes(team)) for team in range(len(pool.teams))]
        ends = [padded(planes[-1].start + planes[-1].nbytes, ALIGNMENT) for planes in parts]
        stride = max(ends)
        # Zeroed memory: padding must add nothing.
        self.buffers = [allocate(count * stride, team) for team in pool.teams]
        self.storages = [
            torch.frombuffer(buffer, dtype=torch.uint8)[: (count - 1) * stride + end]
            for buffer, end in zip(self.buffers, ends, strict=True)
            if end
        ]
        self.nbytes = sum(storage.nbytes for storage in self.storages)
        self._first, self._stride = self.buffers[0].address, stride
        self.addresses = self._first + stride * torch.arange(count)
        self._parts = [
            (buffer.address - self.buffers[0].address, planes)
            for buffer, planes in zip(self.buffers, parts, strict=True)
        ]
        self._pieces = list(
            joined((plane.offset, away + plane.start, plane.nbytes) for away, planes in self._parts for plane in planes)
        )
        self.handles = self._matrix("w13", 0), self._matrix("w2", 0)

    def __getitem__(self, expert: int) -> Pieces:
        return Pieces(self._first + expert * self._stride, self._pieces, self.blocks.block_bytes, self.buffers)

    def fill(self, expert: int, which: str, part: Tensor | Quantised) -> bool:
        """Writes all of "gate", "up" or "down" of an expert."""
        name, row, step = self.blocks.rows_of(which)
        handle = self._matrix(name, int(self.addresses[expert]))
        return MatrixView(handle, self.blocks.formats[name], self.blocks.shapes[name][1]).fill(0, row, part, step)

    def fill_bias(self, expert: int, which: str, part: Tensor) -> None:
        """Writes all of the bias of "gate", "up" or "down" of an expert."""
        name, row, step = self.blocks.rows_of(which)
        at = expert * self._stride
        parts = []
        for (_, planes), buffer in zip(self._parts, self.buffers, strict=True):
            bias = [plane for plane in planes if plane.name == name][-1]
            if bias.nbytes:  # else the node has no rows
                first = at + bias.start
                parts.append(torch.frombuffer(buffer, dtype=torch.float32, offset=first, count=bias.nbytes // 4))
        write_bias(parts, row, part, step)

    def _planes(self, team: int) -> Iterator[Plane]:
        at = 0
        for name, firsts in self.firsts.items():
            first, end = firsts[team : team + 2]
            before, sizes = (self.blocks.planes(name, rows) for rows in (first, end - first))
            for whole, skipped, size in zip(self.blocks.offsets[name], before, sizes, strict=True):
                yield Plane(name, whole + skipped, at, size)
                at += padded(size, ALIGNMENT)

    def _matrix(self, name: str, address: int) -> "SplitMatrix":
        starts = [[address + away + p.start for p in planes if p.name == name] for away, planes in self._parts]
        return self.blocks.matrix(name, list(pairwise(self.firsts[name])), starts)


def joined(pieces: Iterator[BytePiece]) -> Iterator[BytePiece]:
    """`pieces` with neighbours merged that are contiguous in both places."""
    last: BytePiece | None = None
    for offset, start, size in pieces:
        if last and offset - start == last[0] - last[1]:
            last = last[0], last[1], offset + size - last[0]
        elif size:
            if last:
                yield last
            last = offset, start, size
    if last:
        yield last

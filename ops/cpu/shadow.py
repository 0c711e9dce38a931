"""Experts that lie anywhere in memory, a block each, computed by two pools at once (csrc/shadow.h).

One layer's mixture, eager or on a tape:

    job = submit(pool, layer, x, ids)  # the shadow pool starts on the experts that are not resident
    resident_rows(job)                 # meanwhile the engine computes the others
    out = join(job, weights)           # waits, and adds up all rows: bit for bit what ops.moe gives

Tables are written in place between steps, never while ops run. Before each step the caller says `pool.count_step()`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from errors import UserError
from ops.cpu import traced
from ops.cpu.engine import native, pointer
from ops.cpu.matrix import ALIGNMENT, BLOCK, CODES, ROWS, MatrixView, padded, plane_bytes
from ops.interface import Format
from ops.quantised import Quantised

INT = torch.int64
UNITS = {"w13": 2 * BLOCK, "w2": ROWS}  # rows that stay on one NUMA node


class ExpertBlocks:
    """The layout of an expert's block: w13 as NativeExperts orders it, then w2, each quants, scales and zero points,
    each plane from a multiple of 64 on. Blocks begin at multiples of 64 and can be copied as they are."""

    def __init__(self, inner: int, hidden: int, format: Format):
        for columns in (hidden, inner):
            if format.group and columns % format.group:
                where = f"an expert's {columns} columns"
                raise UserError(f"quantization: {where} cannot be cut into groups of {format.group}")
        self.inner, self.hidden, self.format = padded(inner, BLOCK), hidden, format
        self.shapes = {"w13": (2 * self.inner, hidden), "w2": (padded(hidden, ROWS), self.inner)}
        sizes = [size for rows, columns in self.shapes.values() for size in plane_bytes(rows * columns, format)]
        starts = [0, *accumulate(padded(size, ALIGNMENT) for size in sizes)]
        self.offsets = {"w13": starts[:3], "w2": starts[3:6]}
        self.block_bytes = starts[6]
        self._handles: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def fill(self, address: int, which: str, part: Tensor | Quantised) -> None:
        """Put all of "gate", "up" or "down" into the block at `address`, which was zeroed."""
        view, row, step = self._view(address, which)
        view.fill(0, row, part, step)

    def dequantised(self, address: int, which: str) -> Tensor:
        """What is stored, as float32, padding included."""
        view, row, step = self._view(address, which)
        return view.dequantised(0, self.hidden if which == "down" else self.inner, row, step)

    def _view(self, address: int, which: str) -> tuple[MatrixView, int, int]:
        name = "w2" if which == "down" else "w13"
        view = MatrixView(self._split(name, [0, self.shapes[name][0]], address), self.format, self.shapes[name][1])
        return view, ROWS * (which == "up"), 1 if which == "down" else 2

    def handles(self, split: Callable[[int], list[int]]) -> tuple[Any, Any]:
        """w13 and w2 of a block at address 0, their rows divided over the teams of a pool by its `split`."""
        firsts = {name: split(self.shapes[name][0] // unit) for name, unit in UNITS.items()}
        key = (*firsts["w13"], *firsts["w2"])
        if key not in self._handles:
            w13, w2 = (self._split(name, [unit * i for i in firsts[name]], 0) for name, unit in UNITS.items())
            self._handles[key] = w13, w2
        return self._handles[key]

    def _split(self, name: str, firsts: list[int], address: int) -> Any:
        columns, parts = self.shapes[name][1], []
        absent = [not size for size in plane_bytes(columns * ROWS, self.format)]
        for first, end in pairwise(firsts):
            skipped = plane_bytes(first * columns, self.format)
            places = [address + o + s for o, s in zip(self.offsets[name], skipped, strict=True)]
            places = [0 if none else place for none, place in zip(absent, places, strict=True)]
            parts.append(native().Matrix(CODES[self.format.kind], end - first, columns, self.format.group, *places))
        return native().SplitMatrix(parts)


class ShadowPool:
    """Threads that compute what is not resident, with the kernels that the engine has now. `timeout`: seconds after
    which a wait for them is an error that names layer and `step`, which the caller counts before each step."""

    def __init__(self, teams: Sequence[Any], timeout: float = 30):
        self.step = torch.zeros(1, dtype=INT)
        self._step = self.step.numpy()
        self.native = native().ShadowPool(list(teams), timeout)

    def count_step(self) -> None:
        self._step[0] += 1  # not by torch, which takes longer

    def stop(self) -> None:
        """Ends the threads after the work that they are at; later steps that need them fail."""
        self.native.stop()


@dataclass(frozen=True)
class ShadowLayer:
    """What one layer's mixture reads and writes at fixed addresses; tables are (experts) int64 addresses of blocks."""

    number: int
    blocks: ExpertBlocks
    store: Tensor  # of every expert's block in the shadow store; never changes
    device: Tensor  # of the resident ones' blocks; 0: not resident
    counts: Tensor  # (experts) int64: += 1 for each time that a token is routed to the expert
    times: (
        Tensor  # (4) int64, of the last step: when the pool began and ended, `join` came and went on, ns; 0: unneeded
    )
    memory: object  # what the addresses of `store` point into
    first_expert: int = 0


@dataclass(frozen=True)
class Job:
    """One mixture between `submit` and `join`."""

    pool: ShadowPool
    layer: ShadowLayer
    work: Any
    resident: Any
    rows: Tensor  # (T * k, hidden)
    kept: tuple[Tensor, ...]


@traced
def submit(pool: ShadowPool, layer: ShadowLayer, x: Tensor, ids: Tensor) -> Job:
    """Counts the routing of x (T, hidden) to ids (T, k) and hands what is not resident to the pool; returns at once."""
    (tokens, top_k), blocks, experts = ids.shape, layer.blocks, len(layer.store)
    rows = torch.empty(tokens * top_k, blocks.hidden)
    bytes_each = native().moe_scratch(tokens, top_k, experts, blocks.hidden, blocks.inner)
    ours, theirs = (torch.empty(bytes_each, dtype=torch.uint8) for _ in range(2))
    sizes = tokens, top_k, experts, layer.first_expert, blocks.hidden, blocks.inner
    device, common = pointer(layer.device, INT), (pointer(x), pointer(ids, INT), pointer(rows))
    resident = native().MoeRows(*blocks.handles(native().split), device, 0, *common, pointer(ours, torch.uint8), *sizes)
    shadow = native().MoeRows(
        *blocks.handles(pool.native.split), pointer(layer.store, INT), device, *common, pointer(theirs, torch.uint8),
        *sizes,
    )  # fmt: skip
    kept = (x, ids, rows, ours, theirs)
    work = native().ShadowWork(shadow, layer.number, pointer(pool.step, INT), (kept, layer, pool.step))
    native().submit(pool.native, work, pointer(layer.counts, INT))
    return Job(pool, layer, work, resident, rows, kept)


@traced
def resident_rows(job: Job) -> None:
    """Computes the rows of the resident experts, on the engine's own pool."""
    native().moe_rows(job.resident)


@traced
def join(job: Job, weights: Tensor) -> Tensor:
    """Waits for the shadow pool and adds up all rows, weighted by (T, k). -> (T, hidden)"""
    out = torch.empty(len(weights), job.layer.blocks.hidden)
    native().join(job.pool.native, job.work, pointer(weights), pointer(out), pointer(job.layer.times, INT))
    return out


class Copier:
    """A thread that copies blocks, one after another. What it still has to read or write stays alive."""

    def __init__(self) -> None:
        self.native = native().Copier()  # first, so that it ends before what it copies is let go
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def submit(self, to: Tensor, source: Tensor) -> int:
        """A ticket for a copy of `source`, bytes as many as `to` has."""
        if len(to) != len(source):
            raise ValueError(f"a copy of {len(source)} bytes to {len(to)}")
        addresses = pointer(to, torch.uint8), pointer(source, torch.uint8)
        ticket: int = self.native.submit(*addresses, len(to))
        self._kept[ticket] = to, source
        return ticket

    def done(self, ticket: int) -> bool:
        """Whether it is made; an error once the copier was stopped and it will not be."""
        if done := self.native.done(ticket):
            self._kept.pop(ticket, None)
        return bool(done)

    def wait(self, ticket: int) -> None:
        self.native.wait(ticket)
        self._kept.pop(ticket, None)

    def stop(self) -> None:
        """Ends the thread after the copy that it is at; those behind it are errors."""
        self.native.stop()

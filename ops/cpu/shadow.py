"""Experts that lie anywhere in memory, a block each, computed by two pools at once (csrc/shadow/shadow.h).

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
from ops.cpu.engine import TYPES, native, own_cpus, pointer
from ops.cpu.matrix import ALIGNMENT, BLOCK, CODES, ROWS, MatrixView, padded, plane_bytes
from ops.format import Format, Quantised

INT = torch.int64
MODEL_TYPES = torch.float32, torch.bfloat16, torch.float16
Piece = tuple[int, int, int]  # place in the whole, place from an address on, bytes
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

    def rows_of(self, which: str) -> tuple[str, int, int]:
        """The matrix that has "gate", "up" or "down", its first row there, the step as MatrixView has it."""
        return "w2" if which == "down" else "w13", ROWS * (which == "up"), 1 if which == "down" else 2

    def _view(self, address: int, which: str) -> tuple[MatrixView, int, int]:
        name, row, step = self.rows_of(which)
        view = MatrixView(self._split(name, [0, self.shapes[name][0]], address), self.format, self.shapes[name][1])
        return view, row, step

    def handles(self, split: Callable[[int], list[int]]) -> tuple[Any, Any]:
        """w13 and w2 of a block at address 0, their rows divided over the teams of a pool by its `split`."""
        firsts = {name: split(self.shapes[name][0] // unit) for name, unit in UNITS.items()}
        key = (*firsts["w13"], *firsts["w2"])
        if key not in self._handles:
            w13, w2 = (self._split(name, [unit * i for i in firsts[name]], 0) for name, unit in UNITS.items())
            self._handles[key] = w13, w2
        return self._handles[key]

    def _split(self, name: str, firsts: list[int], address: int) -> Any:
        ranges, starts = list(pairwise(firsts)), []
        for first, _ in ranges:
            skipped = plane_bytes(first * self.shapes[name][1], self.format)
            starts.append([address + o + s for o, s in zip(self.offsets[name], skipped, strict=True)])
        return self.matrix(name, ranges, starts)

    def matrix(self, name: str, ranges: list[tuple[int, int]], starts: list[list[int]]) -> Any:
        """A native SplitMatrix of row ranges (first, end), whose planes are at `starts`: addresses, or distances from
        one, negative ones too."""
        columns, parts = self.shapes[name][1], []
        absent = [not size for size in plane_bytes(columns * ROWS, self.format)]
        for (first, end), planes in zip(ranges, starts, strict=True):
            places = [0 if none else place % (1 << 64) for none, place in zip(absent, planes, strict=True)]
            parts.append(native().Matrix(CODES[self.format.kind], end - first, columns, self.format.group, *places))
        return native().SplitMatrix(parts)


class ShadowPool:
    """Threads that compute what is not resident, with the kernels that the engine has now. `timeout`: seconds after
    which a wait for them is an error that names layer and `step`, which the caller counts before each step."""

    def __init__(self, teams: Sequence[Any], timeout: float = 30):
        self.step, self.teams = torch.zeros(1, dtype=INT), list(teams)
        self._step = self.step.numpy()
        self.native = native().ShadowPool(self.teams, timeout)

    def count_step(self) -> None:
        self._step[0] += 1  # not by torch, which takes longer

    def stop(self) -> None:
        """Ends the threads after the work that they have; later steps that need them fail."""
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
    handles: tuple[Any, Any] | None = None  # w13 and w2 as the shadow pool finds them at `store`; None: in whole blocks

    def shadows(self, pool: ShadowPool) -> tuple[Any, Any]:
        return self.handles or self.blocks.handles(pool.native.split)


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
    job = prepare(pool, layer, x, ids)
    native().submit(pool.native, job.work, pointer(layer.counts, INT))
    return job


def prepare(pool: ShadowPool, layer: ShadowLayer, x: Tensor, ids: Tensor) -> Job:
    """The mixture with nothing handed over and nothing counted: `join` waits for nobody. The caller may point
    `layer.device` at one set of experts after another, each followed by `resident_rows`."""
    (tokens, top_k), blocks, experts = ids.shape, layer.blocks, len(layer.store)
    rows = torch.empty(tokens * top_k, blocks.hidden)
    bytes_each = native().moe_scratch(tokens, top_k, experts, blocks.hidden, blocks.inner)
    ours, theirs = (torch.empty(bytes_each, dtype=torch.uint8) for _ in range(2))
    sizes = tokens, top_k, experts, layer.first_expert, blocks.hidden, blocks.inner
    device, common = pointer(layer.device, INT), (pointer(x), pointer(ids, INT), pointer(rows))
    resident = native().MoeRows(*blocks.handles(native().split), device, 0, *common, pointer(ours, torch.uint8), *sizes)
    shadow = native().MoeRows(
        *layer.shadows(pool), pointer(layer.store, INT), device, *common, pointer(theirs, torch.uint8),
        *sizes,
    )  # fmt: skip
    kept = (x, ids, rows, ours, theirs)
    work = native().ShadowWork(shadow, layer.number, pointer(pool.step, INT), (kept, layer, pool.step))
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


class Worker:
    """The pool for a bridge (ops/ascend/bridge.py), whose `submit` and `context` these are: each job's sums over the
    experts that are not resident, in the model's type (csrc/shadow/worker.h). It must outlive the bridge."""

    def __init__(self, pool: ShadowPool):
        self.pool, self.native = pool, native().Worker(pool.native)
        self.submit: int = self.native.submit
        self.context: int = self.native.context
        self._scratch: dict[tuple[int, ...], tuple[Tensor, ...]] = {}  # by sizes: jobs come one after another
        # By a job's tokens: (tokens) uint8, written between steps; 0: it pads the step, nothing is counted or added.
        self.live: dict[int, Tensor] = {}

    def layer(self, layer: ShadowLayer, tokens: int, top_k: int, dtype: torch.dtype) -> None:
        """Gets ready for the layer's jobs of so many tokens; not while a step runs. A job's slots say which experts are
        resident, not `layer.device`."""
        if dtype not in MODEL_TYPES:
            raise TypeError(f"a job in {dtype}")
        blocks, experts = layer.blocks, len(layer.store)
        sizes = tokens, top_k, experts, layer.first_expert, blocks.hidden, blocks.inner
        if sizes not in self._scratch:
            bytes_needed = native().moe_scratch(tokens, top_k, experts, blocks.hidden, blocks.inner)
            self._scratch[sizes] = (
                torch.empty(tokens, blocks.hidden), torch.empty(tokens, top_k, dtype=INT),
                torch.empty(tokens * top_k, blocks.hidden), torch.empty(bytes_needed, dtype=torch.uint8),
            )  # fmt: skip
        x, ids, rows, scratch = kept = self._scratch[sizes]
        work = native().MoeRows(
            *layer.shadows(self.pool), pointer(layer.store, INT), 0, pointer(x), pointer(ids, INT),
            pointer(rows), pointer(scratch, torch.uint8), *sizes,
        )  # fmt: skip
        live = self.live.setdefault(tokens, torch.ones(tokens, dtype=torch.uint8))
        tables = pointer(live, torch.uint8), pointer(layer.counts, INT), pointer(layer.times, INT)
        self.native.add(work, layer.number, TYPES[dtype], *tables, (kept, layer, live))


@dataclass(frozen=True)
class Pieces:
    """A block that lies in pieces."""

    address: int
    pieces: list[Piece]
    nbytes: int  # of the whole
    memory: object  # what the address points into

    def __len__(self) -> int:
        return self.nbytes


class Copier:
    """A thread that copies blocks, one after another. What it still has to read or write stays alive."""

    def __init__(self) -> None:
        self.native = native().Copier(own_cpus())  # first, so that it ends before what it copies is let go
        self._kept: dict[int, tuple[Tensor, Pieces]] = {}

    def submit(self, to: Tensor, source: Tensor | Pieces) -> int:
        """A ticket for a copy of `source`, bytes as many as `to` has."""
        if len(to) != len(source):
            raise ValueError(f"a copy of {len(source)} bytes to {len(to)}")
        if isinstance(source, Tensor):
            source = Pieces(pointer(source, torch.uint8), [(0, 0, len(source))], len(source), source)
        ticket: int = self.native.submit(pointer(to, torch.uint8), source.address, source.pieces)
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

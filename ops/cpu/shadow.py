"""Experts that lie anywhere in memory, one block each, computed by two pools at once (csrc/shadow/shadow.h).

One layer's mixture, eager or on a tape:

    job = submit(pool, layer, x, ids)  # the shadow pool starts on the experts that are not resident
    resident_rows(job)                 # meanwhile the engine computes the resident ones
    out = join(job, weights)           # waits, and adds up all rows: bit for bit the result of ops.moe

The caller writes tables in place between steps, never while ops run, and calls `pool.count_step()` before each step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops.cpu.engine import TYPES, native, own_cpus, pointer
from umbra.ops.cpu.matrix import ALIGNMENT, BLOCK, ROWS, MatrixView, code_of, padded, plane_bytes
from umbra.ops.cpu.ops import traced
from umbra.ops.formats import Format
from umbra.ops.formats.quantised import Quantised
from umbra.ops.interface import SILU_EXPERTS, ExpertKind

if TYPE_CHECKING:
    from umbra.ops.cpu._native import MoeRows, ShadowWork, SlotExperts, SplitMatrix, Team

INT = torch.int64
MODEL_TYPES = torch.float32, torch.bfloat16, torch.float16
BytePiece = tuple[int, int, int]  # offset in the whole block, offset from a base address, bytes
UNITS = {"w13": 2 * BLOCK, "w2": ROWS}  # rows that stay on one NUMA node


class BlockShape(Protocol):
    """The layout of an expert's block. `slots`: matrices as the slots of another device hold them, in place of those of
    `handles`, which are w13 and w2 of a block at address 0 with rows divided over the teams of a pool."""

    hidden: int
    inner: int
    kind: ExpertKind
    block_bytes: int
    slots: "SlotExperts | None"

    def handles(self, split: Callable[[int], list[int]]) -> "tuple[SplitMatrix, SplitMatrix]": ...


class ExpertBlocks:
    """The layout of an expert's block: the planes of w13 (quants, scales, zero points, bias), in NativeExperts' row
    order, then the planes of w2. Planes and blocks begin at multiples of 64 bytes; a block may be copied as plain
    bytes."""

    slots: "SlotExperts | None" = None

    def __init__(self, inner: int, hidden: int, format: Format, kind: ExpertKind = SILU_EXPERTS):
        self.formats = {"w13": format, "w2": format.down or format}
        for columns, kept in zip((hidden, inner), self.formats.values(), strict=True):
            if kept.group and columns % kept.group:
                where = f"an expert's {columns} columns"
                raise UserError(f"quantization: {where} cannot be cut into groups of {kept.group}")
        self.inner, self.hidden, self.kind = padded(inner, BLOCK), hidden, kind
        self.shapes = {"w13": (2 * self.inner, hidden), "w2": (padded(hidden, ROWS), self.inner)}
        sizes = [size for name in self.shapes for size in self.planes(name, self.shapes[name][0])]
        starts = [0, *accumulate(padded(size, ALIGNMENT) for size in sizes)]
        self.offsets = {"w13": starts[:4], "w2": starts[4:8]}
        self.block_bytes = starts[8]
        self._handles: dict[tuple[int, ...], tuple[SplitMatrix, SplitMatrix]] = {}

    def planes(self, name: str, rows: int) -> list[int]:
        """Sizes of the planes of so many rows of w13 or w2."""
        return plane_bytes(rows, self.shapes[name][1], self.formats[name], self.kind.biased)

    def fill(self, address: int, which: str, part: Tensor | Quantised) -> bool:
        """Writes all of "gate", "up" or "down" into the block at `address`, which must be zeroed memory."""
        view, row, step = self._view(address, which)
        return view.fill(0, row, part, step)

    def dequantised(self, address: int, which: str) -> Tensor:
        """The matrix in the block at `address`, dequantised to float32, padding included."""
        view, row, step = self._view(address, which)
        return view.dequantised(0, self.hidden if which == "down" else self.inner, row, step)

    def rows_of(self, which: str) -> tuple[str, int, int]:
        """Returns where "gate", "up" or "down" is stored: matrix, first row, and step as MatrixView.fill takes it."""
        return "w2" if which == "down" else "w13", ROWS * (which == "up"), 1 if which == "down" else 2

    def _view(self, address: int, which: str) -> tuple[MatrixView, int, int]:
        name, row, step = self.rows_of(which)
        split = self._split(name, [0, self.shapes[name][0]], address)
        view = MatrixView(split, self.formats[name], self.shapes[name][1])
        return view, row, step

    def handles(self, split: Callable[[int], list[int]]) -> "tuple[SplitMatrix, SplitMatrix]":
        """w13 and w2 of a block at address 0, with rows divided over the teams of the pool that `split` belongs to."""
        firsts = {name: split(self.shapes[name][0] // unit) for name, unit in UNITS.items()}
        key = (*firsts["w13"], *firsts["w2"])
        if key not in self._handles:
            w13, w2 = (self._split(name, [unit * i for i in firsts[name]], 0) for name, unit in UNITS.items())
            self._handles[key] = w13, w2
        return self._handles[key]

    def _split(self, name: str, firsts: list[int], address: int) -> "SplitMatrix":
        ranges, starts = list(pairwise(firsts)), []
        for first, _ in ranges:
            skipped = self.planes(name, first)
            starts.append([address + o + s for o, s in zip(self.offsets[name], skipped, strict=True)])
        return self.matrix(name, ranges, starts)

    def matrix(self, name: str, ranges: list[tuple[int, int]], starts: list[list[int]]) -> "SplitMatrix":
        """w13 or w2 by row ranges (first, end) whose planes begin at `starts`: addresses, or offsets from an address,
        which may be negative."""
        columns, format, parts = self.shapes[name][1], self.formats[name], []
        absent = [not size for size in self.planes(name, ROWS)]
        for (first, end), planes in zip(ranges, starts, strict=True):
            quants, scales, zeros, bias = (
                0 if none else start % (1 << 64) for none, start in zip(absent, planes, strict=True)
            )
            parts.append(
                native.Matrix(
                    format=code_of(format.kind),
                    n=end - first,
                    k=columns,
                    group=format.group,
                    quants=quants,
                    scales=scales,
                    zeros=zeros,
                    bias=bias,
                )
            )
        return native.SplitMatrix(parts=parts)


class ShadowPool:
    """Threads that compute the experts that are not resident, with the kernels that the engine uses now. Waiting for
    them longer than `timeout` seconds is an error that names the layer and the number of the step."""

    def __init__(self, teams: "Sequence[Team]", timeout: float = 30):
        self.step, self.teams = torch.zeros(1, dtype=INT), list(teams)
        self._step = self.step.numpy()
        self.native = native.ShadowPool(teams=self.teams, timeout=timeout)

    def count_step(self) -> int:
        """The caller counts each step before it runs. -> the step's number"""
        self._step[0] += 1  # numpy is faster here than torch
        return int(self._step[0])

    def stop(self) -> None:
        """Ends the threads once they have finished the work in flight; later steps that need them fail."""
        self.native.stop()


@dataclass(frozen=True)
class ShadowLayer:
    """The tensors that one layer's mixture reads and writes at fixed addresses. Tables are (experts) int64: each
    expert's block address."""

    number: int
    blocks: BlockShape
    store: Tensor  # table of the blocks in the shadow store; never changes
    device: Tensor  # table of the resident experts' blocks; 0: not resident; `submit` adds those that have arrived
    counts: Tensor  # (experts) int64: += 1 for each time that a token is routed to the expert
    hits: Tensor  # (1) int64: += 1 for each of these whose expert was resident when it was submitted
    times: Tensor  # (4) int64 ns, last step: pool began, pool ended, `join` began to wait, `join` went on; 0: no wait
    memory: object  # owns what the addresses in `store` point to
    first_expert: int = 0
    handles: "tuple[SplitMatrix, SplitMatrix] | None" = None  # w13 and w2 at `store`; None: blocks lie in one piece
    arrived: Tensor | None = None  # table of the blocks that a `Copier` has completed, also while ops run; 0: none

    def shadows(self, pool: ShadowPool) -> "tuple[SplitMatrix, SplitMatrix]":
        """w13 and w2 as the shadow pool reads them, relative to an address of `store`."""
        return self.handles or self.blocks.handles(pool.native.split)


@dataclass(frozen=True)
class ShadowMixture:
    """One mixture in flight, between `submit` and `join`."""

    pool: ShadowPool
    layer: ShadowLayer
    work: "ShadowWork"
    resident: "MoeRows"
    rows: Tensor  # (T * k, hidden)
    kept: tuple[Tensor, ...]  # tensors that both pools read or write


@traced
def submit(pool: ShadowPool, layer: ShadowLayer, x: Tensor, ids: Tensor) -> ShadowMixture:
    """Makes used experts resident whose copies have arrived, counts the routing of x (T, hidden) to ids (T, k) and
    hands the experts that are not resident to the pool. Returns without waiting for them."""
    job = prepare(pool, layer, x, ids)
    native.submit(
        pool=pool.native,
        work=job.work,
        counts=pointer(layer.counts, INT),
        hits=pointer(layer.hits, INT),
        arrived=0 if layer.arrived is None else pointer(layer.arrived, INT),
    )
    return job


def prepare(pool: ShadowPool, layer: ShadowLayer, x: Tensor, ids: Tensor) -> ShadowMixture:
    """The mixture, with nothing counted and nothing handed to the pool, so that `join` does not wait. The caller may
    point `layer.device` at one set of experts after another and call `resident_rows` after each."""
    (tokens, top_k), blocks, experts = ids.shape, layer.blocks, len(layer.store)
    rows = torch.empty(tokens * top_k, blocks.hidden)
    scratch_bytes = scratch_bytes_of(layer, tokens, top_k)
    ours, theirs = (torch.empty(scratch_bytes, dtype=torch.uint8) for _ in range(2))
    device = pointer(layer.device, INT)

    def moe_rows(
        handles: "tuple[SplitMatrix, SplitMatrix]", address: int, elsewhere: int, scratch: Tensor
    ) -> "MoeRows":
        rows_of = native.MoeRows(
            w13=handles[0],
            w2=handles[1],
            address=address,
            elsewhere=elsewhere,
            x=pointer(x),
            ids=pointer(ids, INT),
            rows=pointer(rows),
            scratch=pointer(scratch, torch.uint8),
            tokens=tokens,
            k=top_k,
            experts=experts,
            first_expert=layer.first_expert,
            hidden=blocks.hidden,
            inner=blocks.inner,
            limit=blocks.kind.limit,
            alpha=blocks.kind.alpha,
            gelu=blocks.kind.gelu,
        )
        return rows_of.in_slots(slots=blocks.slots) if blocks.slots else rows_of

    resident = moe_rows(blocks.handles(native.split), device, 0, ours)
    shadow = moe_rows(layer.shadows(pool), pointer(layer.store, INT), device, theirs)
    kept = (x, ids, rows, ours, theirs)
    work = native.ShadowWork(
        rows=shadow, layer=layer.number, step=pointer(pool.step, INT), keep=(kept, layer, pool.step)
    )
    return ShadowMixture(pool, layer, work, resident, rows, kept)


@traced
def resident_rows(job: ShadowMixture) -> None:
    """Computes the rows of the resident experts on the engine's pool."""
    native.moe_rows(rows=job.resident)


@traced
def join(job: ShadowMixture, weights: Tensor) -> Tensor:
    """Waits for the shadow pool and adds up all rows, weighted by (T, k). -> (T, hidden)"""
    out = torch.empty(len(weights), job.layer.blocks.hidden)
    native.join(
        pool=job.pool.native,
        work=job.work,
        weights=pointer(weights),
        out=pointer(out),
        times=pointer(job.layer.times, INT),
    )
    return out


def reaches(pool: ShadowPool) -> bool:
    """Returns whether the engine can compute from the pool's shadow store, because its threads are on the same
    nodes."""
    return [team.memory for team in pool.teams] == [team.memory for team in native.teams()]


def in_place(layer: ShadowLayer, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The whole mixture on the engine's pool, from the blocks of the shadow store, which it must reach: bit for bit the
    result of ops.moe. Counts the routing."""
    (tokens, top_k), blocks, experts = ids.shape, layer.blocks, len(layer.store)
    layer.counts.add_(pairs_of(layer, ids))
    out = torch.empty(tokens, blocks.hidden)
    scratch = torch.empty(scratch_bytes_of(layer, tokens, top_k), dtype=torch.uint8)
    native.moe(
        *(layer.handles or blocks.handles(native.split)),
        pointer(x),
        pointer(weights),
        pointer(ids, INT),
        pointer(out),
        pointer(scratch, torch.uint8),
        tokens,
        top_k,
        experts,
        layer.first_expert,
        blocks.hidden,
        blocks.inner,
        blocks.kind.limit,
        blocks.kind.alpha,
        blocks.kind.gelu,
        pointer(layer.store, INT),
    )
    return out


def pairs_of(layer: ShadowLayer, ids: Tensor) -> Tensor:
    """The number of pairs of each of the layer's experts. (experts)"""
    own, experts = ids.flatten() - layer.first_expert, len(layer.store)
    return own[(own >= 0) & (own < experts)].bincount(minlength=experts)


class BridgeWorker:
    """Lets the bridge of a device use the pool: computes each job's sums over the experts that are not
    resident, in the model's type (csrc/shadow/worker.h). The bridge takes `submit` and `context`; the worker must
    outlive it."""

    def __init__(self, pool: ShadowPool):
        self.pool, self.native = pool, native.Worker(pool=pool.native)
        self.submit: int = self.native.submit
        self.context: int = self.native.context
        self._scratch: dict[tuple[int, ...], tuple[Tensor, ...]] = {}  # by sizes: jobs run one at a time
        # By number of tokens: (tokens) uint8, written between steps; 0: the token only pads the step and is ignored.
        self.live: dict[int, Tensor] = {}

    def note_live(self, tokens: Sequence[int], live: Sequence[int]) -> None:
        """Notes for the next step that of each group's `tokens`, which come one after another, only the first `live`
        count."""
        rows = [int(row < alive) for of_group, alive in zip(tokens, live, strict=True) for row in range(of_group)]
        self.live[len(rows)].copy_(torch.tensor(rows))

    def layer(self, layer: ShadowLayer, tokens: int, top_k: int, dtype: torch.dtype) -> None:
        """Prepares for the layer's jobs with `tokens` tokens; must not be called while a step runs. Each job says which
        experts are resident; `layer.device` is not read."""
        if dtype not in MODEL_TYPES:
            raise TypeError(f"a job in {dtype}")
        blocks, experts = layer.blocks, len(layer.store)
        sizes = tokens, top_k, experts, blocks.hidden, blocks.inner
        if sizes not in self._scratch:
            scratch_bytes = scratch_bytes_of(layer, tokens, top_k)
            self._scratch[sizes] = (
                torch.empty(tokens, blocks.hidden),
                torch.empty(tokens, top_k, dtype=INT),
                torch.empty(tokens * top_k, blocks.hidden),
                torch.empty(scratch_bytes, dtype=torch.uint8),
            )
        x, ids, rows, scratch = kept = self._scratch[sizes]
        w13, w2 = layer.shadows(self.pool)
        work = native.MoeRows(
            w13=w13,
            w2=w2,
            address=pointer(layer.store, INT),
            elsewhere=0,
            x=pointer(x),
            ids=pointer(ids, INT),
            rows=pointer(rows),
            scratch=pointer(scratch, torch.uint8),
            tokens=tokens,
            k=top_k,
            experts=experts,
            first_expert=layer.first_expert,
            hidden=blocks.hidden,
            inner=blocks.inner,
            limit=blocks.kind.limit,
            alpha=blocks.kind.alpha,
            gelu=blocks.kind.gelu,
        )
        work = work.in_slots(slots=blocks.slots) if blocks.slots else work
        live = self.live.setdefault(tokens, torch.ones(tokens, dtype=torch.uint8))
        self.native.add(
            rows=work,
            layer=layer.number,
            type=TYPES[dtype],
            live=pointer(live, torch.uint8),
            counts=pointer(layer.counts, INT),
            hits=pointer(layer.hits, INT),
            times=pointer(layer.times, INT),
            keep=(kept, layer, live),
        )


def scratch_bytes_of(layer: ShadowLayer, tokens: int, top_k: int) -> int:
    """Bytes of scratch memory that a MoeRows of the layer needs."""
    blocks = layer.blocks
    of_both = 8 * tokens * top_k * blocks.inner + ALIGNMENT if blocks.slots else 0  # products of gate and up
    return of_both + native.moe_scratch(
        tokens=tokens, k=top_k, experts=len(layer.store), hidden=blocks.hidden, inner=blocks.inner
    )


@dataclass(frozen=True)
class Pieces:
    """A block in several pieces of memory."""

    address: int  # base of the pieces' offsets
    pieces: list[BytePiece]
    nbytes: int  # of the whole block
    memory: object  # owns what `address` points to

    def __len__(self) -> int:
        return self.nbytes


class Copier:
    """A thread that copies blocks, one after another. Sources and targets of copies in flight are kept alive."""

    def __init__(self) -> None:
        self.native = native.Copier(cpus=own_cpus())  # the first attribute, so that it ends before `_kept` is freed
        self._kept: dict[int, object] = {}

    def submit(self, to: Tensor, source: Tensor | Pieces) -> int:
        """Queues a copy of `source` to `to`, of as many bytes, and returns its ticket."""
        if len(to) != len(source):
            raise ValueError(f"a copy of {len(source)} bytes to {len(to)}")
        if isinstance(source, Tensor):
            source = Pieces(pointer(source, torch.uint8), [(0, 0, len(source))], len(source), source)
        ticket = self.fill(pointer(to, torch.uint8), source)
        self._kept[ticket] = to, source
        return ticket

    def fill(self, address: int, source: Pieces, arrived: int = 0) -> int:
        """Like `submit`, for a target of `len(source)` bytes at `address`, which the caller keeps alive. Takes less
        time. A finished copy writes `address` to the element at `arrived` of a layer's table of this name."""
        ticket = self.native.submit(to=address, source=source.address, pieces=source.pieces, arrived=arrived)
        self._kept[ticket] = source
        return ticket

    def done(self, ticket: int) -> bool:
        """Returns whether the copy is finished. Raises an error if the copier was stopped before."""
        if done := self.native.done(ticket=ticket):
            self._kept.pop(ticket, None)
        return done

    def wait(self, ticket: int) -> None:
        """Blocks until the copy is finished; an error as for `done`."""
        self.native.wait(ticket=ticket)
        self._kept.pop(ticket, None)

    def stop(self) -> None:
        """Ends the thread after the copy in flight; copies still queued become errors."""
        self.native.stop()

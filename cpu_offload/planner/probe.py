"""Measures the costs of the planner's model on synthetic experts: one layer's mixture, replayed on a tape as in a step.

Successive experts use successive blocks, so that the CPU's caches hold as few of them as in a step. The engine's
threads compute the experts that count as resident from the same memory: on platform `cpu`, device and shadow pool share
it.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from umbra.cpu_offload.costs import Costs, Line
from umbra.cpu_offload.planner.model import ExpertsShape, LayerSample, fit, slip_of
from umbra.ops.cpu.engine import Tape, native
from umbra.ops.cpu.shadow import (
    BlockShape,
    Copier,
    ShadowLayer,
    ShadowMixture,
    ShadowPool,
    in_place,
    join,
    reaches,
    resident_rows,
    submit,
)

INT = torch.int64
LEAST, MOST = 2, 25  # fewest and most calls of one kind of measurement, after a first call that warms up
QUEUED = 8  # copies in flight at once
BYTE = 0x3C  # synthetic blocks consist of it: a small, normal number in every format
MOST_BYTES = 256 << 20  # most bytes of synthetic blocks: more than most caches hold, and written within a second
READ = 16 << 20  # bytes that each thread reads where its speed of reading is measured
LONG = 64  # tokens of the step that represents prefills


def made_up(blocks: BlockShape, experts: int) -> Tensor:
    """Returns as many of `experts` blocks as fit into MOST_BYTES bytes, at least QUEUED of them: (blocks, block
    bytes)."""
    count = min(experts, max(MOST_BYTES // blocks.block_bytes, QUEUED))
    buffer = native.Buffer(bytes=count * blocks.block_bytes, team=0)
    return torch.frombuffer(buffer, dtype=torch.uint8).fill_(BYTE).view(count, blocks.block_bytes)


class Probe:
    """One layer's mixture of `tokens` tokens; each call takes its experts from the next blocks of `memory`. Where these
    are fewer than the experts, several experts share a block."""

    def __init__(
        self,
        pool: ShadowPool,
        blocks: BlockShape,
        memory: Tensor,
        shape: ExpertsShape,
        tokens: int,
        eager: bool = False,
    ):
        """`eager`: op by op, as in a long step."""
        self.pool, self.top_k, count = pool, shape.top_k, shape.experts
        self.addresses = torch.tensor([block.data_ptr() for block in memory])
        here, device, counts, hits, times = (torch.zeros(size, dtype=INT) for size in (count, count, count, 1, 4))
        self.layer = ShadowLayer(0, blocks, here, device, counts, hits, times, memory)
        self.ids = torch.full((tokens, self.top_k), count)  # an id beyond the last expert: routed to no expert
        x, weights = torch.full((tokens, blocks.hidden), 0.01), torch.full((tokens, self.top_k), 1 / self.top_k)
        self.x, self.weights, self.turn = x, weights, 0
        self.tape = None if eager else Tape()
        if self.tape:
            with self.tape.capture():
                self.kept = self.by_both()  # what the tape has the addresses of

    def by_both(self) -> tuple[ShadowMixture, Tensor]:
        job = submit(self.pool, self.layer, self.x, self.ids)
        resident_rows(job)
        return job, join(job, self.weights)

    def pairs(self, experts: int) -> int:
        """Number of (token, expert) pairs if `experts` experts are used."""
        return len(self.ids) * min(self.top_k, experts)

    def __call__(self, resident: int, missing: int) -> float:
        """Milliseconds of a layer that uses `resident` resident experts and `missing` missing ones."""
        self._route(resident, missing)
        start = time.perf_counter()
        if self.tape:
            self.tape.replay()
        else:
            self.by_both()
        return 1e3 * (time.perf_counter() - start)

    def whole(self, used: int) -> float:
        """Milliseconds of the mixture that uses `used` experts, in place."""
        self._route(0, used)
        start = time.perf_counter()
        in_place(self.layer, self.x, self.weights, self.ids)
        return 1e3 * (time.perf_counter() - start)

    def _route(self, resident: int, missing: int) -> None:
        count, used = len(self.layer.store), resident + missing
        order = torch.arange(used) + self.turn
        experts = order % count
        self.turn += used
        self.layer.store[experts] = self.addresses[order % len(self.addresses)]
        self.layer.device.zero_()
        self.layer.device[experts[:resident]] = self.layer.store[experts[:resident]]
        self.ids.fill_(count)
        if used:
            used_of_token = min(self.top_k, used)
            chosen = torch.arange(len(self.ids) * used_of_token).view(len(self.ids), used_of_token) % used
            self.ids[:, :used_of_token] = experts[chosen]
        self.pool.step += 1


def measure(
    pool: ShadowPool,
    threads: int,
    blocks: BlockShape,
    memory: Tensor,
    shape: ExpertsShape,
    most: int,
    seconds: float,
    on_host: bool,
) -> Costs:
    """Measures the costs, in about `seconds`. `pool` has `threads` threads, `memory` is the result of `made_up`, and a
    decode step has at most `most` tokens. `on_host`: the device is this CPU."""
    start = time.perf_counter()
    numbers = sorted({1, most, LONG})
    kinds = [
        (tokens, experts)
        for tokens in numbers
        for experts in sorted({*((1, 2) if tokens <= most else ()), shape.top_k, round(shape.used(tokens))})
        if 0 < experts <= shape.experts
    ]
    budget = Budget(seconds, 3 * len(kinds) + 2 * len(numbers) + 1)
    probes = {tokens: Probe(pool, blocks, memory, shape, tokens, tokens > most) for tokens in numbers}
    base = min(budget.fastest(partial(probe, 0, 0)) for probe in probes.values())
    sides: list[list[LayerSample]] = [[], []]
    for tokens, experts in kinds:
        probe = probes[tokens]
        for side, kind in enumerate(((experts, 0), (0, experts))):
            ms = max(budget.fastest(partial(probe, *kind)) - base, 1e-6)
            sides[side].append(LayerSample(experts, probe.pairs(experts), ms))
    device, shadow = fit(sides[0]), fit(sides[1])
    whole = _whole(probes, base, kinds, budget) if on_host and reaches(pool) else None
    return Costs(
        base=base,
        device=device,
        shadow=shadow,
        slip=_slip(probes, base, device, shadow, budget),
        copy=_copy(memory, budget),
        block_bytes=blocks.block_bytes,
        threads=(sum(team.threads for team in native.teams()), threads),
        seconds=time.perf_counter() - start,
        whole=whole,
    )


class Budget:
    """Divides `seconds` between `kinds` kinds of measurement. If one exceeds its share, the others get less time."""

    def __init__(self, seconds: float, kinds: int):
        self.end, self.kinds = time.perf_counter() + seconds, kinds

    def fastest(self, once: Callable[[], float]) -> float:
        """The shortest time of several calls, since other processes can only make a call slower."""
        start = time.perf_counter()
        end = start + (self.end - start) / self.kinds
        self.kinds -= 1
        once()
        times: list[float] = []
        while len(times) < LEAST or (len(times) < MOST and time.perf_counter() < end):
            times.append(once())
        return min(times)


def _slip(probes: dict[int, Probe], base: float, device: Line, shadow: Line, budget: Budget) -> float:
    """`slip` of `Costs`, measured with half of a token's experts on each side."""
    slips = []
    for probe in probes.values():
        half = min(probe.top_k, len(probe.layer.store)) // 2
        if half:
            ms = budget.fastest(partial(probe, half, half)) - base
            pairs = probe.pairs(2 * half) / 2
            slips.append(slip_of(device.ms(half, pairs), shadow.ms(half, pairs), ms))
    return sum(slips) / len(slips) if slips else 0.0


def _whole(probes: dict[int, Probe], base: float, kinds: list[tuple[int, int]], budget: Budget) -> Line:
    """`whole` of `Costs`."""
    native.widen(True)
    try:
        times_ms = [budget.fastest(partial(probes[tokens].whole, experts)) - base for tokens, experts in kinds]
    finally:
        native.widen(False)
    pairs = [probes[tokens].pairs(experts) for tokens, experts in kinds]
    return fit([LayerSample(kind[1], p, max(ms, 1e-6)) for kind, p, ms in zip(kinds, pairs, times_ms, strict=True)])


def _copy(memory: Tensor, budget: Budget) -> float:
    """Milliseconds of copying one block while several are queued, so that the time in which the copier's thread wakes
    up, for which no step waits, is not counted."""
    copier, turn = Copier(), 0
    slots = memory[:QUEUED].clone()  # memory that was written before, as an arena's is

    def once() -> float:
        nonlocal turn
        start = time.perf_counter()
        tickets = [copier.submit(slot, memory[(turn + i) % len(memory)]) for i, slot in enumerate(slots)]
        for ticket in tickets:
            copier.wait(ticket)
        turn += len(slots)
        return 1e3 * (time.perf_counter() - start) / len(slots)

    return budget.fastest(once)


def read_ms(nbytes: int, seconds: float) -> float:
    """Milliseconds in which the engine reads `nbytes` bytes, measured for about `seconds`."""
    probed = min(sum(team.threads for team in native.teams()), 32) * READ
    probe = native.ReadProbe(bytes=probed)

    def once() -> float:
        start = time.perf_counter()
        probe.run()
        return 1e3 * (time.perf_counter() - start)

    return Budget(seconds, 1).fastest(once) * nbytes / probed

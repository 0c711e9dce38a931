"""Published times compared with the cycle model's: what it must reproduce before its times of our kernels are believed.

Nothing in the model is fitted to an example; those that give one of its constants are marked and do not count. CANN's
examples were measured on an Atlas A2 with 48 vector cores at 1.85 GHz. The seed's kernels
(Qeeweew/sgl-kernel-npu, 8aa3f30, csrc/grouped_gemv) ran on a 910B3 with 40 cores at 1.8 GHz: the profile in
Qeeweew/MoE-Ascend-Opt (docs/bench_results/raw, July 2026) shows 40 blocks. Their counts are written down here from
their sources. Each vector instruction of an example has a barrier where it depends on the one before, since CANN's
compiler puts one there (`--cce-auto-sync` is on by default).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

from tests.fakes.ascend_c import build, run
from umbra.base.files import ROOT
from umbra.tools.benchmarks.vector_core_machine import (
    HIGH,
    LOW,
    Machine,
    Phase,
    microseconds,
    middle,
    pipes,
    vector_cycles,
)

PROBES = ROOT / "tests/fakes/ascend_c/probes"
WITHIN = 0.25


@dataclass(frozen=True)
class Example:
    name: str
    measured: float
    predict: Callable[[Machine], float]
    unit: str = "us"
    gives: str = ""  # the constant that this example is the source of
    misses: str = ""  # why the model misses it

    def error(self, low: Machine = LOW, high: Machine = HIGH) -> float:
        """The error of the middle of the range, relative to the measured time."""
        return middle(self.predict(low), self.predict(high)) / self.measured - 1


class PhaseWork:
    """Counts of one core's phase, with the twin's keys, written down instruction by instruction."""

    def __init__(self) -> None:
        moves: dict[str, Any] = {"count": 0, "bytes": 0, "bursts": 0, "by_move": {}}
        self.phase: dict[str, Any] = {"mte2": moves, "mte3": {**moves, "by_move": {}}, "instructions": {}}
        self.phase |= {"repeats": {}, "conflicts": {}, "barriers": {"V": 0}, "scalar_ub": 0, "ahead": 0}

    def vector(self, op: str, repeats: int, times: int = 1, conflicts: int = 0, barriers: int = 1) -> PhaseWork:
        for key, value in (("instructions", 1), ("repeats", repeats), ("conflicts", conflicts)):
            self.phase[key][op] = self.phase[key].get(op, 0) + times * value
        self.phase["barriers"]["V"] += times * barriers
        return self

    def move(self, way: str, size: int, times: int = 1, pieces: int = 1) -> PhaseWork:
        moves = self.phase[way]
        moves["count"] += times
        moves["bytes"] += times * size
        moves["bursts"] += times * pieces
        moves["by_move"][size] = moves["by_move"].get(size, 0) + times
        return self

    def scalar_reads(self, times: int) -> PhaseWork:
        self.phase["scalar_ub"] += times
        return self


# One instruction, [mskpp] and [asc] bank_conflict_ub


def repeated(op: str, repeats: int) -> Callable[[Machine], float]:
    """Cycles of one of 1000 equal instructions that do not depend on each other."""
    work = PhaseWork().vector(op, repeats, barriers=0)
    return lambda machine: vector_cycles(work.phase, machine)


@cache
def added(scenario: int) -> Phase:
    """An Add with its operands at a scenario's addresses, counted by the twin."""
    tiling = PROBES / "op_host/probe_tiling.h"
    library = build(PROBES / "banks.cpp", tiling, "ProbeTiling", optimise="-O0")
    counts = run(library, f"add_{scenario}", {}, {}, b"", cores=1)[1].cores[0][0]
    conflicts = counts["conflicts"].get("Add<float>", 0)
    return PhaseWork().vector("Add<float>", counts["repeats"]["Add<float>"], conflicts=conflicts).phase


def ticks(scenario: int) -> Callable[[Machine], float]:
    """Ticks of 20 ns for 1000 Adds to one place, with a barrier after each."""
    return lambda machine: pipes(added(scenario), machine)["vector"] * 1000 / 20


TICKS = {1: 2390.0, 2: 4167.0, 3: 4167.0, 4: 2389.0, 5: 3751.0, 6: 2390.0, 7: 3584.0, 8: 2389.0}

# [asc] add_high_performance: z = x + y, 8192 x 8192 halves; [asc] data_copy: 12288 x 12288 halves into the cores

ADDED, COPIED = 8192 * 8192 * 2, 12288 * 12288 * 2  # bytes of a matrix


def add_vector(length: int, cores: int, conflicts: bool) -> Callable[[Machine], float]:
    """Microseconds of the vector pipe. Each Add waits for its loads, so that the pipe is empty before it."""
    repeats, times = length // 128, ADDED / 2 / length / cores
    work = PhaseWork().vector("Add<half>", repeats, conflicts=repeats * conflicts)
    return lambda machine: times * pipes(work.phase, machine)["vector"] / 1e3


def streamed(read: int, written: int = 0, again: int = 0, bypass: bool = True) -> Callable[[Machine], float]:
    """Microseconds of memory for bytes of all cores."""
    return lambda machine: machine.memory_time(read, written, again, bypass) / 1e3


def add_serial(length: int) -> Callable[[Machine], float]:
    """Microseconds with one buffer: loads, the Add and the store take turns."""
    moved, added = streamed(3 * ADDED), add_vector(length, 48, True)
    return lambda machine: moved(machine) + added(machine)


def loaded_alone(size: int) -> Callable[[Machine], float]:
    """Microseconds of one core that waits for each of its loads."""
    return lambda _: 2 * ADDED / size * HIGH.move_time(size) / 1e3


def copied(rows: int, columns: int, cores: int = 48) -> Callable[[Machine], float]:
    """Microseconds of MTE2 for moves of `rows` pieces of `columns` halves, many at a time."""
    times = COPIED // 2 // rows // columns // cores
    work = PhaseWork().move("mte2", rows * columns * 2, times, rows)

    return lambda machine: max(pipes(work.phase, machine)["mte2"], machine.memory_time(COPIED, 0)) / 1e3


# The seed's kernels: columns in lanes, Axpy with x as the scalar into half sums of 32 rows, then float


def seed_rows(work: PhaseWork, columns: int, batch: int = 1) -> None:
    """32 rows of K, one group: the nibbles are widened in four blocks, which each of `batch` rows of x then multiplies.
    In the sums' addresses lie 256 bytes between the Axpy's operands: no conflict."""
    for _ in range(4):
        work.vector("Cast<half,int4b_t>", 8 * columns // 128)
        work.vector("Axpy<half,half>", columns // 128, 8 * batch)
    work.scalar_reads(8 * batch)


def seed_scale(work: PhaseWork, columns: int, batch: int = 1) -> None:
    """Half sums times bfloat16 scales, added to the float sums; the sources are multiples of 512 bytes apart."""
    repeats = columns // 64
    work.vector("Cast<float,bfloat16_t>", repeats)
    work.vector("Cast<float,half>", repeats, batch)
    work.vector("MulAddDst<float,float>", repeats, batch, conflicts=repeats)


def seed_x(work: PhaseWork, values: int) -> None:
    work.vector("Cast<float,bfloat16_t>", ceil(values / 64)).vector("Cast<half,float>", ceil(values / 64))


def seed_product(blocks: int, columns: int, k: int, weighted: bool) -> Phase:
    """A core's blocks of 128 rows, one after another through the rows of h or x, each added to memory at its end."""
    work = PhaseWork()
    for _ in range(blocks):
        work.move("mte2", 256).move("mte2", 32 * columns // 2, 4, 32).move("mte2", 4 * columns * 2, 1, 4)
        seed_x(work, 128)
        work.vector("Duplicate<half>", 64)
        for _ in range(4):
            seed_rows(work, columns)
            seed_scale(work, columns)
    rows = ceil(blocks * 128 / k) + (blocks * 128 % k > 0)
    work.vector("Duplicate<float>", columns // 64, rows).move("mte3", columns * 4, rows)
    return work.vector("Muls<float>", columns // 64, rows * weighted).phase


def seed_zeros(words: int, cores: int) -> Phase:
    return PhaseWork().vector("Duplicate<int32_t>", 32).move("mte3", 8192, ceil(words / 2048 / cores)).phase


def seed_output(values: int, cores: int) -> Phase:
    times = ceil(values / 2048 / cores)
    return (
        PhaseWork()
        .move("mte2", 8192, times)
        .vector("Cast<bfloat16_t,float>", 32, times)
        .move("mte3", 4096, times)
        .phase
    )


def seed_swiglu(rows: int) -> Phase:
    work = PhaseWork().move("mte2", 2 * 768 * 4, rows, 2).move("mte3", 768 * 2, rows)
    for op in ("Muls", "Exp", "Adds", "Div", "Mul", "Cast"):
        work.vector(f"{op}<float>", 12, rows)
    return work.phase


def seed_fused(batch: int, cores: int = 40) -> list[Phase]:
    """Phases of the busiest core: the mixture of Qwen3-30B-A3B, 8 experts a token, all different."""
    pairs = 8 * batch
    return [
        seed_zeros(pairs * 768 * 5 // 2 + batch * 2048, cores),
        seed_product(ceil(pairs * 16 / cores), 1536, 2048, False),
        seed_swiglu(ceil(pairs / cores)),
        seed_product(ceil(pairs * 6 / cores), 2048, 768, True),
        seed_output(batch * 2048, cores),
    ]


def seed_linear(batch: int, cores: int = 40) -> list[Phase]:
    """Phases of the busiest core: 8192 x 8192, groups of 32 rows; tiles of 2048 columns, K cut into cores / 4 parts."""
    work = PhaseWork()
    for _ in range(ceil(256 / (cores // 4))):
        work.move("mte2", 32 * 1024, 1, 32).move("mte2", 4096).move("mte2", 64 * batch, 1, batch)
        seed_x(work, 32 * batch)
        work.vector("Duplicate<half>", 16, batch)
        seed_rows(work, 2048, batch)
        seed_scale(work, 2048, batch)
    work.vector("Duplicate<float>", 32, batch).move("mte3", 8192 * batch, 1, batch)
    return [seed_zeros(8192 * batch, cores), work.phase, seed_output(8192 * batch, cores)]


def launched(phases: list[Phase], launches: int) -> Callable[[Machine], float]:
    """Microseconds, with those of the launches of kernels. The memory's time of all cores is not counted: replays read
    the same experts again, which the L2 cache holds in part."""
    return lambda machine: microseconds([phases], machine) + launches * machine.launch / 1e3


def seed_vector(machine: Machine) -> float:
    """Microseconds of the vector pipe, an average of 40 cores: batch 1 with two of the eight experts."""
    first, second = (pipes(seed_product(*shape), machine) for shape in ((1, 1536, 2048, False), (1, 2048, 768, True)))
    return (2 * 16 * first["vector"] + 2 * 6 * second["vector"]) / 40 / 1e3


# Batches 1, 2, 4, 8: the README; 3, 5, 6, 7 and the linear layer: docs/bench_results/raw/operators_qwen3, July 2026
SEED_FUSED = {1: 43.42, 2: 60.49, 3: 77.86, 4: 96.18, 5: 111.99, 6: 137.43, 7: 155.34, 8: 174.35}
SEED_LINEAR = {1: 48.77, 2: 72.56, 3: 96.24, 4: 119.84}


def examples() -> list[Example]:
    known = [
        Example("Muls, 1 repeat [mskpp]", 3.029, repeated("Muls<half>", 1), "cycles", "least"),
        Example("Muls, 65 repeats [mskpp]", 65.03, repeated("Muls<half>", 65), "cycles"),
        Example("BlockReduceSum of floats, 16 repeats [mskpp]", 16.04, repeated("BlockReduceSum<float>", 16), "cycles"),
    ]
    for scenario, measured in TICKS.items():
        gives = "barrier" if scenario == 1 else ""
        known.append(Example(f"1000 Adds, bank_conflict_ub {scenario}", measured, ticks(scenario), "ticks", gives))
    same = "48 cores ask for the same addresses at a time; the model knows no such conflict"
    apart = "each core reads all 6 MB, in pieces of 128 bytes, past the L2 cache; the model counts bytes alone"
    known += [
        Example("vector pipe, Add 1 core, 32 repeats", 761.65, add_vector(4096, 1, True)),
        Example("vector pipe, Add case 2, 32 repeats", 15.885, add_vector(4096, 48, True)),
        Example("vector pipe, Add case 4, 128 repeats", 12.846, add_vector(16384, 48, True)),
        Example("vector pipe, Add case 6, 127 repeats, no conflict", 6.954, add_vector(16256, 48, False)),
        Example("loads, Add 1 core, 8 KB waited for", 6208.8, loaded_alone(8192)),
        Example("Add case 2, one buffer, 8 KB", 297.14, add_serial(4096)),
        Example("Add case 3, one buffer, 32 KB", 261.5, add_serial(16384)),
        Example("Add case 4, two buffers", 257.56, streamed(2 * ADDED, ADDED, bypass=False)),
        Example("Add case 5, reads past the L2 cache", 185.15, streamed(2 * ADDED, ADDED)),
        Example("Add case 6, the same without conflicts", 178.49, streamed(2 * ADDED, ADDED)),
        Example("loads, data_copy 1, moves of 128 bytes", 548.16, copied(1, 64), gives="move"),
        Example("loads, data_copy 2, 64 pieces of 128 bytes", 220.77, copied(64, 64), gives="memory, piece"),
        Example("loads, data_copy 3, 64 pieces of 2 KB", 202.66, copied(64, 1024)),
        Example("data_copy 5, all four times", 816.05, streamed(4 * COPIED)),
        Example("data_copy 6, quarters four times each", 354.56, streamed(COPIED, again=3 * COPIED), gives="l2"),
        Example("loads, data_copy 7, same order", 474.72, copied(128, 64), misses=same),
        Example("loads, data_copy 8, other orders", 307.38, copied(128, 64), misses=apart),
    ]
    known.append(Example("seed: vector pipe, batch 1, 2 of 8 experts", 4.78, seed_vector))
    known.append(Example("seed: cores' time, batch 1, 2 of 8 experts", 39.49, launched(seed_fused(1), 0)))
    for batch, measured in SEED_FUSED.items():
        # a kernel that fills y with zeros goes before
        known.append(Example(f"seed: mixture of 30B, batch {batch}", measured, launched(seed_fused(batch), 2)))
    for batch, measured in SEED_LINEAR.items():
        known.append(Example(f"seed: 8192 x 8192, batch {batch}", measured, launched(seed_linear(batch), 1)))
    return known


def print_examples() -> None:
    print("published times and the model's: low..high, their middle, and its error; * gives a constant of the model")
    for example in examples():
        low, high, error = example.predict(LOW), example.predict(HIGH), example.error()
        mark = "*" if example.gives else "" if abs(error) <= WITHIN else "misses"
        cells = f"{example.measured:9.2f} {low:9.2f}..{high:<9.2f}{middle(low, high):9.2f} {error:+6.0%}"
        print(f"{example.name:52}{example.unit:>7} {cells} {mark} {example.gives}{example.misses}".rstrip())

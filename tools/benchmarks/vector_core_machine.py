"""The machine that the cycle model of the vector-core kernels assumes: constants with their sources, and what they make
of counted work. A model, not a measurement.

A phase (up to where cores wait for each other) lasts as long as the slowest pipe of its slowest core, but no less than
all its bytes take from memory; pipes overlap, and the first load is waited for. Where published sources differ, or
there is none, LOW and HIGH have two values. tools.benchmarks.vector_core_examples compares the model with published
times.

Sources, all public: [asc] the repository cann/asc-devkit, master of July 2026; [mskpp] Ascend/mskpp,
csrc/prof_data/resource910b.cpp, instructions and moves measured on one core of a 910B1 (and 910B3, where named so).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

Phase = Mapping[str, Any]  # counts of one core between two waits for all cores, see tests/fakes/ascend_c/README.md
PIPES = ("memory", "mte2", "mte3", "vector", "scalar")
GIB = 1.073741824  # [mskpp] divides by 2^30 where it says GB

# A move alone, waited for: bytes -> GB/s. [mskpp] GM_TO_UB_910b1. [asc] add_high_performance, case 1: 43.2 at 8 KB.
ALONE = {
    1024: 7.29,
    2048: 13.5,
    4096: 23.6,
    8192: 42.7,
    10240: 47.9,
    16384: 68.0,
    22528: 74.1,
    32768: 77.2,
    1 << 17: 78.5,
}

# Cycles of a repeat of 256 bytes of the widest type, without bank conflicts: low, high. One is [asc] docs/zh/api,
# "Vector instructions: theoretical performance", tables 6 to 13, the other [mskpp], where they differ. [mskpp] has 2
# for all instructions that read two operands, which is what [asc] bank_conflict_ub measures for a conflict, so these
# are 1 here and the conflicts are counted by address. A repeat in [mskpp] is taken for the instruction's own, of 64
# lanes where half is widened to float, since its Casts have the rates of [asc] only then.
RATES: dict[str, tuple[float, float]] = dict.fromkeys(
    ("Abs", "Add", "Adds", "And", "Axpy", "Brcb", "Cast", "Duplicate", "Max", "Maxs", "Mul", "Muls", "Or", "Sub"),
    (1, 1),
)
RATES |= {
    "BlockReduceMax<float>": (1, 1),
    "BlockReduceMax<half>": (7, 7),
    "BlockReduceSum<float>": (1, 1),
    "BlockReduceSum<half>": (7, 7),
    "Div<float>": (2, 4),
    "Div<half>": (4, 4),
    "Exp<float>": (2, 2),
    "Exp<half>": (4, 4),
    # Three operands at different addresses halve the theoretical rate ([asc], pages of both instructions).
    "FusedMulAdd": (2, 6),
    "Gather": (12.8, 14),
    "GatherMask": (2, 14),  # 14: VREDUCEV2
    "MrgSort": (16, 22),  # 32 pairs; 22: the first repeat
    "MulAddDst": (4, 6),
    "MulAddDst<float,half>": (4, 5),
    "PairReduceSum": (1, 1),
    "Sort32": (16, 16),  # [asc] alone: two scores a cycle
    "TransDataTo5HD": (2, 2),  # a repeat is 16 blocks
    "WholeReduceMax": (7, 7),
    "WholeReduceSum<float>": (3, 7),
    "WholeReduceSum<half>": (7, 7),
}


@dataclass(frozen=True)
class Machine:
    """One die of an Atlas A2 or A3. Times in nanoseconds, cycles where named so; GB/s are bytes a nanosecond."""

    cores: int = 48  # [asc] add_high_performance; 40 on a 910B3. GetCoreNumAiv says so at run time
    ghz: float = 1.85  # [asc] add_high_performance, data_copy. High: `npu-smi info -t common` of a 910B, [mskpp]
    # All cores reading from memory: [asc] data_copy assumes 1800. High: what it measured in pieces of 128 bytes; 1490
    # in pieces of 2 KB.
    memory: float = 1800
    # From the L2 cache, and into it: [asc] data_copy, scenario 6: 302 MB from memory and 906 again take 355 us. High:
    # what that page assumes.
    l2: float = 6000
    l2_bytes: float = 192e6  # [asc] data_copy
    # One core. Low: [mskpp] GM_TO_UB_910b3, moves of 128 KB. High: a move alone at a time, by its size.
    core: float = 192
    alone: bool = False
    move: float = 11.2  # a move among many: [asc] data_copy, scenario 1, 49,152 of 128 bytes on each core in 548 us
    # A contiguous piece of a move: a guess. High: [asc] data_copy, scenario 2, 49,152 of 128 bytes on each core in 221
    # us, which memory bounded.
    piece: float = 0.5
    # Cycles. An instruction takes at least 3: 1000 Muls of one repeat take 3029 [mskpp].
    least: float = 3
    # Until the vector pipe is empty, at a PipeBarrier: [asc] bank_conflict_ub, scenario 1: 2390 ticks of 20 ns for 1000
    # Adds of 64 repeats. High: what 1000 Muls take beyond their repeats [mskpp].
    barrier: float = 22
    rate: int = 0  # which of RATES
    # Cycles of the scalar pipe for a vector instruction, a move or a barrier. [asc] add_high_performance, cases 1 and
    # 3: 14 and 33 ns for 12 of these and of flags.
    issue: float = 2.1
    read: float = 4  # a scalar read from the unified buffer: a guess. High: case 0, 34 cycles for 2 reads and a write
    # From a phase's first load to its first bytes. A move of 1 KB alone [mskpp]. High: two of 8 KB, when all cores ask
    # [asc] add_high_performance, case 2.
    latency: float = 131
    wait: float = 700  # from a core's report to its wait's end: a guess
    # A task's time outside of the cores' own: [asc] add_high_performance, case 5. High: data_copy, scenario 5.
    launch: float = 2500

    def move_time(self, size: int) -> float:
        """Nanoseconds that one core takes for a move of `size` bytes."""
        if not self.alone:
            return max(self.move, size / self.core)
        smallest, largest = min(ALONE), max(ALONE)
        at = min(max(size, smallest), largest)
        for (below, slow), (above, fast) in pairwise(ALONE.items()):
            if at <= above:
                speed = slow + (fast - slow) * (at - below) / (above - below)
                break
        return max(size, smallest) / (speed * GIB)

    def memory_time(self, read: float, written: float, again: float = 0, bypass: bool = False) -> float:
        """Nanoseconds for bytes of all cores. `again` are read a second time while they are in the L2 cache. What is
        written stays in it, unless that, and what is read through it (without `bypass`), is more than it holds."""
        through = 0 if bypass else read
        spilt = written if through + written > self.l2_bytes else 0
        return (read + spilt) / self.memory + again / self.l2


LOW = Machine()
HIGH = replace(
    LOW,
    ghz=1.8,
    memory=1370,
    l2=5200,
    alone=True,
    piece=4.5,
    barrier=29,
    rate=1,
    issue=5,
    read=11,
    latency=630,
    wait=3000,
    launch=12000,
)


def vector_cycles(phase: Phase, machine: Machine) -> float:
    """Cycles of the vector pipe for a phase's instructions, without barriers."""
    total = 0.0
    for op, repeats in phase["repeats"].items():
        low, high = RATES[op] if op in RATES else RATES[op.split("<")[0]]
        least = phase["instructions"][op] * machine.least
        total += max(least, repeats * low + phase["conflicts"].get(op, 0), repeats * (low, high)[machine.rate])
    return total


def pipes(phase: Phase, machine: Machine) -> dict[str, float]:
    """Nanoseconds that each pipe of a core is busy; repeats, conflicts and barriers are parts of the vector pipe's."""
    busy = {}
    for way in ("mte2", "mte3"):
        moves = sum(count * machine.move_time(int(size)) for size, count in phase[way]["by_move"].items())
        busy[way] = max(moves, phase[way]["bursts"] * machine.piece)
    barriers = sum(phase["barriers"].values())
    busy["repeats"] = vector_cycles(phase, machine) / machine.ghz
    busy["conflicts"] = busy["repeats"] - vector_cycles({**phase, "conflicts": {}}, machine) / machine.ghz
    busy["barriers"] = barriers * machine.barrier / machine.ghz
    busy["vector"] = busy["repeats"] + busy["barriers"]
    asked = sum(phase["instructions"].values()) + barriers + sum(phase[way]["count"] for way in ("mte2", "mte3"))
    busy["scalar"] = (asked * machine.issue + phase["scalar_ub"] * machine.read) / machine.ghz
    return busy


@dataclass(frozen=True)
class Predicted:
    """A phase: nanoseconds of the slowest core's pipes, and of memory for all cores together."""

    busy: dict[str, float]
    overhead: float

    @property
    def bound(self) -> str:
        return max(PIPES, key=lambda pipe: self.busy[pipe])

    @property
    def time(self) -> float:
        return self.busy[self.bound] + self.overhead


def predict(cores: Sequence[Sequence[Phase]], machine: Machine) -> list[Predicted]:
    """Phases in turn, from counts by core and phase; `launch` is not in them. Loads that are issued before
    a wait for all cores count in the phase before it; a phase that begins while they are under way (over a cross-core
    flag they are, over a SyncAll not) does not wait for its first bytes again."""
    phases = []
    for number in range(len(cores[0])):
        counts = [phases_of_core[number] for phases_of_core in cores]
        every = [pipes(count, machine) for count in counts]
        busy = {pipe: max(core[pipe] for core in every) for pipe in every[0]}
        read, written = (sum(count[way]["bytes"] for count in counts) for way in ("mte2", "mte3"))
        busy["memory"] = machine.memory_time(read, written)
        overhead = 0 if any(count["ahead"] for count in counts) else machine.latency
        last = number + 1 == len(cores[0])
        phases.append(Predicted(busy, overhead + (0 if last else machine.wait)))
    return phases


def microseconds(cores: Sequence[Sequence[Phase]], machine: Machine) -> float:
    return sum(phase.time for phase in predict(cores, machine)) / 1e3


def middle(low: float, high: float) -> float:
    """The model's estimate where it has a range: as far from one end as from the other, as a factor."""
    return math.sqrt(low * high)

"""A cycle model of the vector-core kernels: counts of the twin turned into microseconds. A model, not a measurement.

    .venv/bin/python -m benchmarks.vector_core_model          # the model beside the seed's measured table; two minutes
    .venv/bin/python -m benchmarks.vector_core_model traffic  # bytes to and from global memory, also with half sums

A phase (up to a SyncAll) lasts as long as the slowest pipe of its slowest core, but no less than all its bytes take
from memory; pipes overlap, and the first load is waited for. Constants that are not published have two
values, in LOW and HIGH. Nothing is fitted to measurements of these kernels, or of the seed's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from files import ROOT
from tests.fakes.ascend_c import Counts, Library, build, host, run

KERNELS = ROOT / "ops/ascend/vector_core/op_kernel"
BFLOAT16 = torch.bfloat16
SEED_US = {1: (43.42, 199.43), 2: (60.49, 266.82), 4: (96.18, 515.69), 8: (174.35, 936.17)}  # kernel, grouped matmul
RATED = 1600  # GB/s
NIBBLES, SCALES = ("w13", "w2"), ("s13", "s2")
MODELS = (("Qwen3-30B-A3B", 2048, 768), ("Qwen3-235B-A22B", 4096, 1536), ("MiniMax-M2", 3072, 1536))  # H, I
SHOWN = ("memory", "mte2", "vector", "repeats", "barriers", "scalar")


@dataclass(frozen=True)
class Machine:
    """One die of an Atlas A2 or A3. Times in nanoseconds, cycles where named so; GB/s are bytes a nanosecond.

    Sources, all public. [npu-smi]: `npu-smi info -t common`, 910B. The others in the repository cannmirror/asc-devkit.
    [vector]: docs/zh/api, "Vector instructions: theoretical performance", tables of A2 and A3. [cache]: docs/zh/guide,
    "L2 cache tiling". [analysis]: docs/zh/guide, "Analysing performance data". [data_copy], [bank_conflict_ub],
    [add_high_performance]: measured tables in the READMEs of these examples (01_simd_cpp_api/05_best_practices).
    """

    cores: int = 48  # [analysis], [add_high_performance]; GetCoreNumAiv says so at run time
    ghz: float = 1.8  # [npu-smi] Aicore Freq; [add_high_performance] says 1.85 of an A2
    # All cores reading: 1600 [cache]. High: measured in rows of 128 bytes; 1490 in rows of 2 KB [data_copy].
    memory: float = RATED
    # One core alone: 64 bytes a cycle, a guess. High: measured, moves of 8 KB, each waited for [add_high_performance].
    core: float = 115
    # A move: measured, 49,152 of 128 bytes on each of 48 cores in 548 us [data_copy].
    move: float = 11.2
    # A contiguous piece of a move: a guess. High: measured, 49,152 of 128 bytes on each of 48 cores in 221 us, which
    # memory bounded [data_copy]; shorter ones may take less.
    piece: float = 0.5
    # A repeat whose two sources are in one bank group takes twice as long: 1000 Adds of 64 repeats take 4167 ticks of
    # 20 ns against 2390 [bank_conflict_ub]. High: half of the repeats do: additions, whose rows are mostly multiples of
    # 512 bytes apart, so in one group.
    conflict: float = 1.0
    # Cycles of the vector pipe. Beyond its repeats an Add of that example takes 22 cycles, and one of
    # [add_high_performance] 23, without a PipeBarrier in the source; the compiler may have put one. Low: the barrier's
    # drain takes them, an instruction 2. High: every instruction takes them, and the drain once more.
    instruction: float = 2
    barrier: float = 20
    issue: float = 4  # cycles of the scalar pipe for a vector instruction, a move or a barrier: a guess
    read: float = 4  # cycles of a scalar read from the unified buffer: a guess
    latency: float = 600  # from a phase's first load to its first bytes: a guess
    sync_all: float = 700  # a guess
    # Outside of the cores' own time: [add_high_performance], case 5. High: an empty kernel on all cores [analysis].
    launch: float = 2500


LOW = Machine()
HIGH = replace(
    LOW,
    memory=1370,
    core=43,
    piece=4.5,
    conflict=1.5,
    instruction=22,
    barrier=22,
    issue=12,
    read=30,
    latency=1500,
    sync_all=3000,
    launch=20500,
)

# Cycles of a repeat [vector]: 64 floats or 128 halves a cycle, but 32 of MulAddDst, Div and Exp, 64 / 7 of a reduction.
REPEAT = dict.fromkeys(("Add", "Mul", "Adds", "Muls", "Maxs", "Abs", "And", "Cast", "Duplicate", "Brcb"), 1)
REPEAT |= {"MulAddDst": 2, "Div": 2, "Exp": 2, "WholeReduceMax": 7, "WholeReduceSum": 7}
TWO_SOURCES = ("Add", "Mul", "And", "Div", "MulAddDst")

Phase = dict[str, Any]  # counts of one core between two SyncAlls


def pipes(phase: Phase, machine: Machine) -> dict[str, float]:
    """Nanoseconds that each pipe of a core is busy."""
    moved = {way: phase[way] for way in ("mte2", "mte3")}
    busy = {
        way: max(m["bytes"] / machine.core, m["count"] * machine.move, m["bursts"] * machine.piece)
        for way, m in moved.items()
    }
    cycles, instructions, barriers = 0.0, sum(phase["instructions"].values()), sum(phase["barriers"].values())
    for op, repeats in phase["repeats"].items():
        name = op.split("<")[0]
        cycles += repeats * REPEAT[name] * (machine.conflict if name in TWO_SOURCES else 1)
    busy["repeats"] = cycles / machine.ghz
    busy["barriers"] = barriers * machine.barrier / machine.ghz
    busy["vector"] = busy["repeats"] + busy["barriers"] + instructions * machine.instruction / machine.ghz
    asked = instructions + barriers + sum(m["count"] for m in moved.values())
    busy["scalar"] = (asked * machine.issue + phase["scalar_ub"] * machine.read) / machine.ghz
    return busy


@dataclass(frozen=True)
class Predicted:
    """A phase: nanoseconds of the slowest core's pipes, and of memory for all cores together."""

    busy: dict[str, float]
    overhead: float

    @property
    def bound(self) -> str:
        return max(("memory", "mte2", "mte3", "vector", "scalar"), key=lambda pipe: self.busy[pipe])

    @property
    def time(self) -> float:
        return self.busy[self.bound] + self.overhead


def predict(cores: Sequence[Sequence[Phase]], machine: Machine) -> list[Predicted]:
    """Phases in turn, from counts by core and phase; `launch` is not in them."""
    phases = []
    for number in range(len(cores[0])):
        counts = [phases_of_core[number] for phases_of_core in cores]
        every = [pipes(count, machine) for count in counts]
        busy = {pipe: max(core[pipe] for core in every) for pipe in every[0]}
        busy["memory"] = sum(count["mte2"]["bytes"] + count["mte3"]["bytes"] for count in counts) / machine.memory
        last = number + 1 == len(cores[0])
        phases.append(Predicted(busy, machine.latency + (0 if last else machine.sync_all)))
    return phases


def microseconds(counts: Counts, machine: Machine) -> float:
    return sum(phase.time for phase in predict(counts.cores, machine)) / 1e3


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    inner: int  # of one rank
    batch: int
    top_k: int = 8
    group: int = 32

    def experts(self, routed: bool) -> tuple[int, torch.Tensor]:
        """Ids (batch, top_k): all different, or of a random router with 128 experts."""
        if not routed:
            pairs = self.batch * self.top_k
            return pairs, torch.arange(pairs, dtype=torch.int32).view(self.batch, -1)
        random = torch.Generator().manual_seed(6)
        return 128, torch.stack([torch.randperm(128, generator=random)[: self.top_k] for _ in range(self.batch)]).int()


@cache
def library(name: str) -> Library:
    return build(KERNELS / f"{name}.cpp")


def count(op: str, inputs: dict[str, torch.Tensor | None], half_sums: bool = False) -> Counts:
    """Counts of one launch of umbra_`op`, as its host side tiles it; they do not depend on values."""
    given = [None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in inputs.values()]
    name = f"umbra_{op}"
    launch = host("".join(part.capitalize() for part in name.split("_")), given, LOW.cores, attributes=[half_sums])
    sized = launch.outputs, launch.tiling, launch.workspace, launch.blocks, launch.key, launch.schedule_mode
    return run(library(name), name, inputs, *sized)[1]


def bank(experts: int, k: int, n: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(experts, k, n // 8, dtype=torch.int32), torch.ones(experts, k // group, n, dtype=BFLOAT16)


@cache
def fused(shape: Shape, routed: bool = False, half_sums: bool = False) -> Counts:
    experts, ids = shape.experts(routed)
    w13, s13 = bank(experts, shape.hidden, 2 * shape.inner, shape.group)
    w2, s2 = bank(experts, shape.inner, shape.hidden, shape.group)
    x, weights = torch.ones(shape.batch, shape.hidden, dtype=BFLOAT16), torch.ones(ids.shape, dtype=BFLOAT16)
    inputs = dict(x=x, w13=w13, s13=s13, z13=None, w2=w2, s2=s2, z2=None, ids=ids, weights=weights)
    return count("fused_moe_w4a16", inputs, half_sums)


def weight_bytes(counts: Counts) -> int:
    return sum(moved["read"] for name, moved in counts.buffers.items() if name in NIBBLES + SCALES)


def nibbles_cast(counts: Counts, phase: int) -> list[int]:
    """Repeats of Cast from nibbles on each core, which stand for its work."""
    return [core[phase]["repeats"].get("Cast<half,int4b_t>", 0) for core in counts.cores]


def busy_cores(counts: Counts, phase: int) -> int:
    return sum(work > 0 for work in nibbles_cast(counts, phase))


def large_moves(counts: Counts, least: int = 16384) -> float:
    """The share of nibbles' bytes that came in moves of `least` bytes and more."""
    sizes = {int(size): count * int(size) for size, count in counts.total["mte2"]["by_move"].items()}
    nibbles = sum(moved["read"] for name, moved in counts.buffers.items() if name in NIBBLES)
    return sum(size for at, size in sizes.items() if at >= least) / nibbles


def between(low: float, high: float, places: int = 1) -> str:
    return f"{low:.{places}f}..{high:.{places}f}"


def print_model(half_sums: bool) -> None:
    print("model, not measurement; us as low..high; bfloat16, W4, group 32, H 2048, I 768, top-8, 48 cores;", end=" ")
    print("half sums" if half_sums else "float sums")
    print("measured, on the seed's NPU: seed, its kernel; grouped mm, npu_grouped_matmul")
    for routed in (False, True):
        routing = "random routing over 128 experts" if routed else "all experts different"
        print(f"\nfused_moe_w4a16, {routing}")
        head = ("cores' time", "with launch", "GB/s", "of 1.6 TB/s", "seed", "grouped mm")
        print("batch      MB " + " ".join(f"{name:>12}" for name in (head[:4] if routed else head)))
        for batch, measured in SEED_US.items():
            counts = fused(Shape("", 2048, 768, batch), routed, half_sums)
            low, high = (microseconds(counts, machine) for machine in (LOW, HIGH))
            size = weight_bytes(counts)
            slow, fast = size / high / 1e3, size / low / 1e3
            cells = [between(low, high), between(low + LOW.launch / 1e3, high + HIGH.launch / 1e3)]
            cells += [between(slow, fast, 0), between(slow / RATED, fast / RATED, 2)]
            cells += [] if routed else [f"{us:.2f}" for us in measured]
            print(f"{batch:5} {size / 1e6:7.1f} " + " ".join(f"{cell:>12}" for cell in cells))
    print("\nfused_moe_w4a16, all experts different: the slowest core's pipes by phase")
    print("batch phase cores   " + "  ".join(f"{name:>11}" for name in (*SHOWN, "bound")))
    for batch in SEED_US:
        counts = fused(Shape("", 2048, 768, batch), False, half_sums)
        for number, (low, high) in enumerate(zip(*(predict(counts.cores, m) for m in (LOW, HIGH)), strict=True)):
            columns = [between(low.busy[pipe] / 1e3, high.busy[pipe] / 1e3) for pipe in SHOWN]
            bound = low.bound if low.bound == high.bound else f"{low.bound}, {high.bound}"
            cores = busy_cores(counts, number)
            print(f"{batch:5} {number + 1:5} {cores:5}   " + "  ".join(f"{cell:>11}" for cell in [*columns, bound]))


def print_traffic() -> None:
    print("KB counted by the twin; bfloat16, group 32, all experts different, 48 cores.")
    print("needed: nibbles, scales, x and y once. >= 16 KB: of the nibbles' bytes, in such moves.")
    print("%: the workspace, of weights (nibbles and scales) and of nibbles alone.")
    print("cores: all work over the longest core's, by product.")
    head = ("nibbles", "scales", "x", "workspace", "y", "all / needed", "% weights", "% nibbles", ">= 16 KB", "cores")
    print(f"{'fused_moe_w4a16':26} batch " + " ".join(f"{name:>12}" for name in head))
    for name, hidden, inner in MODELS:
        for over in (1, 8):
            for batch in (1, 8):
                shape = Shape(name + (" / 8" if over == 8 else ""), hidden, inner // over, batch)
                print_bytes(shape, fused(shape))


def print_bytes(shape: Shape, counts: Counts) -> None:
    rows = 2 * shape.batch * shape.hidden * 2  # bytes of x and y, once
    moved = {name: sum(both.values()) for name, both in counts.buffers.items()}
    nibbles = sum(moved.get(name, 0) for name in NIBBLES)
    weights = weight_bytes(counts)
    columns = [nibbles, weights - nibbles, moved["x"], moved["workspace"], moved["y"]]
    work = [cast for phase in range(counts.phases) if any(cast := nibbles_cast(counts, phase))]
    cells = [f"{value / 1e3:.0f}" for value in columns]
    cells += [f"{sum(moved.values()) / (weights + rows):.3f}"]
    cells += [f"{100 * moved['workspace'] / part:.2f}" for part in (weights, nibbles)]
    cells += [f"{large_moves(counts):.2f}", ", ".join(f"{sum(each) / max(each):.1f}" for each in work)]
    print(f"{shape.name:26} {shape.batch:5} " + " ".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    if sys.argv[1:] == ["traffic"]:
        print_traffic()
    else:
        print_model(half_sums=False)
        print_model(half_sums=True)

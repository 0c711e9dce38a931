"""Decode steps on several ranks of this machine, compared with what the cluster model predicts from constants of the
same run.

    .venv/bin/umbra bench cpu_ranks [--case bench_30b_shape_cpu] [--ranks 1 2 4] [--batches 1 4 8]
        [--contexts 64 2048] [--rounds 15] [--json FILE]

The ranks divide the cores; with more ranks than cores, several share one. The constants are those of single kernels and
collectives, measured in turn with steps of the model, while all ranks run them at once, so that a rank's rate is its
share of the machine's, also where ranks share a core. Nothing is taken from the steps but what one of the first kind
takes outside the replayed graph.

A row, of the table and of `rows` in the JSON file:
  ranks, threads (of each), sequences, cached (tokens of each)
  predicted, measured   milliseconds of a step; ratio: predicted / measured
  parts                 the prediction's parts in ms
"""

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from umbra.base.errors import UserError, run_main
from umbra.base.files import write_json
from umbra.executor.config.env import rank_env
from umbra.ops import load_ops
from umbra.ops.cpu.engine import Tape
from umbra.ops.cpu.matrix import NativeMatrix
from umbra.ops.formats import FORMATS
from umbra.planner.layouts import spans_of
from umbra.planner.machine import DeviceRates, Hardware, Links
from umbra.planner.plan import parts_of
from umbra.planner.times import Placing, step_times
from umbra.planner.work import CountedRank
from umbra.tools.benchmarks import cpu
from umbra.tools.benchmarks.machine import MachineLimits, Others, seconds_of, wake_seconds
from umbra.tools.benchmarks.output import Row, flags, printed, write_rows
from umbra.tools.benchmarks.umbra_engine import EngineSetup, Umbra

COLUMNS = (
    ("ranks", "ranks", 6, ""),
    ("threads", "threads", 8, ""),
    ("sequences", "sequences", 10, ""),
    ("cached", "cached", 8, ""),
    ("predicted", "predicted", 11, ".2f"),
    ("measured", "measured", 10, ".2f"),
    ("ratio", "ratio", 7, ".2f"),
    ("parts", "  parts", 4, ""),
)
FORMAT = "q4"
MATRICES, ROWS, WIDTH = 8, 16384, 4096  # of 38 MB each, larger than the caches together
MANY = 64  # rows at which products are the limit
CACHED = 8192  # tokens of a sequence, to measure attention
TINY_OPS = 1000
FLOATS = 1 << 14  # of a collective that is not small: 8 rows of 2,048
CALLS = 50  # collectives in a measurement
CONSTANTS = (
    "read_gbps",
    "read_fraction",
    "attention_fraction",
    "quantised_tflops",
    "tflops",
    "launch_us",
    "collective_us",
    "link_gbps",
    "step_us",
)


def in_turn(runs: dict[str, Callable[[], object]], rounds: int, ranks: int) -> dict[str, float]:
    """Median seconds of each of `runs`, which all ranks begin together."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            if ranks > 1:
                dist.barrier()
            seconds = seconds_of(run)
            if number:
                times[name].append(seconds)
    return {name: statistics.median(taken_s) for name, taken_s in times.items()}


class Kernels:
    """Single kernels of a rank, to be timed. `heads`: its query and KV heads. A tape has only the addresses of what it
    reads, so all of that is kept here."""

    def __init__(self, threads: int, heads: tuple[int, int]):
        ops, self.tapes = load_ops("cpu"), {name: Tape() for name in ("one", "many", "attention", "tiny")}
        block = torch.randn(ROWS, WIDTH) * 0.02
        self.matrices = [NativeMatrix(ROWS, WIDTH, FORMATS[FORMAT], torch.device("cpu")) for _ in range(MATRICES)]
        self.rows = {"one": torch.randn(1, WIDTH), "many": torch.randn(MANY, WIDTH), "tiny": torch.randn(1, 32)}
        for matrix in self.matrices:
            matrix.fill(0, block)
        for name in ("one", "many"):
            with self.tapes[name].capture():
                for matrix in self.matrices:
                    ops.linear(self.rows[name], matrix, None)
        shape = cpu.AttentionCase(CACHED, 1, *heads)
        first, self.cache_bytes = cpu.attention_inputs(shape, torch.bfloat16)
        more = cpu.BEYOND // self.cache_bytes
        self.calls = [first, *(cpu.attention_inputs(shape, torch.bfloat16)[0] for _ in range(more))]
        with self.tapes["attention"].capture():
            for call in self.calls:
                ops.attention(*call, cpu.DIM**-0.5)
        self.small = NativeMatrix(64 * threads, 32, FORMATS[FORMAT], torch.device("cpu"))
        with self.tapes["tiny"].capture():
            for _ in range(TINY_OPS):
                ops.linear(self.rows["tiny"], self.small, None)

    @property
    def runs(self) -> dict[str, Callable[[], object]]:
        return {name: tape.replay for name, tape in self.tapes.items()}


def collectives() -> dict[str, Callable[[], object]]:
    few, more = torch.zeros(4), torch.zeros(FLOATS)

    def reduce(x: torch.Tensor) -> None:
        for _ in range(CALLS):
            dist.all_reduce(x)

    return {"few": lambda: reduce(few), "more": lambda: reduce(more)}


def constants(took: dict[str, float], limits: MachineLimits, kernels: Kernels, ranks: int) -> dict[str, float]:
    """Returns the rates that the machine reaches, computed from the seconds that each measurement took."""
    read, macs = limits.read_gbps(took["read"]), MATRICES * MANY * ROWS * WIDTH
    values = {
        "read_gbps": read,
        "read_fraction": sum(m.nbytes for m in kernels.matrices) / took["one"] / 1e9 / read,
        "attention_fraction": len(kernels.calls) * kernels.cache_bytes / took["attention"] / 1e9 / read,
        "quantised_tflops": 2 * macs / took["many"] / 1e12,
        "tflops": limits.int8_gmacs(took["multiply"]) / 1e3,  # 16-bit products at half of the rate of 8-bit ones
        "launch_us": took["tiny"] / TINY_OPS * 1e6,
        "collective_us": 0.0,
        "link_gbps": 1.0,
    }
    if ranks > 1:
        smaller, larger = took["few"] / CALLS, took["more"] / CALLS
        values["collective_us"] = smaller * 1e6
        values["link_gbps"] = (ranks - 1) * 4 * FLOATS / max(larger - smaller, 1e-9) / 1e9
    return values


def hardware_of(values: dict[str, float]) -> Hardware:
    device = DeviceRates(
        read_gbps=values["read_gbps"],
        read_fraction=values["read_fraction"],
        step_us=values["step_us"],
        attention_fraction=values["attention_fraction"],
        tflops=values["tflops"],
        multiply_fraction=0.5,
        quantised_tflops=values["quantised_tflops"],
        launch_us=values["launch_us"],
        attention_us=values["launch_us"],
    )
    links = Links(devices=64, gbps=values["link_gbps"], collective_us=values["collective_us"], peer_us=0.0)
    return Hardware(platform="cpu", device=device, node=links, name="this machine")


def rank_rows(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of this process's rank, which stands for all."""
    ranks, clock = args.ranks[0], cpu.ReplayClock()
    engine = Umbra(
        EngineSetup(
            args.case,
            None,
            FORMAT,
            args.threads,
            args.instruction_set,
            max(args.batches),
            max(args.contexts),
            world_size=ranks,
        )
    )
    config = engine.config
    heads = config.num_attention_heads // ranks, config.num_key_value_heads // ranks
    generator, limits = torch.Generator().manual_seed(0), MachineLimits()
    kernels = Kernels(args.threads, heads)
    runs = {"read": limits.read, "multiply": limits.multiply, **kernels.runs, **(collectives() if ranks > 1 else {})}
    kinds = list(itertools.product(args.batches, args.contexts))
    outside: dict[str, list[float]] = {}

    def prepare(sequences: int, cached: int) -> None:
        engine.assume(engine.random_prompts(sequences, cached, generator))
        engine.step([0] * sequences)

    def step(name: str, sequences: int) -> None:
        clock.seconds, start = 0.0, time.perf_counter()
        engine.step([row[0] for row in engine.random_prompts(sequences, 1, generator)])
        outside.setdefault(name, []).append(time.perf_counter() - start - clock.seconds)

    for sequences, cached in kinds:
        name = f"{sequences} {cached}"
        runs[f"before {name}"] = partial(prepare, sequences, cached)
        runs[name] = partial(step, name, sequences)
    took = in_turn(runs, args.rounds, ranks)
    values = constants(took, limits, kernels, ranks)
    counted, placing = CountedRank(engine.runner.case), Placing(spans_of(ranks, ranks))
    for sequences, cached in kinds:
        name = f"{sequences} {cached}"
        values.setdefault("step_us", statistics.median(outside[name]) * 1e6)
        times = step_times(counted.decode(sequences, cached), placing, hardware_of(values))
        yield {
            "ranks": ranks,
            "threads": args.threads,
            "sequences": sequences,
            "cached": cached,
            "predicted": times.total * 1e3,
            "measured": took[name] * 1e3,
            "ratio": times.total / took[name],
            "parts": "  " + parts_of(times),
            "constants": values,
        }


def measured(args: argparse.Namespace, ranks: int) -> list[Row]:
    """The rows of a job of so many ranks, each a process that runs this file."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, file = free.getsockname()[1], Path(folder) / "rows.json"
        free.close()
        cores = len(os.sched_getaffinity(0))
        words = ["--case", args.case, "--ranks", ranks, "--rounds", args.rounds]
        words += ["--batches", *args.batches, "--contexts", *args.contexts, "--threads", max(1, cores // ranks)]
        words += ["--instruction-set", args.instruction_set, "--rank", "--json", file]
        command = [sys.executable, "-m", "umbra.planner.benchmarks.cpu_ranks", *map(str, words)]
        shared = {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": f"{port}", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        others = Others()
        jobs = [
            subprocess.Popen(
                command,
                env=os.environ | shared | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        errors = [job.communicate()[1] for job in jobs]
        if any(job.returncode for job in jobs):
            raise UserError(f"{ranks} ranks failed: {' '.join(max(errors, key=len)[-500:].split())}")
        print(f"{ranks} ranks: other programs used {others.cores():.2f} cores")
        rows: list[Row] = json.loads(file.read_text())["rows"]
        return rows


def options() -> argparse.ArgumentParser:
    parser = flags(__doc__)
    parser.add_argument("--case", default="bench_30b_shape_cpu", help="whose shapes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8], help="sequences in a step")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 2048], help="cached tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each kind, of which medians count")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> None:
    args = options().parse_args(argv)
    if args.rank:
        rows = list(rank_rows(args))
        if rank_env().rank == 0:
            write_json(args.json, {"rows": rows})
        return
    rows = printed((row for ranks in args.ranks for row in measured(args, ranks)), COLUMNS)
    for ranks in args.ranks:
        values = next(row["constants"] for row in rows if row["ranks"] == ranks)
        print(f"{ranks} ranks: " + ", ".join(f"{name} {values[name]:.3g}" for name in CONSTANTS))
    first, last = min(cores := os.sched_getaffinity(0)), max(cores)
    wakes = {other: wake_seconds(first, other) * 1e6 for other in (first, last)}
    print(f"a process wakes another one within {wakes[first]:.0f} us on its own core, {wakes[last]:.0f} us on another")
    write_rows(args.json, rows, case=args.case, format=FORMAT)


if __name__ == "__main__":
    run_main(main)

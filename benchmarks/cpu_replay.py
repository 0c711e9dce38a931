"""Overhead of a replayed graph: microseconds for each op of a tape of the smallest ops.

    .venv/bin/python -m benchmarks.cpu_replay [--threads 2] [--json FILE] [--plot FILE]

A row, of the table and of `rows` in the JSON file:
  threads  1, 2, 4 ... and --threads
  op       norm: 16 numbers, computed by the calling thread; linear: 64 x 32 for each thread, computed by the whole pool
  us       microseconds an op, median of replays of 1,000
"""

from collections.abc import Iterator

import torch

from benchmarks.machine import alternate
from benchmarks.output import Row, flags, plot, printed, write_rows
from errors import run_main
from ops import load_ops
from ops.cpu import engine
from ops.cpu.matrix import NativeMatrix
from ops.format import FORMATS

OPS = 1000
COLUMNS = (("threads", "threads", 8, ""), ("op", "op", 8, ""), ("us", "us", 8, ".2f"))


def measure(threads: int) -> Iterator[Row]:
    cpu = load_ops("cpu")
    x, weight, y = torch.randn(1, 16), torch.ones(16), torch.randn(1, 32)
    matrix = NativeMatrix(64 * threads, 32, FORMATS["q4"], torch.device("cpu"))
    tapes = {"norm": engine.Tape(), "linear": engine.Tape()}
    with tapes["norm"].capture():
        for _ in range(OPS):
            cpu.rms_norm(x, weight, 1e-6)
    with tapes["linear"].capture():
        for _ in range(OPS):
            cpu.linear(y, matrix, None)
    seconds = alternate({name: tape.replay for name, tape in tapes.items()}, seconds=1.0)
    for name in tapes:
        yield dict(threads=threads, op=name, us=seconds[name] / OPS * 1e6)


def main(argv: list[str]) -> None:
    args = flags(__doc__).parse_args(argv)
    torch.set_num_threads(1)
    counts = sorted({args.threads, *(2**i for i in range(args.threads.bit_length()) if 2**i < args.threads)})

    def rows_of(threads: int) -> Iterator[Row]:
        engine.start(threads, args.instruction_set)
        yield from measure(threads)

    rows = printed((row for threads in counts for row in rows_of(threads)), COLUMNS)
    write_rows(args.json, rows, instruction_set=args.instruction_set)
    lines = {op: (counts, [r["us"] for r in rows if r["op"] == op]) for op in ("norm", "linear")}
    plot(args.plot, {"threads": lines}, "microseconds an op")


if __name__ == "__main__":
    run_main(main)

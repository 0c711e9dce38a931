"""Speed of attention on the CPU over long contexts, beside the machine's limits measured in the same run.

    .venv/bin/python -m benchmarks.cpu_attention [--threads 2] [--instruction-set SET] [--json FILE] [--plot FILE]

Heads of 128, pages of 16 tokens in random order; a row names its query and KV heads. Calls are captured and replayed as
in decode; in decode each call has caches of its own, together larger than the processor's. GB/s counts each cached key
and value once. The peak is half of that of int8, since a dot instruction of bfloat16 does half as many multiply-adds.
Limits: see machine.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.machine import Limits, alternate
from benchmarks.output import Lines, Row, flags, plot, printed, write_rows
from errors import run_main
from ops import load_ops
from ops.cpu import engine

DIM, PAGE = 128, 16
BEYOND = 128 << 20  # bytes of the caches of a row
TYPES = (torch.bfloat16, torch.int8)
COLUMNS = (
    ("cache", "cache", 9, ""),
    ("heads", "heads", 7, ""),
    ("cached", "cached", 8, ""),
    ("new", "new", 6, ""),
    ("ms", "ms", 10, ".3f"),
    ("gbps", "GB/s", 8, ".1f"),
    ("read_fraction", "of read", 9, ".2f"),
    ("gmacs", "GMAC/s", 9, ".0f"),
    ("peak_fraction", "of peak", 9, ".2f"),
)


@dataclass(frozen=True)
class Case:
    """The last `new` of `cached` tokens of a sequence."""

    cached: int
    new: int
    heads: int = 32
    kv_heads: int = 4

    @property
    def macs(self) -> float:
        seen = self.new * (self.cached - self.new) + self.new * (self.new + 1) / 2
        return 2 * seen * self.heads * DIM


CASES = (
    Case(2048, 1), Case(8192, 1), Case(32768, 1), Case(8192, 1, 48, 8), Case(8192, 1, 4, 4), Case(512, 512),
    Case(2048, 512), Case(8192, 512),
)  # fmt: skip


Call = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(case: Case, dtype: torch.dtype) -> tuple[Call, int]:
    """What `attention` takes of one sequence with random tokens, up to the scale, and the bytes of its caches."""
    cpu = load_ops("cpu")
    pages = -(-case.cached // PAGE)
    table = torch.randperm(pages)[None]
    keys, values = (cpu.kv_cache(pages, PAGE, case.kv_heads, DIM, dtype, torch.device("cpu")) for _ in "kv")
    for places in torch.arange(pages * PAGE).split(1 << 14):
        k, v = torch.randn(2, len(places), case.kv_heads, DIM)
        cpu.write_kv(k, v, keys, values, places)
    starts, lengths = torch.tensor([0, case.new]), torch.tensor([case.cached])
    q = torch.randn(case.new, case.heads, DIM)
    return (q, keys, values, table, starts, lengths), keys.nbytes + values.nbytes


def measure(dtype: torch.dtype, limits: Limits, seconds: float) -> Iterator[Row]:
    """A row for each case."""
    cpu = load_ops("cpu")
    for case in CASES:
        first, size = inputs(case, dtype)
        calls = [first, *(inputs(case, dtype)[0] for _ in range(BEYOND // size if case.new == 1 else 0))]
        tape = engine.Tape()
        with tape.capture():
            for call in calls:
                cpu.attention(*call, DIM**-0.5)
        runs = {"tape": tape.replay, "read": limits.read, "multiply": limits.multiply}
        took = alternate(runs, seconds)
        each, read = took["tape"] / len(calls), limits.read_gbps(took["read"])
        peak = limits.int8_gmacs(took["multiply"]) / 2
        gbps, gmacs = size / each / 1e9, case.macs / each / 1e9
        yield dict(
            cache=str(dtype).removeprefix("torch."), heads=f"{case.heads}/{case.kv_heads}", cached=case.cached,
            new=case.new, ms=each * 1e3, gbps=gbps, read_gbps=read, read_fraction=gbps / read, gmacs=gmacs,
            peak_gmacs=peak, peak_fraction=gmacs / peak,
        )  # fmt: skip


def panels(rows: list[Row]) -> dict[str, Lines]:
    def lines(decode: bool, key: str) -> Lines:
        drawn: dict[str, tuple[list[float], list[float]]] = {}
        for cache in dict.fromkeys(r["cache"] for r in rows):
            mine = [r for r in rows if r["cache"] == cache and r["heads"] == "32/4" and (r["new"] == 1) == decode]
            drawn[f"{cache}: {key}"] = [r["cached"] for r in mine], [r[f"{key.split()[-1]}_fraction"] for r in mine]
        return drawn

    return {"cached tokens (decode)": lines(True, "of read"), "cached tokens (512 new)": lines(False, "of peak")}


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="measured for each row")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"{engine.start(args.threads, args.instruction_set)}, {engine.placement()}")
    limits = Limits()
    rows = printed((row for dtype in TYPES for row in measure(dtype, limits, args.seconds)), COLUMNS)
    write_rows(args.json, rows, threads=args.threads, instruction_set=args.instruction_set)
    plot(args.plot, panels(rows), "fraction of the machine's limit")


if __name__ == "__main__":
    run_main(main)

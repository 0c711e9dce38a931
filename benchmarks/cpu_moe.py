"""Speed of the fused mixture of experts on the CPU, beside the machine's limits measured in the same run.

    .venv/bin/python -m benchmarks.cpu_moe [--threads 2] [--json FILE] [--plot FILE]

Shape: hidden 2048, intermediate 768, top-8 of 128 experts, together larger than the caches. Calls are captured and
replayed as in decode, one after another, each with different tokens and therefore different experts. Weight GB/s counts
each expert that a call uses once. Limits: see machine.py.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.machine import Limits, alternate
from benchmarks.output import Lines, Row, flags, plot, printed, write_rows
from errors import run_main
from ops import load_ops
from ops.cpu import engine
from ops.cpu.matrix import NativeExperts
from ops.format import FORMATS

HIDDEN, INNER, TOP_K, EXPERTS = 2048, 768, 8, 128
TOKENS = (1, 2, 4, 8, 16, 32, 128, 1024, 4096)
Inputs = tuple[Tensor, Tensor, Tensor]  # x (tokens, hidden), weights (tokens, top k), ids (tokens, top k)
COLUMNS = (
    ("format", "format", 7, ""),
    ("tokens", "tokens", 7, ""),
    ("ms", "ms", 10, ".3f"),
    ("weight_gbps", "GB/s", 8, ".1f"),
    ("read_fraction", "of read", 9, ".2f"),
    ("gflops", "GFLOPS", 9, ".0f"),
    ("mac_fraction", "of int8 peak", 14, ".2f"),
)


def filled_experts(format: str) -> NativeExperts:
    """Experts with random zero-mean weights, each different."""
    experts = NativeExperts(EXPERTS, INNER, HIDDEN, FORMATS[format], torch.device("cpu"))
    block = torch.randn(INNER * HIDDEN + 4 * EXPERTS) * 0.02
    for e in range(EXPERTS):
        for i, which in enumerate(("gate", "up", "down")):
            shape = (HIDDEN, INNER) if which == "down" else (INNER, HIDDEN)
            start = 3 * e + i
            experts.fill(e, which, block[start : start + INNER * HIDDEN].view(shape))
    return experts


def random_inputs(tokens: int) -> tuple[list[Inputs], float]:
    """The inputs of some calls, and how many experts a call uses on average."""
    inputs = []
    for _ in range(8 if tokens <= 128 else 2):
        ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
        inputs.append((torch.randn(tokens, HIDDEN), torch.full((tokens, TOP_K), 1 / TOP_K), ids))
    return inputs, sum(len(ids.unique()) for _, _, ids in inputs) / len(inputs)


def measure(format: str, limits: Limits) -> Iterator[Row]:
    """A row for each number of tokens."""
    cpu = load_ops("cpu")
    experts = filled_experts(format)
    bytes_each = experts.nbytes / EXPERTS
    for tokens in TOKENS:
        inputs, hit = random_inputs(tokens)
        tape = engine.Tape()
        with tape.capture():
            for x, weights, ids in inputs:
                cpu.moe(x, weights, ids, experts, 0)
        runs = {"tape": tape.replay, "read": limits.read, "multiply": limits.multiply}
        seconds = alternate(runs, seconds=2.0)
        ms = seconds["tape"] / len(inputs) * 1e3
        read, peak = limits.read_gbps(seconds["read"]), limits.int8_gmacs(seconds["multiply"])
        gbps, gmacs = hit * bytes_each / ms / 1e6, 3 * tokens * TOP_K * HIDDEN * INNER / ms / 1e6
        yield dict(
            format=format, tokens=tokens, ms=ms, weight_gbps=gbps, read_gbps=read, read_fraction=gbps / read,
            gflops=2 * gmacs, gmacs=gmacs, int8_gmacs=peak, mac_fraction=gmacs / peak,
        )  # fmt: skip


def lines(rows: list[Row]) -> Lines:
    drawn: dict[str, tuple[list[float], list[float]]] = {}
    for format in ("q4", "q8"):
        mine = [r for r in rows if r["format"] == format]
        tokens = [r["tokens"] for r in mine]
        drawn[f"{format}: of the read rate"] = tokens, [r["read_fraction"] for r in mine]
        drawn[f"{format}: of the int8 peak"] = tokens, [r["mac_fraction"] for r in mine]
    return drawn


def main(argv: list[str]) -> None:
    args = flags(__doc__).parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    chosen = engine.start(args.threads, args.instruction_set)
    limits = Limits()
    print(f"{chosen}, {args.threads} threads")
    rows = printed((row for format in ("q4", "q8") for row in measure(format, limits)), COLUMNS)
    write_rows(args.json, rows, threads=args.threads, instruction_set=chosen)
    plot(args.plot, {"tokens": lines(rows)}, "fraction of the machine's limit")


if __name__ == "__main__":
    run_main(main)

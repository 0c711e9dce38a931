"""Speed of one mixture of experts in 4 bits by Umbra, kt-kernel and torch, measured in turns within one process.

    .venv/bin/python -m benchmarks.compare_moe [--seconds S] [--json FILE] [--plot FILE]

The layer, its tokens and the way Umbra's calls are captured are those of cpu_moe.py. All layers hold the same weights
(moe_weights.py), and before a row is measured each must give the layer's output up to the rounding of its activations:
int8 in groups of 32 (Umbra and kt-kernel's RAWINT4), int8 in rows (kt-kernel's AMXINT4) or bfloat16 (torch's int4
product, in an ordinary loop over the experts). All use the same number of threads. A thread of kt-kernel's polls while
its workers work, and takes turns with one of them where every core has a worker; in a short trial of the row it may
therefore run with a worker less.

Columns of the table; `rows` in the JSON file have `ours`, `group` (RAWINT4), `row` (AMXINT4) and `torch` as prefixes:
  tokens             of one call
  ms                 of one call, the median
  GB/s, of read      q4's bytes of each expert that a call uses, over that time; their part of the rate of plain reads
  of int8 peak       multiply-adds over that time, as a part of the peak
  workers            kt-kernel's
  ratio              theirs / ours, the median of each pair of neighbouring turns: above 1, Umbra is faster
"""

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.cpu_moe import EXPERTS, HIDDEN, INNER, TOP_K, Inputs, random_inputs
from benchmarks.kt_kernel_moe import KtMoe, library, thread_pool
from benchmarks.machine import Limits, ratios, take_turns
from benchmarks.moe_weights import Weights, random_weights, routed
from benchmarks.output import Lines, Row, flags, plot, printed, write_rows
from benchmarks.torch_int4_moe import TorchInt4Moe
from errors import UserError, run_main
from ops import load_ops
from ops.cpu import engine
from ops.cpu.matrix import NativeExperts
from ops.format import FORMATS

TOKENS = (1, 4, 8, 32, 128, 512)
LEAST = 3  # turns
PAUSE = 0.05  # seconds; kt-kernel's and OpenMP's threads wait actively for a while before they sleep
# Of a whole layer's output. The worst of the formats rounds each row of activations to 8 bits, twice: 2.4 % with normal
# numbers. Gate and up exchanged, or an expert in another's place, make more than 50 %.
MOST_ERROR = 0.05
NAMES = {"group": "kt-kernel RAWINT4", "row": "kt-kernel AMXINT4", "torch": "torch int4"}
COLUMNS = (
    ("tokens", "tokens", 7, ""),
    ("ours_ms", "ours ms", 9, ".3f"),
    ("ours_gbps", "GB/s", 7, ".1f"),
    ("ours_read_fraction", "of read", 8, ".2f"),
    ("ours_mac_fraction", "of int8 peak", 14, ".2f"),
    *(
        column
        for name, heading in (("group", "RAWINT4 ms"), ("row", "AMXINT4 ms"), ("torch", "torch ms"))
        for column in (
            (f"{name}_ms", heading, 12, ".3f"),
            (f"{name}_read_fraction", "of read", 8, ".2f"),
            *([(f"{name}_workers", "workers", 8, "")] if name != "torch" else []),
            (f"{name}_ratio_median", "ratio", 7, ".2f"),
        )
    ),
)


class Layer(Protocol):
    def prepared(self, x: Tensor, weights: Tensor, ids: Tensor) -> Callable[[], Tensor]: ...


Choice = Mapping[int, Layer]  # number of workers: a layer with so many
Calls = Sequence[Callable[[], Tensor]]


def filled_experts(weights: Weights) -> NativeExperts:
    experts = NativeExperts(EXPERTS, INNER, HIDDEN, FORMATS["q4"], torch.device("cpu"))
    for which, parts in weights.items():
        for e, part in enumerate(parts):
            experts.fill(e, which, part)
    return experts


def exact_output(weights: Weights, x: Tensor, of_experts: Tensor, ids: Tensor) -> Tensor:
    """The layer in float32."""

    def expert(e: int, x: Tensor) -> Tensor:
        gate, up, down = (weights[name][e].floats() for name in ("gate", "up", "down"))
        return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    return routed(x.to(torch.bfloat16).float(), of_experts, ids, expert)


def checked(exact: Tensor, outputs: Mapping[str, Tensor]) -> dict[str, float]:
    """The errors of `outputs` as a part of `exact`; raises where one is too large."""
    errors = {name: float((out.float() - exact).norm() / exact.norm()) for name, out in outputs.items()}
    if not all(error <= MOST_ERROR for error in errors.values()):  # a NaN fails this too
        text = ", ".join(f"{name} {error:.3f}" for name, error in errors.items())
        raise UserError(f"the outputs are not the layer's: errors {text}; allowed: {MOST_ERROR}")
    return errors


def compare(weights: Weights, choices: Mapping[str, Choice], seconds: float) -> Iterator[Row]:
    """A row for each number of tokens, measured for `seconds` with the fastest layer of each choice."""
    cpu, limits = load_ops("cpu"), Limits()
    experts = filled_experts(weights)
    for tokens in TOKENS:
        inputs, hit = random_inputs(tokens)
        tape = engine.Tape()
        with tape.capture():
            outs = [cpu.moe(*each, experts, 0) for each in inputs]
        workers = {name: fastest(choice, inputs, seconds / 5) for name, choice in choices.items()}
        calls = {name: prepared(choices[name][workers[name]], inputs) for name in choices}
        tape.replay()
        exact = exact_output(weights, *inputs[0])
        errors = checked(exact, {"ours": outs[0]} | {name: each[0]() for name, each in calls.items()})
        runs: dict[str, Callable[[], object]] = {"ours": tape.replay, "read": limits.read, "multiply": limits.multiply}
        runs |= {name: functools.partial(_run_all, each) for name, each in calls.items()}
        times = take_turns(runs, seconds, LEAST, PAUSE)
        took = {name: statistics.median(each) for name, each in times.items()}
        read, peak = limits.read_gbps(took["read"]), limits.int8_gmacs(took["multiply"])
        row: Row = dict(tokens=tokens, experts=hit, read_gbps=read, int8_gmacs=peak)
        row |= {f"{name}_workers": count for name, count in workers.items()}
        for name, error in errors.items():
            ms = took[name] / len(inputs) * 1e3
            gbps, gmacs = hit * experts.nbytes / EXPERTS / ms / 1e6, 3 * tokens * TOP_K * HIDDEN * INNER / ms / 1e6
            found = dict(ms=ms, gbps=gbps, read_fraction=gbps / read, mac_fraction=gmacs / peak, error=error)
            found |= {f"ratio_{key}": ratio for key, ratio in ratios(times["ours"], times[name]).items()}
            row |= {f"{name}_{key}": value for key, value in found.items()}
        yield row


def prepared(layer: Layer, inputs: Sequence[Inputs]) -> Calls:
    return [layer.prepared(*each) for each in inputs]


def fastest(choice: Choice, inputs: Sequence[Inputs], seconds: float) -> int:
    """The number of workers of the layer that is fastest in a short trial."""
    if len(choice) == 1:
        return next(iter(choice))
    runs = {str(workers): functools.partial(_run_all, prepared(layer, inputs)) for workers, layer in choice.items()}
    times = take_turns(runs, seconds, LEAST, PAUSE)
    return int(min(times, key=lambda workers: statistics.median(times[workers])))


def _run_all(calls: Calls) -> None:
    for call in calls:
        call()


def lines(rows: list[Row]) -> Lines:
    tokens = [row["tokens"] for row in rows]
    return {heading: (tokens, [row[f"{name}_ratio_median"] for row in rows]) for name, heading in NAMES.items()}


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("--seconds", type=float, default=5, help=f"of turns for a row; at least {LEAST} turns")
    args = parser.parse_args(argv)
    kt_kernel = library()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    chosen = engine.start(args.threads, args.instruction_set)
    weights = random_weights(EXPERTS, INNER, HIDDEN)
    pools = {workers: thread_pool(workers) for workers in {args.threads, max(args.threads - 1, 1)}}
    choices: dict[str, Choice] = {
        name: {workers: KtMoe(weights, method, TOP_K, max(TOKENS), pool) for workers, pool in pools.items()}
        for name, method in (("group", "RAWINT4"), ("row", "AMXINT4"))
    }
    choices["torch"] = {args.threads: TorchInt4Moe(weights)}
    versions = dict(kt_kernel=kt_kernel.__version__, kt_variant=kt_kernel.__cpu_variant__, torch=torch.__version__)
    print(f"{chosen}, {args.threads} threads; " + ", ".join(f"{name} {text}" for name, text in versions.items()))
    rows = printed(compare(weights, choices, args.seconds), COLUMNS)
    write_rows(args.json, rows, threads=args.threads, instruction_set=chosen, seconds=args.seconds, **versions)
    plot(args.plot, {"tokens": lines(rows)}, "their time / Umbra's")


if __name__ == "__main__":
    run_main(main)

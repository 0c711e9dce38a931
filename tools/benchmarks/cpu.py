"""Speed of the CPU compared with the machine's limits, measured in the same run: decode, moe, attention, replay or
steps.

    umbra bench cpu COMMAND [--threads 2] [--instruction-set SET] [--json FILE] [--plot FILE]; --help shows all

Limits: see machine.py.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from umbra.base.errors import UserError, run_main
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.engine.step.loop import Loop
from umbra.executor.model_runner import make_runner
from umbra.executor.platform.cpu.device import DecodeGraph
from umbra.models.batch import Batch
from umbra.ops import load_ops
from umbra.ops.cpu import engine
from umbra.ops.cpu.matrix import NativeExperts, NativeMatrix
from umbra.ops.formats import FORMATS
from umbra.ops.interface import Paged
from umbra.tools.benchmarks.machine import MachineLimits, alternate
from umbra.tools.benchmarks.output import Lines, Row, flags, plot, printed, write_rows
from umbra.tools.benchmarks.umbra_engine import (
    HELP_OF_FORMAT,
    HELP_OF_REST,
    WEIGHTS,
    EngineSetup,
    Routed,
    Umbra,
    step_bytes,
    step_macs,
    step_seconds,
)

BATCHES, CONTEXTS, PROMPTS = (1, 4, 8), (64, 2048, 8192, 32768), (128, 512, 2048, 8192)
DECODE_COLUMNS = (
    ("phase", "phase", 8, ""),
    ("batch", "batch", 7, ""),
    ("context", "context", 9, ""),
    ("tokens_per_s", "tokens/s", 11, ".1f"),
    ("ms", "ms", 10, ".2f"),
    ("experts", "experts", 9, ".1f"),
    ("step_gb", "GB", 8, ".3f"),
    ("limit_fraction", "of limit", 9, ".2f"),
    ("int8_fraction", "of int8 peak", 14, ".2f"),
)


def decode_rows(
    umbra: Umbra, limits: MachineLimits, decodes: Sequence[tuple[int, int]], prompts: Sequence[int], seconds: float
) -> Iterator[Row]:
    """The rows for each (context, batch) of `decodes` and each length of `prompts`."""
    generator = torch.Generator().manual_seed(0)
    model, top_k = umbra.model, umbra.config.experts_per_token

    def timed(step: Callable[[], object], least: int, routed: Routed) -> dict[str, float]:
        runs = {"step": step, "count": routed.count, "read": limits.read, "multiply": limits.multiply}
        return alternate(runs, seconds, least)

    def row(
        phase: str, batch: int, context: int, sequences: int, cached: int, experts: float, took: dict[str, float]
    ) -> Row:
        size, read = step_bytes(model, batch, sequences, cached, experts), limits.read_gbps(took["read"])
        macs, peak = step_macs(model, batch, sequences, top_k), limits.int8_gmacs(took["multiply"])
        least = (
            step_seconds(model, sequences, cached, experts, read, peak / 2) if phase == "decode" else size / read / 1e9
        )
        return dict(
            phase=phase,
            batch=batch,
            context=context,
            tokens_per_s=batch / took["step"],
            ms=took["step"] * 1e3,
            experts=experts,
            step_gb=size / 1e9,
            read_gbps=read,
            limit_fraction=least / took["step"],
            int8_fraction=macs / took["step"] / 1e9 / peak,
        )

    for context, batch in decodes:
        umbra.assume(umbra.random_prompts(batch, context, generator))
        with Routed(model) as routed:
            umbra.capture_again()  # so that Routed records the ids of this graph

            def decode(batch: int = batch) -> None:
                umbra.step([row[0] for row in umbra.random_prompts(batch, 1, generator)])

            took = timed(decode, 7, routed)
        yield row("decode", batch, context, batch, context + 1, routed.experts, took)
    for length in prompts:
        with Routed(model) as routed:

            def prefill(length: int = length) -> None:
                umbra.prefill(*umbra.random_prompts(1, length, generator))

            took = timed(prefill, 3, routed)
        yield row("prefill", length, 0, 1, length, routed.experts, took)


def decode_panels(rows: list[Row]) -> dict[str, Lines]:
    decode: dict[str, tuple[list[float], list[float]]] = {}
    for context in dict.fromkeys(r["context"] for r in rows if r["phase"] == "decode"):
        mine = [r for r in rows if r["phase"] == "decode" and r["context"] == context]
        decode[f"of the limit, {context} cached"] = [r["batch"] for r in mine], [r["limit_fraction"] for r in mine]
    prefill = [r for r in rows if r["phase"] == "prefill"]
    peak = {"of the int8 peak": ([r["batch"] for r in prefill], [r["int8_fraction"] for r in prefill])}
    return {"sequences (decode)": decode, "tokens of the prompt (prefill)": peak}


def decode(argv: list[str]) -> None:
    """Decode and prefill speed of the model of a case.

    Weights are random with zero mean; each sequence has random tokens of its own. A step takes token ids and returns
    logits through the engine: packing, prefill in the case's chunks, and the replayed decode graph are included,
    sampling is not.


    A row, of the table and of `rows` in the JSON file:
      phase          decode or prefill
      batch          decode: sequences in the step; prefill: tokens of the one prompt
      context        decode: cached tokens of each sequence, whose keys and values are random
      tokens_per_s, ms (median of a step)
      experts        mean number of different experts used in a layer, counted from the router's ids in the measured
                     steps (for a prompt in several chunks, in its last chunk)
      step_gb        bytes a step must move: every weight that it uses once (only the experts used, only the tokens'
                     rows of the embedding), the cached keys and values, and recurrent states, which are also written
                     and therefore count twice
      read_gbps      plain reads of memory, measured in turn with the steps
      limit_fraction  step_gb / read_gbps / time: 1 is the roof of decode. Attention over latents counts with its
                     multiply-adds at half the int8 peak, if they take longer than its reads.
      int8_fraction  multiply-adds with weights / time / the int8 peak measured in turn: 1 is the roof of prefill.
                     Attention's own products count in the time, not in the multiply-adds.
    """
    parser = flags(decode.__doc__, "umbra bench cpu decode")
    parser.add_argument("--case", default="bench_30b_shape_cpu", help="whose shapes")
    parser.add_argument("--layers", type=int, help="default: the case's")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="sequences in a decode step")
    parser.add_argument("--format", choices=WEIGHTS, default="q4", help=HELP_OF_FORMAT)
    parser.add_argument("--rest", choices=("none", "q8"), default="none", help=HELP_OF_REST)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="cached tokens of each sequence")
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help="tokens of a prompt")
    parser.add_argument("--kv-dtype", default="auto", help="type of cached keys and values")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured for each row")
    args = parser.parse_args(argv)
    for flag in ("contexts", "batches", "prompts"):
        if min(getattr(args, flag)) < 1:
            raise UserError(f"--{flag} {min(getattr(args, flag))}: must be at least 1")
    longest = max(*args.prompts, *args.contexts)
    umbra = Umbra(
        EngineSetup(
            args.case,
            args.layers,
            args.format,
            args.threads,
            args.instruction_set,
            max(args.batches),
            longest,
            args.kv_dtype,
            rest=args.rest,
        )
    )
    decodes = list(itertools.product(args.contexts, args.batches))
    rows = printed(decode_rows(umbra, MachineLimits(), decodes, args.prompts, args.seconds), DECODE_COLUMNS)
    settings = {key: getattr(args, key) for key in ("case", "format", "kv_dtype", "threads", "instruction_set")}
    write_rows(args.json, rows, layers=umbra.config.num_hidden_layers, **settings)
    plot(args.plot, decode_panels(rows), "fraction of the machine's limit")


HIDDEN, INNER, TOP_K, EXPERTS = 2048, 768, 8, 128
TOKENS = (1, 2, 4, 8, 16, 32, 128, 1024, 4096)
MoeInputs = tuple[Tensor, Tensor, Tensor]  # x (tokens, hidden), weights (tokens, top k), ids (tokens, top k)
MOE_COLUMNS = (
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


def moe_inputs(tokens: int) -> tuple[list[MoeInputs], float]:
    """The inputs of some calls, and how many experts a call uses on average."""
    inputs = []
    for _ in range(8 if tokens <= 128 else 2):
        ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
        inputs.append((torch.randn(tokens, HIDDEN), torch.full((tokens, TOP_K), 1 / TOP_K), ids))
    return inputs, sum(len(ids.unique()) for _, _, ids in inputs) / len(inputs)


def moe_rows(format: str, limits: MachineLimits) -> Iterator[Row]:
    """A row for each number of tokens."""
    cpu = load_ops("cpu")
    experts = filled_experts(format)
    bytes_each = experts.nbytes / EXPERTS
    for tokens in TOKENS:
        inputs, hit = moe_inputs(tokens)
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
            format=format,
            tokens=tokens,
            ms=ms,
            weight_gbps=gbps,
            read_gbps=read,
            read_fraction=gbps / read,
            gflops=2 * gmacs,
            gmacs=gmacs,
            int8_gmacs=peak,
            mac_fraction=gmacs / peak,
        )


def moe_lines(rows: list[Row]) -> Lines:
    drawn: dict[str, tuple[list[float], list[float]]] = {}
    for format in ("q4", "q8"):
        mine = [r for r in rows if r["format"] == format]
        tokens = [r["tokens"] for r in mine]
        drawn[f"{format}: of the read rate"] = tokens, [r["read_fraction"] for r in mine]
        drawn[f"{format}: of the int8 peak"] = tokens, [r["mac_fraction"] for r in mine]
    return drawn


def moe(argv: list[str]) -> None:
    """Speed of the fused mixture of experts.

    Shape: hidden 2048, intermediate 768, top-8 of 128 experts, together larger than the caches. Calls are captured and
    replayed as in decode, one after another, each with different tokens and therefore different experts. Weight GB/s
    counts each expert that a call uses once.
    """
    args = flags(moe.__doc__, "umbra bench cpu moe").parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    chosen = engine.start(args.threads, args.instruction_set)
    limits = MachineLimits()
    print(f"{chosen}, {args.threads} threads")
    rows = printed((row for format in ("q4", "q8") for row in moe_rows(format, limits)), MOE_COLUMNS)
    write_rows(args.json, rows, threads=args.threads, instruction_set=chosen)
    plot(args.plot, {"tokens": moe_lines(rows)}, "fraction of the machine's limit")


DIM, PAGE = 128, 16
BEYOND = 128 << 20  # bytes of the caches of a row
TYPES = (torch.bfloat16, torch.int8)
ATTENTION_COLUMNS = (
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
class AttentionCase:
    """The last `new` of `cached` tokens of a sequence."""

    cached: int
    new: int
    heads: int = 32
    kv_heads: int = 4

    @property
    def macs(self) -> float:
        seen = self.new * (self.cached - self.new) + self.new * (self.new + 1) / 2
        return 2 * seen * self.heads * DIM


SIZES = ((2048, 1), (8192, 1), (32768, 1), (8192, 1, 48, 8), (8192, 1, 4, 4), (512, 512), (2048, 512), (8192, 512))
CASES = tuple(AttentionCase(*sizes) for sizes in SIZES)
Call = tuple[Tensor, Tensor, Tensor, Paged]


def attention_inputs(case: AttentionCase, dtype: torch.dtype) -> tuple[Call, int]:
    """Returns the arguments of `attention` (without the scale) for one sequence of random tokens, and the bytes of its
    caches."""
    cpu = load_ops("cpu")
    pages = -(-case.cached // PAGE)
    table = torch.randperm(pages)[None]
    keys, values = (cpu.kv_cache(pages, PAGE, case.kv_heads, DIM, dtype, torch.device("cpu")) for _ in "kv")
    for slots in torch.arange(pages * PAGE).split(1 << 14):
        k, v = torch.randn(2, len(slots), case.kv_heads, DIM)
        cpu.write_kv(k, v, keys, values, slots)
    # `attention` writes nothing, so it reads no slot mapping.
    paged = Paged(torch.empty(0), table, torch.tensor([0, case.new]), torch.tensor([case.cached]))
    q = torch.randn(case.new, case.heads, DIM)
    return (q, keys, values, paged), keys.nbytes + values.nbytes


def attention_rows(dtype: torch.dtype, limits: MachineLimits, seconds: float) -> Iterator[Row]:
    """A row for each case."""
    cpu = load_ops("cpu")
    for case in CASES:
        first, size = attention_inputs(case, dtype)
        calls = [first, *(attention_inputs(case, dtype)[0] for _ in range(BEYOND // size if case.new == 1 else 0))]
        tape = engine.Tape()
        with tape.capture():
            for call in calls:
                cpu.attention(*call, DIM**-0.5)
        runs = {"tape": tape.replay, "read": limits.read, "multiply": limits.multiply}
        took = alternate(runs, seconds)
        call_s, read = took["tape"] / len(calls), limits.read_gbps(took["read"])
        peak = limits.int8_gmacs(took["multiply"]) / 2
        gbps, gmacs = size / call_s / 1e9, case.macs / call_s / 1e9
        yield dict(
            cache=str(dtype).removeprefix("torch."),
            heads=f"{case.heads}/{case.kv_heads}",
            cached=case.cached,
            new=case.new,
            ms=call_s * 1e3,
            gbps=gbps,
            read_gbps=read,
            read_fraction=gbps / read,
            gmacs=gmacs,
            peak_gmacs=peak,
            peak_fraction=gmacs / peak,
        )


def attention_panels(rows: list[Row]) -> dict[str, Lines]:
    def lines(decode: bool, key: str) -> Lines:
        drawn: dict[str, tuple[list[float], list[float]]] = {}
        for cache in dict.fromkeys(r["cache"] for r in rows):
            mine = [r for r in rows if r["cache"] == cache and r["heads"] == "32/4" and (r["new"] == 1) == decode]
            drawn[f"{cache}: {key}"] = [r["cached"] for r in mine], [r[f"{key.split()[-1]}_fraction"] for r in mine]
        return drawn

    return {"cached tokens (decode)": lines(True, "of read"), "cached tokens (512 new)": lines(False, "of peak")}


def attention(argv: list[str]) -> None:
    """Speed of attention over long contexts.

    Heads of 128, pages of 16 tokens in random order; a row names its query and KV heads. Calls are captured and
    replayed as in decode; in decode each call has caches of its own, together larger than the processor's. GB/s counts
    each cached key and value once. The peak is half of that of int8, since a dot instruction of bfloat16 does half as
    many multiply-adds.
    """
    parser = flags(attention.__doc__, "umbra bench cpu attention")
    parser.add_argument("--seconds", type=float, default=2.0, help="measured for each row")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"{engine.start(args.threads, args.instruction_set)}, {engine.placement()}")
    limits = MachineLimits()
    rows = printed((row for dtype in TYPES for row in attention_rows(dtype, limits, args.seconds)), ATTENTION_COLUMNS)
    write_rows(args.json, rows, threads=args.threads, instruction_set=args.instruction_set)
    plot(args.plot, attention_panels(rows), "fraction of the machine's limit")


OPS = 1000
REPLAY_COLUMNS = (("threads", "threads", 8, ""), ("op", "op", 8, ""), ("us", "us", 8, ".2f"))


def replay_rows(threads: int) -> Iterator[Row]:
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


def replay(argv: list[str]) -> None:
    """Overhead of a replayed graph: microseconds for each op of a tape of the smallest ops.

    A row, of the table and of `rows` in the JSON file:
      threads  1, 2, 4 ... and --threads
      op       norm: 16 numbers, computed by the calling thread; linear: 64 x 32 for each thread, computed by the pool
      us       microseconds an op, median of replays of 1,000
    """
    args = flags(replay.__doc__, "umbra bench cpu replay").parse_args(argv)
    torch.set_num_threads(1)
    counts = sorted({args.threads, *(2**i for i in range(args.threads.bit_length()) if 2**i < args.threads)})

    def rows_of(threads: int) -> Iterator[Row]:
        engine.start(threads, args.instruction_set)
        yield from replay_rows(threads)

    rows = printed((row for threads in counts for row in rows_of(threads)), REPLAY_COLUMNS)
    write_rows(args.json, rows, instruction_set=args.instruction_set)
    lines = {op: (counts, [r["us"] for r in rows if r["op"] == op]) for op in ("norm", "linear")}
    plot(args.plot, {"threads": lines}, "microseconds an op")


PROMPT = 16
KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7},
    "top-k, top-p": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "penalised": {"frequency_penalty": 0.5},
}
STEP_COLUMNS = (
    ("batch", "batch", 6, ""),
    ("tokens", "tokens", 14, ""),
    ("step_us", "step us", 9, ".0f"),
    ("model_us", "model us", 10, ".0f"),
    ("rest_us", "rest us", 9, ".0f"),
    ("per_s", "tokens/s", 10, ".0f"),
)


class ReplayClock:
    """Seconds of the replays of captured graphs."""

    def __init__(self) -> None:
        self.seconds = 0.0
        replay = DecodeGraph.replay

        def timed(graph: DecodeGraph, batch: Batch) -> torch.Tensor:
            start = time.perf_counter()
            try:
                return replay(graph, batch)
            finally:
                self.seconds += time.perf_counter() - start

        DecodeGraph.replay = timed  # type: ignore[method-assign, assignment]


def step_rows(loop: Loop, clock: ReplayClock, batch: int, steps: int) -> Iterator[Row]:
    """Rounds of steps of all kinds, until each has `steps`. A round first prefills, and its second step may capture."""
    vocabulary, longest = loop.engine.config.vocab_size, loop.engine.case.max_sequence_length
    generator = torch.Generator().manual_seed(batch)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    while len(times["greedy"]) < steps:
        for kind, settings in KINDS.items():
            for _ in range(batch):
                ids = tuple(torch.randint(vocabulary, (PROMPT,), generator=generator).tolist())
                params = SamplingParams(max_tokens=longest - PROMPT, ignore_eos=True, **settings)  # type: ignore[arg-type]
                loop.submit(Request(ids, params))
            loop.step()
            loop.step()
            while not loop.idle:
                clock.seconds, start = 0.0, time.perf_counter()
                loop.step()
                times[kind].append((time.perf_counter() - start, clock.seconds))
    for kind, measured in times.items():
        step = statistics.median(whole for whole, _ in measured)
        model, rest = (statistics.median(part) for part in ((m for _, m in measured), (w - m for w, m in measured)))
        yield dict(
            batch=batch, tokens=kind, step_us=step * 1e6, model_us=model * 1e6, rest_us=rest * 1e6, per_s=batch / step
        )


def steps(argv: list[str]) -> None:
    """The cost of a decode step besides the model: scheduling, packing, choosing tokens, bookkeeping.

    Sequences of random tokens are decoded through the engine's loop; a batch of each kind takes its steps in turn with
    the others. A row, of the table and of `rows` in the JSON file:
      batch     sequences that decode together
      tokens    how they are chosen: the largest logit; sampled with temperature 0.7, or with top-k 20 and top-p 0.9
                too; penalised: the largest logit with a frequency penalty
      step_us   median microseconds of a step
      model_us  the replay of the captured graph in it
      rest_us   median of the difference
      per_s     tokens a second
    """
    parser = flags(steps.__doc__, "umbra bench cpu steps")
    parser.add_argument("--case", default="demo")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--steps", type=int, default=400, help="of each row, at least")
    args = parser.parse_args(argv)
    clock, rows = ReplayClock(), []

    def rows_of(batch: int) -> Iterator[Row]:
        changes = [f"data_config.batch_size={batch}", f"threads={args.threads}", "input_max_len=64", "warm_up=false"]
        case = load_case(args.case, [*changes, "max_new_tokens=64", f"instruction_set={args.instruction_set}"])
        with tempfile.TemporaryDirectory() as folder:
            runner = make_runner(case, Path(folder), RankEnv(0, 1, 0, 1, ""))
            runner.setup()
            yield from step_rows(runner.loop, clock, batch, args.steps)

    os.environ.setdefault("TQDM_DISABLE", "1")
    rows = printed((row for batch in args.batches for row in rows_of(batch)), STEP_COLUMNS)
    write_rows(args.json, rows, case=args.case, threads=args.threads)
    lines = {kind: (args.batches, [r["rest_us"] for r in rows if r["tokens"] == kind]) for kind in KINDS}
    plot(args.plot, {"sequences": lines}, "microseconds a step besides the model")


COMMANDS = {command.__name__: command for command in (decode, moe, attention, replay, steps)}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="umbra bench cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments; --help shows them")
    given = parser.parse_args(argv)
    COMMANDS[given.command](given.arguments)


if __name__ == "__main__":
    run_main(main)

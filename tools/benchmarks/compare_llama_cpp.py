"""Speed of Umbra, of llama.cpp and, where IK_LLAMA=DIR names a build of it, of ik_llama.cpp, with the same weights and
tokens, measured in turns. A peer has a process of its own; one that dies is a line of the output, and the rest goes on.

    .venv/bin/umbra bench compare_llama_cpp [--case bench_30b_shape_cpu] [--layers N] [--experts N]
        [--format q4|q8|auto] [--rest none|q8] [--gguf Q4_K_M|Q6_K|IQ4_XS|MXFP4] [--peers llama.cpp ik_llama.cpp]
        [--decodes 1x64 4x64 8x64 1x8192 1x32768] [--prompts 128 512 2048 8192] [--json FILE] [--plot FILE]

The weights are random, with the shapes of the case's model, and written as GGUF with exactly the same values
(gguf_file.py); with --gguf all engines read one file of those types (gguf_mix.py). The file is deleted after the load.
A step takes token ids and returns logits, without sampling; both engines use the same number of threads. llama.cpp runs
with or without flash attention, whichever is faster in a short trial of the row. Before anything is timed, both must
give the same logits. Contexts of more than 1,024 tokens are not computed: their keys and values are random, as in
`umbra bench cpu decode`.

A row, of the table and of `rows` in the JSON file:
  phase         decode or prefill
  batch         decode: sequences in the step; prefill: tokens of the one prompt
  context       decode: cached tokens of each sequence
  ours, theirs  tokens/s, medians; ours_best, theirs_best: of the fastest turn
  ours_fraction, theirs_fraction   of the machine's limit in the same turns: of decode that of `umbra bench cpu decode`;
                of prefill the peak of int8 multiply-adds, for all products with weights
  ratio_median, ratio_min, ratio_max   ours / theirs of each pair of neighbouring turns: above 1, Umbra is faster
  ik, ik_best, ik_fraction, ik_ratio_median, ik_ratio_min, ik_ratio_max   the same of ik_llama.cpp, if it takes part
  flash         whether llama.cpp's flash attention was on

Only an idle machine gives a fair ratio: llama.cpp's threads spin until the others arrive after every operator, and one
other busy process can make its step twenty times longer. Medians far below the best turns show that this happened.
"""

import functools
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from umbra.base.errors import UserError, run_main
from umbra.commands.logits import prefill_logits
from umbra.executor.config.env import ik_llama
from umbra.ops.cpu.engine import own_cpus
from umbra.tools.benchmarks.gguf_file import write_gguf
from umbra.tools.benchmarks.gguf_mix import MIXES, write_mix
from umbra.tools.benchmarks.ik_llama_engine import IkLlama
from umbra.tools.benchmarks.llama_cpp_engine import LlamaCpp, library
from umbra.tools.benchmarks.machine import MachineLimits, ratios, seconds_of, take_turns
from umbra.tools.benchmarks.output import Lines, Row, flags, plot, printed, write_rows
from umbra.tools.benchmarks.peer_engine import Peer
from umbra.tools.benchmarks.peer_process import PeerDied, PeerProcess
from umbra.tools.benchmarks.umbra_engine import (
    HELP_OF_FORMAT,
    HELP_OF_REST,
    WEIGHTS,
    EngineSetup,
    Routed,
    Umbra,
    step_macs,
    step_seconds,
)

DECODES, PROMPTS = ("1x64", "4x64", "8x64", "1x8192", "1x32768"), (128, 512, 2048, 8192)
CHECKED = 64  # cached tokens of the sequences whose logits are compared
COMPUTED = 1024  # cached tokens up to which a context is computed; those of longer ones are random
STEPS = 8  # decode steps of one turn
LEAST = 3  # turns
PAUSE = 0.02  # seconds; llama.cpp's OpenMP threads spin for up to 10 ms before they sleep
PEERS = {"theirs": "llama.cpp", "ik": "ik_llama.cpp"}  # names in rows and in words
T = TypeVar("T")
COLUMNS = (
    ("phase", "phase", 8, ""),
    ("batch", "batch", 7, ""),
    ("context", "context", 9, ""),
    ("ours", "ours", 9, ".1f"),
    ("ours_fraction", "of limit", 10, ".2f"),
)
THEIR_COLUMNS = (
    ("theirs", "theirs", 9, ".1f"),
    ("theirs_fraction", "of limit", 10, ".2f"),
    ("ratio_median", "ratio", 7, ".2f"),
    ("ratio_min", "least", 7, ".2f"),
    ("ratio_max", "most", 7, ".2f"),
)
IK_COLUMNS = (
    ("ik", "ik_llama", 10, ".1f"),
    ("ik_fraction", "of limit", 10, ".2f"),
    ("ik_ratio_median", "ratio", 7, ".2f"),
    ("ik_ratio_min", "least", 7, ".2f"),
    ("ik_ratio_max", "most", 7, ".2f"),
)
# Both round activations to 8 bits for every 32 columns. Of normal numbers the largest of 32 is about 2.3 sigma, so the
# step is 2.3 / 127 sigma and the error 0.5 % of the input; two such inputs in a row in each half of a layer, and two
# engines whose errors are independent, make 1.1 %. The squared errors of L layers add up over a residual stream that
# grows as L, and each layer passes on the error of its input: 1.1 % * sqrt(1 + ln L), 1.9 % for 8 layers, plus that of
# the head. A row in which the 8th and 9th expert are so close that the engines choose differently is off by about 10 %
# more, which is why the median is compared.
# Mistakes are larger: with one layer of two wrong, the median was 10 % for gate and up exchanged, 19 % for experts out
# of order, 23 % for a rotation of neighbours; with another rotation base 43 %.
MEDIAN_ERROR = 0.05
# The two largest of 150,000 normal logits lie sigma / 5 apart on average: an error of 2 % swaps one pair in 20, one of
# 10 % one in 4.
SAME_TOP = 0.75
# Random layers of some families magnify errors: with 6 of gpt-oss, whose layers add thirty times the embeddings'
# size to the residual stream, logits move by 30 % if embeddings do by 1 %. So much is allowed there as these layers
# make of the error of both engines, which is twice 1.1 %.
EMBEDDING_ERROR = 0.022
WRONG = 1.0  # the error of a row that differs as much as that of another token


def same_logits(ours: Umbra, theirs: PeerProcess, batch: int) -> dict[str, float]:
    """Compare all tokens of a prompt and one decode step of `batch` sequences; return the errors found, or raise."""
    generator = torch.Generator().manual_seed(1)
    (prompt,) = ours.random_prompts(1, CHECKED, generator)
    theirs.reserve(batch, CHECKED + 1, max(CHECKED, batch))
    logits = prefill_logits(ours.runner, [prompt])[0]
    with moved_embeddings(ours):
        moved = prefill_logits(ours.runner, [prompt])[0]
    contexts = ours.random_prompts(batch, CHECKED, generator)
    tokens = [row[0] for row in ours.random_prompts(batch, 1, generator)]
    prefill = logits, theirs.prefill_all(prompt)
    ours.begin(contexts)
    theirs.begin(contexts)
    return checked(theirs.name, prefill, (ours.step(tokens), theirs.step(tokens)), (logits, moved))


@contextmanager
def moved_embeddings(ours: Umbra) -> Iterator[None]:
    """Every element of the embeddings is off by EMBEDDING_ERROR of itself."""
    generator = torch.Generator().manual_seed(3)

    def moved(layer: object, args: object, rows: Tensor) -> Tensor:
        return rows + EMBEDDING_ERROR * rows * torch.randn(rows.shape, generator=generator)

    hook = ours.model.model.embed_tokens.register_forward_hook(moved)
    yield
    hook.remove()


def checked(
    name: str, prefill: tuple[Tensor, Tensor], decode: tuple[Tensor, Tensor], moved: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """The errors between (ours, theirs) in both phases, each (rows, vocabulary); raises where they are larger than the
    limits, or than what separates our own logits `moved`."""
    right = row_errors(*decode) < WRONG
    if not right.all():
        wrong = f"{int((~right).sum())} of {len(right)}"
        print(f"{name}: the logits of {wrong} sequences are wrong in a decode step of all; the others are compared")
    decode = decode[0][right], decode[1][right]
    differences: dict[str, float] = {}
    for phase, (a, b) in (("prefill", prefill), ("decode", decode)):
        differences[f"{phase}_error"] = float((a - b).norm() / a.norm())
        differences[f"{phase}_median_error"] = float(row_errors(a, b).median())
    differences["same_top"] = float(
        torch.cat([a.argmax(1) == b.argmax(1) for a, b in (prefill, decode)]).float().mean()
    )
    text = ", ".join(f"{key} {value:.3f}" for key, value in differences.items())
    allowed = max(MEDIAN_ERROR, float(row_errors(*moved).median()))
    least = min(SAME_TOP, float((moved[0].argmax(1) == moved[1].argmax(1)).float().mean()))
    medians = differences["prefill_median_error"], differences["decode_median_error"]
    if not (
        max(medians) <= allowed and differences["same_top"] >= least and 2 * len(decode[0]) >= len(right)
    ):  # NaN fails
        raise UserError(
            f"the logits of {name} differ: {text}; allowed: median_error {allowed:.3f}, same_top {least:.2f}"
        )
    print(f"same logits: {text}")
    return differences


def row_errors(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).norm(dim=1) / a.norm(dim=1)


def without_the_dead(peers: dict[str, PeerProcess], work: Callable[[], T]) -> T:
    """Repeats `work` until no peer dies in it, and returns its result. A peer that dies is removed from `peers`, with a
    printed line."""
    while True:
        try:
            return work()
        except PeerDied as died:
            print(died, flush=True)
            for key in [key for key, peer in peers.items() if peer.name == died.name]:
                peers.pop(key).close()


def compare(
    ours: Umbra,
    peers: dict[str, PeerProcess],
    decodes: Sequence[tuple[int, int]],
    prompts: Sequence[int],
    seconds: float,
) -> Iterator[Row]:
    """The rows for each (batch, context) of `decodes` and each length of `prompts`, each measured for `seconds`."""
    generator = torch.Generator().manual_seed(2)
    limits = MachineLimits()

    def row(
        phase: str,
        batch: int,
        context: int,
        tokens: int,
        run: Callable[[Umbra | PeerProcess], object],
        flash: bool,
        least: Callable[[Mapping[str, float]], float],
    ) -> Row:
        """`least`: the seconds that `run` takes at the machine's limits, given those of a turn of each limit."""
        engines: dict[str, Umbra | PeerProcess] = {"ours": ours, **peers}
        runs: dict[str, Callable[[], object]] = {"read": limits.read, "multiply": limits.multiply}
        runs |= {name: functools.partial(run, engine) for name, engine in engines.items()}
        times = take_turns(runs, seconds, LEAST, PAUSE, [peer.pid for peer in peers.values()])
        took = {name: statistics.median(seconds) for name, seconds in times.items()}
        row: Row = dict(phase=phase, batch=batch, context=context, flash=flash)
        for name in engines:
            row |= {name: tokens / took[name], f"{name}_best": tokens / min(times[name])}
            row[f"{name}_fraction"] = least(took) / took[name]
        for name in peers:
            against = ratios(times["ours"], times[name])
            row |= {f"{'ik_' if name == 'ik' else ''}ratio_{key}": ratio for key, ratio in against.items()}
        return row

    def decoded(batch: int, context: int, contexts: list[list[int]], steps: list[list[int]]) -> Row:
        def decode(engine: Umbra | PeerProcess) -> None:
            engine.steps(steps)

        def reads(took: Mapping[str, float]) -> float:
            rates = limits.read_gbps(took["read"]), limits.int8_gmacs(took["multiply"]) / 2
            return STEPS * step_seconds(ours.model, batch, context + 1, experts, *rates)

        for peer in peers.values():
            peer.reserve(batch, context + 1, max(batch, min(context, COMPUTED)))
        cache(ours, contexts)
        if "ik" in peers:
            cache(peers["ik"], contexts)
        experts = experts_of(ours, steps)
        flash = "theirs" in peers and faster_attention(peers["theirs"], contexts, decode)
        return row("decode", batch, context, batch * STEPS, decode, flash, reads)

    def prefilled(prompt: list[int]) -> Row:
        def prefill(engine: Umbra | PeerProcess) -> None:
            engine.prefill(prompt)

        def multiplies(took: Mapping[str, float]) -> float:
            return macs / limits.int8_gmacs(took["multiply"]) / 1e9

        for peer in peers.values():
            peer.reserve(1, len(prompt), len(prompt))
        macs = step_macs(ours.model, len(prompt), 1, ours.config.experts_per_token)
        flash = "theirs" in peers and faster_attention(peers["theirs"], [], prefill)
        return row("prefill", len(prompt), 0, len(prompt), prefill, flash, multiplies)

    for batch, context in decodes:
        contexts = ours.random_prompts(batch, context, generator)
        steps = [[row[0] for row in ours.random_prompts(batch, 1, generator)] for _ in range(STEPS)]
        yield without_the_dead(peers, functools.partial(decoded, batch, context, contexts, steps))
    for length in prompts:
        (prompt,) = ours.random_prompts(1, length, generator)
        yield without_the_dead(peers, functools.partial(prefilled, prompt))


def experts_of(ours: Umbra, steps: list[list[int]]) -> float:
    """Returns the average number of different experts of a layer that these steps use."""
    with Routed(ours.model) as routed:
        ours.capture_again()
        for tokens in steps:
            ours.step(tokens)
            routed.count()
    return routed.experts


def cache(engine: Umbra | PeerProcess, contexts: list[list[int]]) -> None:
    (engine.begin if len(contexts[0]) <= COMPUTED else engine.assume)(contexts)


def faster_attention(theirs: PeerProcess, contexts: list[list[int]], run: Callable[[PeerProcess], object]) -> bool:
    """Set llama.cpp to its faster attention with `contexts` cached; return whether that is flash attention."""
    times = {}

    def use(flash: bool) -> None:
        theirs.use(flash)
        if contexts:
            cache(theirs, contexts)

    for flash in (False, True):
        use(flash)
        times[flash] = seconds_of(lambda: run(theirs))
        if times[flash] < 1:  # else the first run's own work does not count
            times[flash] = min(seconds_of(lambda: run(theirs)) for _ in range(2))
    flash = times[True] < times[False]
    use(flash)
    return flash


@contextmanager
def gguf_file(folder: Path | None, keep: bool) -> Iterator[Path]:
    """The path of a GGUF file in `folder`, which stays only with `keep`."""
    try:
        handle, name = tempfile.mkstemp(suffix=".gguf", prefix="umbra-", dir=folder)
    except OSError as error:
        raise UserError(f"--folder {folder}: not writable: {error.strerror}") from None
    os.close(handle)
    path = Path(name)
    try:
        yield path
    finally:
        if keep:
            print(f"wrote {path}: {path.stat().st_size / 1e6:.0f} MB")
        else:
            path.unlink()  # engines keep it mapped


def panels(rows: list[Row]) -> dict[str, Lines]:
    def lines(mine: list[Row], over: str) -> Lines:
        drawn: dict[str, tuple[list[float], list[float]]] = {}
        for peer, name in PEERS.items():
            compared = [r for r in mine if peer in r]
            for key in ("median", "min", "max") if compared else ():
                ratio = f"ik_ratio_{key}" if peer == "ik" else f"ratio_{key}"
                drawn[f"{name}, {key}"] = [r[over] for r in compared], [r[ratio] for r in compared]
        return drawn

    shortest = min((r["context"] for r in rows if r["phase"] == "decode"), default=0)
    decode = [r for r in rows if r["phase"] == "decode" and r["context"] == shortest]
    prefill = [r for r in rows if r["phase"] == "prefill"]
    labels = f"sequences (decode, {shortest} cached)", "tokens of the prompt (prefill)"
    return dict(zip(labels, (lines(decode, "batch"), lines(prefill, "batch")), strict=True))


def pair_of(text: str) -> tuple[int, int]:
    """BATCHxCONTEXT"""
    batch, _, context = text.partition("x")
    if not (batch.isdecimal() and context.isdecimal() and int(batch) and int(context)):
        raise UserError(f"--decodes {text}: must be BATCHxCONTEXT, two numbers of at least 1, such as 4x64")
    return int(batch), int(context)


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("--case", default="bench_30b_shape_cpu", help="whose shapes")
    parser.add_argument("--layers", type=int, help="default: the case's; the weights are in memory twice")
    parser.add_argument("--experts", type=int, help="of a layer, with --layers; default: the case's")
    parser.add_argument("--format", choices=WEIGHTS, default="q4", help=HELP_OF_FORMAT)
    parser.add_argument("--rest", choices=("none", "q8"), default="none", help=HELP_OF_REST)
    parser.add_argument("--gguf", choices=MIXES, help="types of a GGUF file that all engines read; no --format then")
    parser.add_argument("--peers", nargs="+", choices=PEERS.values(), default=[*PEERS.values()], help="those that run")
    parser.add_argument("--decodes", nargs="+", default=DECODES, help="sequences x cached tokens of each")
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help="tokens of a prompt")
    parser.add_argument(
        "--seconds", type=float, default=10, help=f"of turns for a row; at least {LEAST} turns, after one not counted"
    )
    parser.add_argument(
        "--folder", type=Path, help="for the GGUF file, as large as the weights; default: a temporary one"
    )
    parser.add_argument("--keep", action="store_true", help="keep the GGUF file")
    args = parser.parse_args(argv)
    for name, value in (("threads", args.threads), ("prompts", min(args.prompts))):
        if value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    decodes = [pair_of(text) for text in args.decodes]
    version = library().__version__
    batch = max(batch for batch, _ in decodes)
    longest = max(*args.prompts, *(context + 1 for _, context in decodes), CHECKED + 1)
    sizes = args.threads, args.instruction_set, batch, longest
    peers: dict[str, PeerProcess] = {}
    with gguf_file(args.folder, args.keep) as path:
        if args.gguf:
            write_mix(path, args.case, args.layers, args.gguf)
            ours = Umbra(EngineSetup(args.case, None, "auto", *sizes, checkpoint=path))
            shutil.rmtree(ours.runner.folder)
        else:
            ours = Umbra(EngineSetup(args.case, args.layers, args.format, *sizes, rest=args.rest, experts=args.experts))
            write_gguf(path, ours.model, ours.config)
        folder, cpus = ik_llama(), set(own_cpus())
        makers: dict[str, Callable[[], Peer]] = {"theirs": functools.partial(LlamaCpp, path, args.threads)}
        if folder:
            makers["ik"] = functools.partial(IkLlama, folder, path, args.threads)
        for key in (key for key in makers if PEERS[key] in args.peers):
            try:
                peers[key] = PeerProcess(PEERS[key], makers[key], cpus)
            except PeerDied as died:
                print(died)
    checks = without_the_dead(peers, lambda: {key: same_logits(ours, peer, batch) for key, peer in peers.items()})
    columns = COLUMNS + (THEIR_COLUMNS if "theirs" in peers else ()) + (IK_COLUMNS if "ik" in peers else ())
    rows = printed(compare(ours, peers, decodes, args.prompts, args.seconds), columns)
    for peer in peers.values():
        peer.close()
    logits = checks.get("theirs", {})
    settings = {key: getattr(args, key) for key in ("case", "format", "gguf", "threads", "instruction_set", "seconds")}
    layers = ours.config.num_hidden_layers
    write_rows(args.json, rows, layers=layers, llama_cpp_python=version, logits=logits, **settings)
    plot(args.plot, panels(rows), "Umbra's speed / theirs")


if __name__ == "__main__":
    run_main(main)

"""Umbra's server compared with llama-server: the same weights, prompts and client, in turns, each time in fresh
processes.

    .venv/bin/umbra bench serving_files FOLDER  # once, some minutes and 4 GB
    .venv/bin/umbra bench serving FOLDER [--llama-server PROGRAM] [--rounds 3]
        [--only NAME ...] [--short] [--json FILE] [--plot FILE]
    .venv/bin/umbra bench serving_report FILE   # the tables of docs/serving.md from the JSON file

Scenarios of each round, for each server (serving_client.py has what is measured, times in ms):
  streams   a closed loop of 8 requests at a time, prompts of 128 tokens, answers of 64
  long      gaps between the tokens of 7 running streams while a prompt of 1,024 tokens is prefilled
  pause     the same with prompts of 2,000 tokens (only Umbra)
  prefix    time to the first token of prompts of 1,000 tokens, and of the same prompts again (only Umbra)
  http      8 equal requests over HTTP, and the same in the engine's own loop (only Umbra)
and after the rounds:
  rates     an open loop: Poisson arrivals at several rates (both servers; once)
  wave      the demo in an arena too small for all experts and the most KV pages: elastic and fixed splits, under a load
            that rises, above what they can do, and falls; goodput in each phase (only Umbra). The rates follow what the
            elastic server can do on this machine; all servers get the same requests, in as many rounds.

`goals` in the JSON file says what was wanted and what was found, of medians over the rounds. `--plot` draws throughput
against latency over the rates in FILE, and memory and goodput over the wave in a file with `_wave` after FILE's name.
Only an idle machine gives fair figures; the client shares it, and its CPU time is reported.
"""

import asyncio
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from umbra.base.errors import UserError, run_main
from umbra.executor.config.load import load_case
from umbra.tools.benchmarks import serving_peers
from umbra.tools.benchmarks.output import Row, flags, printed, write_rows
from umbra.tools.benchmarks.serving_client import (
    Client,
    TimedAnswer,
    TimedCall,
    figures,
    looked_at,
    random_calls,
    share,
)
from umbra.tools.benchmarks.serving_peers import ServerPeer, started
from umbra.tools.benchmarks.serving_report import COLUMNS, ELASTIC, LOOP, OURS, draw_rates, draw_wave, goals

CASE = "bench_30b_shape_cpu"
STREAMS = 8
LONGEST, NEW = 2048, 256  # most tokens of a prompt and of an answer
VOCABULARY = 151_000
RATES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5)  # requests a second
# Phases of the wave, and requests as parts of what the elastic server can do.
PHASES = (("few", 0.15), ("many", 0.8), ("too many", 1.3), ("few again", 0.15))
WAVE_MB, WAVE_STREAMS, WAVE_VOCABULARY, WAVE_PROMPT, WAVE_NEW = 8, 16, 4000, 64, 128
WAVE_TTFT_S = 1.5  # a request that would wait for longer is refused
SPLITS = (0, 25, 50, 75)  # percent of the arena's places that experts have
SAMPLE_S = 0.5  # between two looks at the memory
PAUSE_S = 0.5  # between two long prompts, in which the streams run alone
ENGINE = "seconds of the engine's own loop: "
SCENARIOS = ("streams", "long", "pause", "prefix", "http", "rates", "wave")


class ServingPlan:
    """The amount of work in each measurement; with `short` it only shows that everything works."""

    def __init__(self, short: bool):
        self.calls = STREAMS if short else 3 * STREAMS
        self.tokens = 16 if short else 64
        self.longs = 1 if short else 3
        self.prompts = 2 if short else 5
        self.http_tokens = 16 if short else 128
        self.rates = RATES[:1] if short else RATES
        self.seconds = 8.0 if short else 20.0  # of arrivals at one rate, or in one phase of the wave
        self.splits = SPLITS[1:2] if short else SPLITS


def streams(client: Client, plan: ServingPlan, seed: str) -> Row:
    calls = random_calls(f"streams {seed}", plan.calls, 128, plan.tokens, VOCABULARY)
    return figures(asyncio.run(client.streams(calls, STREAMS)))


def long_prompts(client: Client, plan: ServingPlan, seed: str, prompt: int = 1024) -> Row:
    """Gaps of running streams that lie, in part, in the time from a long prompt's sending to its first token."""
    calls = random_calls(f"running {prompt} {seed}", STREAMS - 1, 128, NEW, VOCABULARY)
    longs = random_calls(f"long {prompt} {seed}", plan.longs, prompt, 4, VOCABULARY)
    running = [TimedAnswer(0.0) for _ in calls]

    async def measure() -> list[TimedAnswer]:
        tasks = [asyncio.create_task(client.ask(call, answer)) for call, answer in zip(calls, running, strict=True)]
        await begun(running)
        await asyncio.sleep(PAUSE_S)
        answers = []
        for call in longs:
            answers += await client.streams([call], 1)
            await asyncio.sleep(PAUSE_S)
        await asyncio.gather(*tasks)
        return answers

    asked = asyncio.run(measure())
    looked_at(running)
    spans = [(long.sent, long.times[0]) for long in asked if not long.error]
    pairs = [pair for answer in running for pair in pairwise(answer.times)]
    during = [b - a for a, b in pairs if any(b > sent and a < first for sent, first in spans)]
    return {
        "failed": sum(bool(answer.error) for answer in running + asked),
        "gaps": len(during),
        "itl_p50": 1e3 * share(during, 0.5),
        "itl_p99": 1e3 * share(during, 0.99),
        "itl_longest": 1e3 * max(during),
        "calm_itl_p50": 1e3 * share((b - a for a, b in pairs), 0.5),
        "long_ttft_p50": 1e3 * share((first - sent for sent, first in spans), 0.5),
    }


async def begun(answers: Sequence[TimedAnswer]) -> None:
    """Returns when a piece of each of `answers` has come."""
    while not all(answer.pieces or answer.error for answer in answers):
        await asyncio.sleep(0.005)


def pause(client: Client, plan: ServingPlan, seed: str) -> Row:
    return long_prompts(client, plan, seed, 2000)


def prefixes(client: Client, plan: ServingPlan, seed: str) -> Row:
    """Times to the first token of prompts that are new, and of the same ones again."""
    calls = random_calls(f"prefix {seed}", plan.prompts, 1000, 4, VOCABULARY)
    new = asyncio.run(client.streams(calls, 1))
    again = asyncio.run(client.streams(calls, 1))
    cached = statistics.median(answer.cached_tokens for answer in again)
    first, second = (1e3 * share((a.ttft for a in answers), 0.5) for answers in (new, again))
    return {"ttft_new": first, "ttft_again": second, "ratio": first / second, "found": cached}


def http(client: Client, plan: ServingPlan, seed: str) -> Row:
    """8 requests; 7 of them are sent when the first has its first token, so that the steps do not depend on which of
    them come a moment earlier. The engine's own loop runs the same ones: see `engine_loop`."""
    calls = equal_calls(plan.http_tokens, seed)
    answers = [TimedAnswer(0.0) for _ in calls]

    async def measure() -> None:
        first = asyncio.create_task(client.ask(calls[0], answers[0]))
        await begun(answers[:1])
        await asyncio.gather(first, *map(client.ask, calls[1:], answers[1:]))

    asyncio.run(measure())
    return {"seconds": figures(looked_at(answers))["seconds"]}


def equal_calls(tokens: int, seed: str) -> list[TimedCall]:
    return random_calls(f"http {seed}", STREAMS, 128, tokens, VOCABULARY)


def engine_loop(settings: Sequence[str], tokens: int, seed: str) -> None:
    """Prints the seconds that rank 0's loop takes for the requests of `http`, without a socket or a front. To be run in
    a process of its own."""
    from umbra.executor.config.env import rank_env
    from umbra.executor.engine.schedule.request import Request, SamplingParams
    from umbra.executor.model_runner import make_runner
    from umbra.serving.ranks.worker import Worker

    runner = make_runner(load_case(CASE, list(settings)), Path("results"), rank_env())
    runner.setup()
    worker = Worker(runner, None)
    worker.warm_up()
    scheduler = worker.loop.scheduler
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    first, *others = (Request(tuple(call.ids), params) for call in equal_calls(tokens, seed))
    start = time.perf_counter()
    leading = worker.loop.submit(first)
    while not worker.loop.idle:
        scheduler.mixed_tokens = worker.mixed_tokens()
        worker.step(scheduler.schedule())
        if others and leading.generated:
            for request in others:
                worker.loop.submit(request)
            others = []
    print(f"{ENGINE}{time.perf_counter() - start}")


def in_the_engine(settings: Sequence[str], plan: ServingPlan, seed: str) -> Row:
    flags = ["--engine-loop", str(plan.http_tokens), seed, *settings]
    done = subprocess.run(
        [sys.executable, "-m", "umbra.tools.benchmarks.serving", *flags], capture_output=True, text=True
    )
    if done.returncode:
        raise UserError(f"the engine's own loop failed: {' '.join(done.stderr[-500:].split())}")
    return {"seconds": float(done.stdout.rpartition(ENGINE)[2])}


def rates(client: Client, plan: ServingPlan) -> Iterator[Row]:
    for rate in plan.rates:
        count = max(4, round(rate * plan.seconds))
        calls = random_calls(f"rate {rate}", count, 128, plan.tokens, VOCABULARY, rate)
        yield {"rate": rate} | figures(asyncio.run(client.arrivals(calls)))


def wave_peers(plan: ServingPlan) -> Iterator[ServerPeer]:
    """The demo, elastic and with every split of the arena, with one thread as the device and one for the shadows."""
    from umbra.executor.config.env import rank_env
    from umbra.executor.model_runner import make_runner
    from umbra.tools.benchmarks.elastic import MAX_SWAPS, settings

    own = [
        f"arena_mb={WAVE_MB}",
        f"batch_size={WAVE_STREAMS}",
        f"input_max_len={WAVE_PROMPT}",
        f"max_new_tokens={WAVE_NEW}",
        "threads=1",
        "shadow_threads=1",
        "stream_tokens=-1",
        f"max_swaps={MAX_SWAPS}",
        "prefix_floor=0",
        f"target_ttft_s={WAVE_TTFT_S}",
    ]
    runner = make_runner(settings(1, "auto", mode="resident", arena_mb=0), Path("results"), rank_env())
    runner.setup()
    arena = runner.engine.shadows.arena if runner.engine.shadows else None
    if not arena:
        raise UserError("demo_offload: has no shadows")
    extents = (WAVE_MB << 20) // arena.frame_bytes // arena.extent_frames
    yield serving_peers.umbra(ELASTIC, "demo_offload", [*own, "mode=elastic"])
    for percent in plan.splits:
        slots = extents * percent // 100 * arena.extent_slots or -1
        yield serving_peers.umbra(f"{percent} %", "demo_offload", [*own, "mode=fixed", f"slots={slots}"])


def most_requests(client: Client) -> float:
    """The requests of the wave that a server can answer in a second."""
    calls = random_calls("most", 4 * WAVE_STREAMS, WAVE_PROMPT, WAVE_NEW, WAVE_VOCABULARY)
    return float(len(calls) / figures(asyncio.run(client.streams(calls, WAVE_STREAMS)))["seconds"])


def wave(client: Client, plan: ServingPlan, most: float) -> tuple[list[Row], list[Row]]:
    """The phases follow each other without a pause; a request counts in the phase in which it is sent.
    -> a row for each phase, and samples of the memory"""
    calls: list[TimedCall] = []
    phases: list[str] = []
    for number, (phase, part) in enumerate(PHASES):
        rate = part * most
        count = max(4, round(rate * plan.seconds))
        more = random_calls(f"wave {number}", count, WAVE_PROMPT, WAVE_NEW, WAVE_VOCABULARY, rate)
        calls += [replace(call, at=call.at + number * plan.seconds) for call in more]
        phases += [phase] * len(more)
    memory: list[Row] = []

    async def watch(start: float) -> None:
        while True:
            _, text = await client.get("/metrics")
            frames = dict(re.findall(r'^umbra:arena_frames{.*tenant="(\w+)"} (\S+)$', text, re.M))
            row = {"seconds": time.perf_counter() - start}
            memory.append(row | {tenant: float(value) for tenant, value in frames.items()})
            await asyncio.sleep(SAMPLE_S)

    async def measure() -> list[TimedAnswer]:
        watching = asyncio.create_task(watch(time.perf_counter()))
        answers = await client.arrivals(calls)
        watching.cancel()
        return answers

    asyncio.run(client.streams(random_calls("warm", WAVE_STREAMS, WAVE_PROMPT, 32, WAVE_VOCABULARY), WAVE_STREAMS))
    answers = asyncio.run(measure())
    rows = []
    for phase in dict.fromkeys(phases):
        own = [answer for answer, of in zip(answers, phases, strict=True) if of == phase]
        goodput = sum(answer.in_time for answer in own) / plan.seconds
        rows.append({"phase": phase} | figures(own) | {"sent_per_s": len(own) / plan.seconds, "goodput": goodput})
    return rows, memory


EACH: dict[str, Callable[[Client, ServingPlan, str], Row]] = {
    "streams": streams,
    "long": long_prompts,
    "pause": pause,
    "prefix": prefixes,
}
ONLY_OURS = frozenset({"pause", "prefix"})


def show(rows: Iterable[Row], scenario: str) -> list[Row]:
    """Prints and returns the rows; `server` is the first column."""
    texts = {"phase": 12}
    columns = [("server", scenario, 15, "")]
    columns += [(key, key, texts.get(key, 14), "" if key in texts else ".3g") for key in COLUMNS[scenario]]
    return printed(({"scenario": scenario} | row for row in rows), columns)


def one_round(
    peer: ServerPeer, plan: ServingPlan, number: int, wanted: Sequence[str], settings: Sequence[str]
) -> Iterator[Row]:
    """All scenarios of a round with one server."""
    with started(peer) as client:
        asyncio.run(client.streams(random_calls("warm", STREAMS, 128, 4, VOCABULARY), STREAMS))
        for scenario, measure in EACH.items():
            if scenario in wanted and (peer.name == OURS or scenario not in ONLY_OURS):
                worked = time.process_time()
                row = {"server": peer.name, "round": number} | measure(client, plan, f"{number}")
                yield from show([row | {"client_cpu_s": time.process_time() - worked}], scenario)
        if "http" in wanted and peer.name == OURS:
            yield from show([{"server": OURS, "round": number} | http(client, plan, f"{number}")], "http")
    if "http" in wanted and peer.name == OURS:
        row = in_the_engine(settings, plan, f"{number}")
        yield from show([{"server": LOOP, "round": number} | row], "http")


def measured(
    peers: Sequence[ServerPeer], plan: ServingPlan, rounds: int, wanted: Sequence[str], settings: Sequence[str]
) -> list[Row]:
    rows: list[Row] = []
    for number in range(rounds if {*EACH, "http"} & {*wanted} else 0):
        for peer in peers:
            rows += one_round(peer, plan, number, wanted, settings)
    if "rates" in wanted:
        for peer in peers:
            with started(peer) as client:
                asyncio.run(client.streams(random_calls("warm", STREAMS, 128, 4, VOCABULARY), STREAMS))
                rows += show(({"server": peer.name} | row for row in rates(client, plan)), "rates")
    if "wave" in wanted:
        rows += waves(plan, rounds)
    return rows


def waves(plan: ServingPlan, rounds: int) -> list[Row]:
    """The rows of all splits of the arena, and of elastic the samples of its memory in the last round."""
    rows: list[Row] = []
    samples: list[Row] = []
    peers = list(wave_peers(plan))
    most = 0.0
    for number in range(rounds):
        for peer in list(peers):
            try:
                with started(peer) as client:
                    most = most or most_requests(client)
                    phases, memory = wave(client, plan, most)
            except UserError as error:  # a split that leaves too little for the cache
                print(f"{peer.name}: {error}")
                peers.remove(peer)
                continue
            rows += show(({"server": peer.name, "round": number} | row for row in phases), "wave")
            if peer.name == ELASTIC:
                samples = [{"server": peer.name, "scenario": "memory"} | row for row in memory]
    return rows + samples


def main(argv: list[str]) -> None:
    if argv[:1] == ["--engine-loop"]:
        engine_loop(argv[3:], int(argv[1]), argv[2])
        return
    parser = flags(__doc__)
    parser.add_argument("folder", type=Path, help="written by tools.benchmarks.serving_files")
    parser.add_argument("--llama-server", type=Path, help="the program; without it only Umbra is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=SCENARIOS, help="default: all")
    parser.add_argument("--short", action="store_true", help="only show that everything works")
    args = parser.parse_args(argv)
    folder = args.folder.resolve()
    for name in ("model/tokenizer.json", "model.gguf"):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing: .venv/bin/umbra bench serving_files {args.folder}")
    settings = [
        f"model_path={folder / 'model'}",
        f"batch_size={STREAMS}",
        f"input_max_len={LONGEST}",
        f"max_new_tokens={NEW}",
        f"threads={args.threads}",
        f"instruction_set={args.instruction_set}",
    ]
    peers = [serving_peers.umbra(OURS, CASE, settings)]
    if args.llama_server:
        gguf = folder / "model.gguf"
        peers.append(serving_peers.llama_server(args.llama_server, gguf, args.threads, STREAMS, LONGEST + NEW))
    start = time.perf_counter()
    rows = measured(peers, ServingPlan(args.short), args.rounds, args.only, settings)
    reached = goals(rows, load_case(CASE).serve_config.prefill_pause_ms)
    for row in reached:
        print(f"{row['goal']:>55}: wanted {row['wanted']}, found {row['found']:.2f}")
    print(f"{time.perf_counter() - start:.0f} s in all")
    write_rows(args.json, rows, goals=reached, threads=args.threads, rounds=args.rounds, short=args.short)
    if args.plot and "rates" in args.only:
        draw_rates(args.plot, rows)
    if args.plot and "wave" in args.only:
        draw_wave(args.plot.with_stem(f"{args.plot.stem}_wave"), rows)


if __name__ == "__main__":
    run_main(main)

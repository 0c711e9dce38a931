"""The simulation of a server compared with the server itself: the same requests on both, on this machine.

    .venv/bin/umbra bench simulated_server [--models demo layers] [--loads light heavy scarce shared]
        [--rounds 3] [--seconds 20] [--json FILE]

Models: the demo, and two layers of Qwen3-30B-A3B's shape with random 4-bit weights. Loads, as traces of JSON lines:
  light    a third of the requests that the server can answer
  heavy    1.5 times as many as it can answer: they queue
  scarce   as heavy, with pages for about half of the sequences that the batch has room for: some are preempted
  shared   two thirds of what it can answer; prompts share a few beginnings of 256 tokens

A round of a model and a load: the steps of a rank are measured (server_steps.py) in a process of their own, before and
after the server's turn, as machines change; `umbra serve` answers requests alone, which tells what it takes for a
request outside its steps (HTTP, the front, the sockets), a few at once, which tells the CPU time of front and client
for a token, and then the trace; and the trace is simulated with these times. Nothing is taken from the trace's own
answers, and the trace of a load is the same in all rounds. The rank has one thread, so that the front and this client
have a core of their own on a machine of two.

A row, of the table and of `rows` in the JSON file: model, load, what; `predicted` and `measured`, medians over the
rounds; `ratio`: predicted / measured of the same round, its median; `low` and `high`: the least and the largest. Times
in ms. A round in which other programs used more than a tenth of a core does not count, unless there are no others in
twice as many tries; what they used is printed, and how much longer equal steps of the rank alone took in one second
than in another one.
"""

import argparse
import asyncio
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from umbra.base.errors import UserError, run_main
from umbra.base.files import write_json, write_whole
from umbra.executor.config.load import CASES, load_case, load_model_config, model_folder
from umbra.executor.config.units import GB, MB
from umbra.executor.plan.arena_sizes import expert_frames
from umbra.executor.plan.shadows import sizes_of
from umbra.planner.benchmarks.server_steps import Kind, MeasuredTimes, StepFigures, mean_of
from umbra.planner.cluster import Cluster, Load, Search, SimulationSettings
from umbra.planner.layouts import Layout, Sizes, case_of
from umbra.planner.machine import DeviceRates, Hardware
from umbra.planner.simulation.run import SimulationOutcome, Simulator
from umbra.planner.simulation.traffic import arrivals, random
from umbra.planner.work import CountedRank
from umbra.tools.benchmarks import serving_peers
from umbra.tools.benchmarks.machine import Others, cpu_seconds
from umbra.tools.benchmarks.output import Row, flags, printed, write_rows
from umbra.tools.benchmarks.serving_client import Client, TimedAnswer, TimedCall, random_calls
from umbra.tools.benchmarks.serving_files import write_tokenizer

ROWS, CHUNK, RESERVE = 8, 512, 16
LONGEST, NEW = 1024, 128  # most tokens of a prompt and of an answer
PROMPT, ANSWER, SPREAD = 192, 64, 0.6  # mean tokens, and their standard deviation in means
LAYERS = 2
ALONE, ALONE_TOKENS = 12, 16  # requests, and tokens of each prompt, that tell what the front takes
MOST_OTHERS, TRIES = 0.1, 2  # cores that other programs may use in a round that counts; tries for each round
PERCENTILES = (50, 99)
COLUMNS = (
    ("model", "model", 7, ""),
    ("load", "load", 8, ""),
    ("what", "what", 20, ""),
    ("predicted", "predicted", 11, ".2f"),
    ("measured", "measured", 10, ".2f"),
    ("ratio", "ratio", 7, ".2f"),
    ("low", "low", 6, ".2f"),
    ("high", "high", 6, ".2f"),
)


@dataclass(frozen=True)
class Traffic:
    """`part`: requests as a part of those that the server can answer."""

    part: float
    prefixes: int = 0
    scarce: bool = False


LOADS = {"light": Traffic(0.33), "heavy": Traffic(1.5), "scarce": Traffic(1.5, scarce=True), "shared": Traffic(0.67, 4)}
PREFIX_TOKENS = 256
MODELS = {"demo": "demo", "layers": "bench_30b_shape_cpu"}


def write_case(folder: Path, model: str, scarce: bool) -> Path:
    """The case that both run: a file in `folder`."""
    path = folder / f"{model}_{'scarce' if scarce else 'ample'}.yaml"
    data: dict[str, Any] = yaml.safe_load((CASES / f"{MODELS[model]}.yaml").read_text())
    data["threads"] = 1
    data["data_config"] = {
        "prompts": data["data_config"].get("prompts", []),
        "input_max_len": LONGEST,
        "max_new_tokens": NEW,
        "batch_size": ROWS,
        "chunked_prefill_size": CHUNK,
    }
    data["serve_config"] = {"reserve": RESERVE, "max_queue": 100_000, "target_ttft_s": 1e5, "queue_timeout_s": 1e5}
    if model == "layers":
        data["model_path"] = str(write_model(folder / "model", data["model_path"]))
    write_whole(path, lambda file: file.write(yaml.safe_dump(data).encode()))
    if scarce:
        data["offload_config"] = {"mode": "resident", "arena_mb": 0, "shadow_threads": 1}
        write_whole(path, lambda file: file.write(yaml.safe_dump(data).encode()))
        sizes = sizes_of(load_case(str(path)))
        frame = sizes.frame.nbytes
        experts = expert_frames(frame, sizes.slot_bytes, sizes.split.experts)
        page = load_case(str(path)).cache_config.page_size
        longest = -(-(LONGEST + NEW) // page)
        pages = max(longest, ROWS * (PROMPT + ANSWER) // page // 2)
        data["offload_config"]["arena_mb"] = (experts + pages + 1.5) * frame / MB
        write_whole(path, lambda file: file.write(yaml.safe_dump(data).encode()))
    return path


def write_model(folder: Path, path: str) -> Path:
    """A folder with the config of the model at `path`, of LAYERS layers, and a tokenizer."""
    if not folder.is_dir():
        folder.mkdir()
        config = json.loads((model_folder_of(path) / "config.json").read_text())
        write_json(folder / "config.json", config | {"num_hidden_layers": LAYERS})
        write_tokenizer(folder, config["vocab_size"])
    return folder


def model_folder_of(path: str) -> Path:
    return model_folder(replace(load_case("bench_30b_shape_cpu"), model_path=path))


@contextmanager
def sink(folder: Path) -> Iterator[Path]:
    """A Unix socket at whose other end everything is read and forgotten."""
    path = folder / "sink"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def take() -> None:
            connection, _ = listener.accept()
            with connection:
                while connection.recv(1 << 16):
                    pass

        threading.Thread(target=take, daemon=True).start()
        yield path
    path.unlink()


def measured_figures(case: Path, folder: Path) -> StepFigures:
    """The times of a rank's steps, measured in a process of its own."""
    file = folder / "figures.json"
    with sink(folder) as path:
        command = [sys.executable, "-m", "umbra.planner.benchmarks.server_steps", str(case), str(path), str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"steps could not be measured: {' '.join(done.stderr[-500:].split())}")
    return StepFigures(**json.loads(file.read_text()))


def most_requests(figures: StepFigures) -> float:
    """The requests of average lengths that a full batch answers in a second."""
    step = figures.seconds(Kind(ROWS, ROWS * (PROMPT + ANSWER // 2), 0, 0.0))
    return 1 / (figures.seconds(Kind(0, 0, PROMPT, PROMPT**2 / 2)) + ANSWER * step / ROWS)


def layout_of(case: Path, figures: StepFigures) -> Layout:
    """One rank with as much memory as makes the pages that the server has."""
    read = load_case(str(case))
    sizes = Sizes(1, 1, 1, 1, read.quantization.method, 1.0)
    search = Search(most_sequences=ROWS, chunk=CHUNK)
    cluster = Cluster(case=str(case), devices=1, load=Load(prompt_tokens=PROMPT, output_tokens=ANSWER), search=search)
    counted = CountedRank(case_of(cluster, sizes))
    memory = counted.memory.rest + counted.memory.experts + (figures.pages + 1.5) * counted.memory.page
    hardware = Hardware(platform="cpu", device=DeviceRates(memory_gb=memory / GB), name="this machine")
    return Layout(cluster, sizes, hardware, counted)


def simulation_of(traffic: Traffic, trace: Path, front_s: float, token_s: float) -> SimulationSettings:
    return SimulationSettings(
        trace=str(trace),
        longest=LONGEST + NEW,
        prefixes=traffic.prefixes,
        prefix_tokens=PREFIX_TOKENS,
        reserve=RESERVE,
        mixed_tokens=0,
        front_ms=front_s * 1e3,
        front_token_us=token_s * 1e6,
    )


def write_trace(path: Path, traffic: Traffic, most: float, seconds: float) -> None:
    """Requests that come for about `seconds` at a part of `most` a second."""
    rate = traffic.part * most
    mean = PROMPT + PREFIX_TOKENS * (traffic.prefixes > 0)
    load = Load(rate=rate, prompt_tokens=mean, output_tokens=ANSWER)
    wanted = SimulationSettings(requests=max(8, round(rate * seconds)), spread=SPREAD, longest=2 * LONGEST)
    lines = [
        json.dumps({"at": at, "prompt": prompt, "output": min(answer, NEW)})
        for at, prompt, answer in random(load, wanted)
    ]
    write_whole(path, lambda file: file.write("\n".join(lines).encode()))


def calls_of(simulation: SimulationSettings, vocabulary: int) -> list[TimedCall]:
    """The requests of the simulation's trace, with their tokens in the model's vocabulary."""
    return [
        TimedCall([16 + id % (vocabulary - 16) for id in arrival.prompt], arrival.output, arrival.at)
        for arrival in arrivals(Load(), simulation)
    ]


def served(answers: list[TimedAnswer], preemptions: int) -> dict[str, float]:
    """The figures that the server's clients have seen."""
    if failed := [answer.error for answer in answers if answer.error]:
        raise UserError(f"{len(failed)} requests failed: {failed[0]}")
    start = min(answer.sent for answer in answers)
    first = np.array([answer.ttft for answer in answers])
    per_token = np.array([answer.tpot for answer in answers])
    whole = np.array([answer.times[-1] - answer.sent for answer in answers])
    seconds = max(answer.times[-1] for answer in answers) - start
    tokens = sum(answer.tokens for answer in answers)
    return figures_of(
        first, per_token, whole, tokens / seconds, preemptions, sum(answer.cached_tokens for answer in answers)
    )


def simulated(outcome: SimulationOutcome) -> dict[str, float]:
    """The figures of the simulation, as `measured` has those of the server."""
    ended = list(outcome.served.values())
    first = np.array([s.first - s.at for s in ended])
    per_token = np.array([(s.last - s.first) / max(s.output - 1, 1) for s in ended])
    whole = np.array([s.last - s.at for s in ended])
    seconds = max(s.last for s in ended) - min(s.at for s in ended)
    (replica,) = outcome.replicas
    tokens = sum(s.output for s in ended)
    return figures_of(first, per_token, whole, tokens / seconds, replica.preemptions, replica.cached_tokens)


def figures_of(
    first: Any, per_token: Any, whole: Any, tokens_per_s: float, preemptions: int, cached_tokens: int
) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, values in (("a token", per_token), ("first token", first), ("whole answer", whole)):
        figures[f"{name}, mean"] = 1e3 * float(values.mean())
        for percent in PERCENTILES:
            figures[f"{name}, p{percent}"] = 1e3 * float(np.percentile(values, percent))
    return figures | {"tokens/s": tokens_per_s, "preemptions": preemptions, "tokens found": cached_tokens}


def front_seconds(client: Client, vocabulary: int, step: float) -> float:
    """The seconds that a server takes for a request outside its steps: `step` is the prefill of a prompt of
    ALONE_TOKENS tokens."""
    calls = random_calls("alone", ALONE, ALONE_TOKENS, 1, vocabulary)
    answers = asyncio.run(client.streams(calls, 1))[2:]
    return max(0.0, statistics.median(answer.ttft for answer in answers) - step)


def token_seconds(client: Client, vocabulary: int) -> float:
    """CPU seconds of the front and of this client for each token. They share a core."""
    calls = random_calls("tokens", ROWS, ALONE_TOKENS, NEW, vocabulary)

    async def run() -> None:
        await asyncio.gather(*map(client.ask, calls))

    before = cpu_seconds(client.pid) + time.process_time()
    asyncio.run(run())
    return (cpu_seconds(client.pid) + time.process_time() - before) / ROWS / NEW


def preemptions(client: Client) -> int:
    _, text = asyncio.run(client.get("/metrics"))
    match = re.search(r"^umbra:num_preemptions_total{[^}]*} (\S+)$", text, re.M)
    return int(float(match[1])) if match else 0


def serve(case: Path, traffic: Traffic, trace: Path, step: float) -> tuple[dict[str, float], SimulationSettings]:
    """Returns the figures that the clients of a fresh server of `case` see for the trace, and the simulation that
    should see the same. `step`: seconds of the prefill of a prompt of ALONE_TOKENS tokens."""
    vocabulary = load_model_config(load_case(str(case))).vocab_size
    with serving_peers.started(serving_peers.umbra(case.stem, str(case), [])) as client:
        asyncio.run(client.streams(random_calls("warm", 2 * ROWS, 128, 4, vocabulary), ROWS))
        front_s, token_s = front_seconds(client, vocabulary, step), token_seconds(client, vocabulary)
        simulation = simulation_of(traffic, trace, front_s, token_s)
        earlier = preemptions(client)
        answers = asyncio.run(client.arrivals(calls_of(simulation, vocabulary)))
        asyncio.run(asyncio.sleep(0.5))  # until the rank has sent its last state
        return served(answers, preemptions(client) - earlier), simulation


def rounds_of(case: Path, ample: Path, traffic: Traffic, trace: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The trace on servers of `case`, and simulated. `ample` is the same case without shadows."""
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        others = Others()
        figures, earlier = measured_figures(case, Path(name)), others.cores()
        if not trace.is_file():
            write_trace(trace, traffic, most_requests(figures), args.seconds)
        while len(done) < TRIES * args.rounds and sum(one["others"] < MOST_OTHERS for one in done) < args.rounds:
            others, before = Others(), figures
            step = before.seconds(Kind(0, 0, ALONE_TOKENS, ALONE_TOKENS**2 / 2))
            measured, simulation = serve(case, traffic, trace, step)
            figures = measured_figures(case, Path(name))
            used, earlier = max(earlier, others.cores()), others.cores()
            middle = mean_of([before, figures])
            layout = layout_of(ample, middle)
            times = MeasuredTimes(layout, simulation.longest, middle)
            predicted = simulated(Simulator(layout, simulation, times).run())
            done.append({"predicted": predicted, "measured": measured, "others": used})
            front = f"{simulation.front_ms:.2f} ms a request, {simulation.front_token_us:.0f} us a token"
            print(f"others {used:.2f} cores, front {front}, equal steps differ by {middle.spread:.1f}x", flush=True)
    return sorted(done, key=lambda one: float(one["others"]))[: args.rounds]


def compared(model: str, load: str, rounds: list[dict[str, Any]]) -> Iterator[Row]:
    for what in rounds[0]["measured"]:
        pairs: list[Mapping[str, float]] = [
            {"predicted": r["predicted"][what], "measured": r["measured"][what]} for r in rounds
        ]
        ratios = [p["predicted"] / p["measured"] if p["measured"] else 1.0 + p["predicted"] for p in pairs]
        yield {
            "model": model,
            "load": load,
            "what": what,
            "predicted": statistics.median(p["predicted"] for p in pairs),
            "measured": statistics.median(p["measured"] for p in pairs),
            "ratio": statistics.median(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "rounds": pairs,
        }


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="in which the requests of a trace come")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in args.models:
            ample = write_case(folder, model, False)
            for load in args.loads:
                traffic, trace = LOADS[load], folder / f"{model}_{load}.jsonl"
                case = write_case(folder, model, traffic.scarce)
                rows += printed(compared(model, load, rounds_of(case, ample, traffic, trace, args)), COLUMNS)
    write_rows(args.json, rows)


if __name__ == "__main__":
    run_main(main)

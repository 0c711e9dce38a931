"""Measures how long the steps of a server's rank take, one kind at a time: what simulated_server.py gives to the
simulation in the place of modelled times.

    .venv/bin/umbra bench server_steps CASE SOCKET FILE [KEY=VALUE ...]

It is started by simulated_server, which listens at SOCKET as a front does; FILE gets the figures. A step is a whole
turn of the rank's loop: messages, scheduling, the step itself, reports to the API server. Kinds: steps in which 1, 2, 3
... sequences decode, with few and with many cached tokens; prompts of several lengths alone; chunks of a long prompt
after cached tokens; prompts mixed with sequences that decode; and the decode steps after these, which take longer while
the processor's caches hold what the prompts needed. Means count, since what a server does now and then, as telling the
front its state, is part of its steps. All kinds are measured in turn for as long as MEASURED_S, as machines change.
"""

import dataclasses
import gc
import itertools
import random
import statistics
import time
from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any

from umbra.base.errors import run_main
from umbra.base.files import write_json
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case
from umbra.executor.engine.schedule.prompt_costs import amounts_of
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.engine.schedule.scheduler import Step
from umbra.executor.model_runner import make_runner
from umbra.planner.layouts import Layout
from umbra.planner.simulation.steps import StepTimes
from umbra.serving.ranks.channel import Channel
from umbra.serving.ranks.worker import Worker

FEW, TOKENS, DECODE_STEPS, REPEATS = 32, (16, 64, 192, 512), 18, 3
COLD_STEPS = 12  # decode steps after a prompt that are looked at
MEASURED_S = 6.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """The work of a step."""

    rows: int  # sequences that decode
    cached: int  # tokens that they have cached, all together
    tokens: int  # of prompts
    pairs: float  # of a prompt's token and one before it


def kind_of(step: Step) -> Kind:
    decoding = [s for s in step.sequences if s.decoding]
    _, tokens, pairs = amounts_of(step.sequences).tolist()
    return Kind(len(decoding), sum(s.num_computed for s in decoding), int(tokens), pairs)


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """Seconds. `decode` and `prefill` are (number, seconds) in rising order; a step between two is interpolated."""

    pages: int  # of the cache
    decode: list[tuple[float, float]]  # sequences; without any cached token
    decode_cached: list[tuple[float, float]]  # sequences; of each cached token
    prefill: list[tuple[float, float]]  # tokens of a prompt alone, its attention to itself included
    pair: float  # of each further pair of a prompt's token and one before it
    mixed_row: float  # of each sequence that decodes in a step with prompts, beyond its token
    cold: list[float]  # more than that, of the first, second, ... decode step after a prompt
    spread: float = 1.0  # a decode step of all sequences, in the slowest second over the quickest one

    def seconds(self, kind: Kind, since: int = COLD_STEPS) -> float:
        """`since`: decode steps since the last prompt."""
        if not kind.tokens:
            seconds = line(self.decode, kind.rows) + line(self.decode_cached, kind.rows) * kind.cached
            return seconds + (self.cold[since] if since < len(self.cold) else 0.0)
        tokens = kind.tokens + kind.rows
        seconds = line(self.prefill, tokens) + self.pair * (kind.pairs - tokens**2 / 2)
        return seconds + kind.rows * self.mixed_row + line(self.decode_cached, 1) * kind.cached


def mean_of(all_figures: ListOf[StepFigures]) -> StepFigures:
    """The mean of each number."""

    def mean(values: tuple[Any, ...]) -> Any:
        if isinstance(values[0], list | tuple):
            return [mean(together) for together in zip(*values, strict=True)]
        return statistics.fmean(values)

    fields = [mean(values) for values in zip(*map(dataclasses.astuple, all_figures), strict=True)]
    return dataclasses.replace(StepFigures(*fields), pages=all_figures[0].pages)


def line(points: ListOf[tuple[float, float]], x: float) -> float:
    """Interpolates between the two points around `x`, or beyond the last two."""
    if len(points) == 1:
        return points[0][1]
    last = next((i for i in range(1, len(points) - 1) if x <= points[i][0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[last - 1], points[last]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


class MeasuredTimes(StepTimes):
    """Times of the steps of a simulated server, interpolated between measured ones."""

    def __init__(self, layout: Layout, longest: int, figures: StepFigures):
        super().__init__(layout, longest)
        self.figures, self.since = figures, 0  # decode steps since the last prompt

    def seconds(self, step: Step, groups: int, resident: float) -> float:
        self.since = 0
        return self.figures.seconds(kind_of(step))

    def decode_steps(self, step: Step, groups: int, resident: float, count: int) -> tuple[list[float], float]:
        first, since = kind_of(step), self.since
        self.since += count
        later = (dataclasses.replace(first, cached=first.cached + i * first.rows) for i in range(count))
        return [self.figures.seconds(kind, since + i) for i, kind in enumerate(later)], 0.0

    def prefill(self, tokens: int, cached: int, resident: float) -> float:
        return self.figures.seconds(Kind(0, 0, tokens, tokens * (cached + tokens / 2)))


class Measured:
    """A rank of a server that is warm, whose turns are timed."""

    def __init__(self, worker: Worker):
        self.worker, self.choose, self.numbers = worker, random.Random(1), itertools.count(1)
        limits = worker.loop.scheduler.limits
        self.most, self.prompt = limits.batch_size, worker.case.data_config.input_max_len
        self.chunk = min(limits.prefill_tokens or self.prompt, self.prompt)
        self.longest, self.run_step = limits.max_sequence_length, worker.step
        self.kinds: list[Kind] = []  # of the steps so far
        worker.step = self.step  # type: ignore[method-assign]
        worker.mixed_tokens = lambda: self.chunk  # type: ignore[method-assign]

    def step(self, step: Step | None) -> None:
        if step:
            self.kinds.append(kind_of(step))
        self.run_step(step)

    def add(self, prompt: int, tokens: int = 0) -> None:
        """A request with random tokens; `tokens` 0: it goes on until it is aborted."""
        vocabulary = self.worker.runner.config.vocab_size
        ids = tuple(self.choose.randrange(16, vocabulary) for _ in range(prompt))
        params = SamplingParams(max_tokens=tokens or self.longest - prompt, ignore_eos=True)
        self.worker.loop.submit(Request(ids, params), -next(self.numbers))

    def turn(self) -> tuple[Kind, float]:
        """The kind and the seconds of the next step."""
        done = len(self.kinds)
        while len(self.kinds) == done:
            start = time.perf_counter()
            self.worker.turn()
        return self.kinds[-1], time.perf_counter() - start

    def until(self, decoding: int) -> list[tuple[Kind, float]]:
        """Runs until so many sequences decode and no prompt is left."""
        turns, scheduler = [], self.worker.loop.scheduler
        while scheduler.waiting or sum(s.decoding for s in scheduler.running) != decoding:
            turns.append(self.turn())
        return turns

    def end(self) -> None:
        for sequence in list(self.worker.loop.scheduler.running):
            self.worker.loop.abort(sequence.id)
        while not self.worker.loop.idle:
            self.worker.turn()

    def decoding(self, rows: int, context: int) -> tuple[float, float]:
        """(cached tokens in all, seconds) of a step in which so many sequences of about `context` tokens decode."""
        for _ in range(rows):
            self.add(context)
        self.until(rows)
        steps = [self.turn() for _ in range(DECODE_STEPS)][2:]
        self.end()
        return statistics.fmean(kind.cached for kind, _ in steps), statistics.fmean(s for _, s in steps)

    def alone(self, tokens: int) -> list[tuple[Kind, float]]:
        """The steps of a prompt alone."""
        self.add(tokens, 1)
        turns = []
        while not self.worker.loop.idle:
            turns.append(self.turn())
        return turns


def measure(measured: Measured) -> StepFigures:
    scheduler = measured.worker.loop.scheduler
    pages, size = scheduler.pools[0].pages, scheduler.limits.page_size
    many = min(measured.prompt // 2, pages * size // measured.most - DECODE_STEPS - size)
    decode, of_cached = [], []
    for rows in sorted({1, 2, measured.most // 2, measured.most * 3 // 4, measured.most} - {0}):
        (few, short), (cached, long) = measured.decoding(rows, FEW), measured.decoding(rows, many)
        slope = max((long - short) / (cached - few), 0.0)
        decode.append((float(rows), short - slope * few))
        of_cached.append((float(rows), slope))
    lengths = [tokens for tokens in TOKENS if tokens <= measured.chunk]
    times: dict[int, list[float]] = {tokens: [] for tokens in lengths}
    later: list[tuple[Kind, float]] = []
    for _ in range(REPEATS):
        for tokens in lengths:
            times[tokens] += [seconds for _, seconds in measured.alone(tokens)]
        later += measured.alone(measured.prompt // measured.chunk * measured.chunk)[1:]
    prefill = [(float(tokens), statistics.fmean(times[tokens])) for tokens in lengths]
    pairs = [(s - line(prefill, kind.tokens)) / (kind.pairs - kind.tokens**2 / 2) for kind, s in later]
    figures = StepFigures(pages, decode, of_cached, prefill, max(statistics.fmean(pairs or [0.0]), 0.0), 0.0, [])
    rows = max(1, measured.most // 2)
    excess, cold = [], []
    for _ in range(REPEATS):
        for _ in range(rows):
            measured.add(FEW)
        measured.until(rows)
        measured.add(measured.chunk // 2)
        excess += [(seconds - figures.seconds(kind)) / kind.rows for kind, seconds in measured.until(rows + 1)]
        cold.append([s - figures.seconds(kind) for kind, s in (measured.turn() for _ in range(COLD_STEPS))])
        measured.end()
    means = [statistics.fmean(times) for times in zip(*cold, strict=True)]
    return dataclasses.replace(figures, mixed_row=statistics.fmean(excess), cold=means)


def measured_for(worker: Worker, least_s: float) -> StepFigures:
    """The means of as many measurements as take so long, of two at least: they tell how much equal steps differ."""
    all_figures: list[StepFigures] = []
    measured, start = Measured(worker), time.perf_counter()
    while len(all_figures) < 2 or time.perf_counter() - start < least_s:
        all_figures.append(measure(measured))
    full = [line(figures.decode, measured.most) for figures in all_figures]
    return dataclasses.replace(mean_of(all_figures), spread=max(full) / min(full))


def main(argv: list[str]) -> None:
    case, socket, file, *overrides = argv
    runner = make_runner(load_case(case, overrides), Path("results"), RankEnv(0, 1, 0, 1, ""))
    runner.setup()
    channel = Channel.connect(Path(socket))
    worker = Worker(runner, channel)
    worker.warm_up()
    gc.collect()
    gc.freeze()
    with runner.engine.platform.watched():
        write_json(Path(file), dataclasses.asdict(measured_for(worker, MEASURED_S)))
    channel.close()


if __name__ == "__main__":
    run_main(main)

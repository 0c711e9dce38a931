"""The requests of a simulation: when they come, how long they are, and which beginnings they share."""

import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from umbra.base.errors import UserError
from umbra.planner.cluster import Load, SimulationSettings

LARGEST_LINE = 10_000  # characters of a line of a trace
HOUR, HOURS = 3600.0, 24  # seconds; of a day
T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # seconds
    prompt: "array[int]"
    output: int  # tokens of the answer


def arrivals(load: Load, simulation: SimulationSettings) -> Iterator[Arrival]:
    """The simulation's requests in order of time: those of its trace or, without one, random ones."""
    requests = trace(Path(simulation.trace)) if simulation.trace else random(load, simulation)
    choose, day = np.random.default_rng([simulation.seed, 1]), simulation.day
    shared = [choose.integers(0, 1 << 30, simulation.prefix_tokens) for _ in range(simulation.prefixes)]
    for at, prompt, output in requests:
        ids = choose.integers(0, 1 << 30, prompt)
        if shared and (not day.repeats or choose.random() < of_hour(day.repeats, at / day.hour_s, 1.0)):
            beginning = shared[int(choose.integers(len(shared)))][:prompt]
            ids[: len(beginning)] = beginning
        yield Arrival(at, array("q", ids.tobytes()), output)


def of_hour(values: Sequence[T], hours: float, otherwise: T) -> T:
    """The value of the hour of the day when so many hours have passed; `values` has one for each hour, or none."""
    return values[int(hours) % HOURS] if values else otherwise


def random(load: Load, simulation: SimulationSettings) -> Iterator[tuple[float, int, int]]:
    """Requests that come independently of each other, at the rate of the hour, with lengths whose logarithms have a
    normal distribution around the means of the hour. (seconds, prompt tokens, output tokens)"""
    choose, at, day = np.random.default_rng([simulation.seed, 0]), 0.0, simulation.day
    most, highest = simulation.longest, max(day.rates, default=load.rate)
    end = simulation.hours * day.hour_s or math.inf
    for _ in range(simulation.requests):
        while True:  # thinned: candidates at the highest rate, of which a share is kept
            at += float(choose.exponential(1 / highest))
            if choose.random() * highest <= of_hour(day.rates, at / day.hour_s, load.rate):
                break
        if at >= end:
            return
        hours = at / day.hour_s
        means = (
            of_hour(day.prompt_tokens, hours, load.prompt_tokens),
            of_hour(day.output_tokens, hours, load.output_tokens),
        )
        prompt, output = (
            int(min(max(1, round(_length(choose, mean, simulation.spread))), most // 2)) for mean in means
        )
        yield at, prompt, output


def _length(choose: np.random.Generator, mean: float, spread: float) -> float:
    """A random length with this mean; `spread` is its standard deviation in means."""
    sigma = math.sqrt(math.log(1 + spread**2))
    return float(mean * math.exp(choose.normal(-(sigma**2) / 2, sigma))) if spread else mean


def trace(path: Path) -> Iterator[tuple[float, int, int]]:
    """The requests of a file with a JSON object a line: {"at": seconds, "prompt": tokens, "output": tokens}."""
    if not path.is_file():
        raise UserError(f"simulation.trace: {path}: no such file")
    last = 0.0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path.name}:{number}"
            try:
                data: Any = json.loads(line) if len(line) <= LARGEST_LINE else None
                at, prompt, output = float(data["at"]), data["prompt"], data["output"]
            except (ValueError, TypeError, KeyError):
                raise UserError(f'{where}: not {{"at": seconds, "prompt": tokens, "output": tokens}}') from None
            if not (type(prompt) is type(output) is int and prompt > 0 and output > 0 and last <= at < math.inf):
                raise UserError(f"{where}: lengths must be integers above 0, and times must not fall")
            last = at
            yield at, prompt, output

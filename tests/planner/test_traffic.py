"""The requests of a simulation, with random numbers that are made up, and the router that gives them to replicas."""

import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planner.cluster import Day, Load, Simulation
from planner.simulation import router as routing
from planner.simulation import traffic
from planner.simulation.router import GONE, Router
from planner.simulation.traffic import arrivals, of_hour, random, trace
from umbra.errors import UserError


class Scripted:
    """A random generator of which each kind of number comes from a list, in units of its scale."""

    def __init__(self, waits: Sequence[float], chances: Sequence[float] = (), normals: Sequence[float] = ()):
        self.waits, self.chances, self.normals = iter(waits), iter(chances), iter(normals)

    def exponential(self, scale: float) -> float:
        return scale * next(self.waits)

    def random(self) -> float:
        return next(self.chances, 0.0)

    def normal(self, mean: float, deviation: float) -> float:
        return mean + deviation * next(self.normals)


def scripted(monkeypatch: pytest.MonkeyPatch, made: Scripted, seed: list[int]) -> None:
    def default_rng(given: list[int]) -> Scripted:
        assert given == seed
        return made

    monkeypatch.setattr(traffic, "np", SimpleNamespace(random=SimpleNamespace(default_rng=default_rng)))


def test_requests_come_at_the_rate_with_their_means(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, Scripted([1.0, 3.0, 2.0]), [7, 0])
    load, simulation = Load(rate=4.0, prompt_tokens=100, output_tokens=30), Simulation(requests=3, seed=7)
    assert list(random(load, simulation)) == [(0.25, 100, 30), (1.0, 100, 30), (1.5, 100, 30)]


def test_requests_end_with_the_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    load, day = Load(rate=1.0, prompt_tokens=5, output_tokens=2), Day(minutes=1.0)
    scripted(monkeypatch, Scripted([119.0, 0.5, 0.5, 1.0]), [0, 0])
    assert [at for at, _, _ in random(load, Simulation(requests=9, hours=2, day=day))] == [119.0, 119.5]
    scripted(monkeypatch, Scripted([1e6, 1.0]), [0, 0])
    assert [at for at, _, _ in random(load, Simulation(requests=2))] == [1e6, 1e6 + 1]  # without an end


def test_each_hour_has_its_rate_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates come at the highest rate; of those of other hours a share is kept."""
    day = Day((2.0, 8.0, *[4.0] * 22), tuple(range(10, 34)), tuple(range(50, 74)), (), 1.0)
    # at 1 s of hour 0: kept up to a quarter; at 61 s of hour 1: always; at 121 s of hour 2: up to a half
    waits = [8.0, 0.0, 480.0, 480.0, 0.0, 60 * 8.0 * 22]
    chances = [0.251, 0.25, 1.0, 0.501, 0.5, 0.25]
    scripted(monkeypatch, Scripted(waits, chances), [0, 0])
    found = list(random(Load(rate=1.0), Simulation(requests=4, day=day)))
    assert found == [(1.0, 10, 50), (61.0, 11, 51), (121.0, 12, 52), (1441.0, 10, 50)]


def test_lengths_spread_around_their_means_and_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    sigma = math.sqrt(math.log(1 + 0.5**2))
    scripted(monkeypatch, Scripted([1.0] * 3, [], [0.0, 1.0, -50.0, 2.0, 50.0, -1.0]), [0, 0])
    load, simulation = Load(prompt_tokens=1000, output_tokens=600), Simulation(requests=3, spread=0.5, longest=4001)
    middle = math.exp(-(sigma**2) / 2)
    assert [lengths for _, *lengths in random(load, simulation)] == [
        [round(1000 * middle), round(600 * middle * math.exp(sigma))],
        [1, round(600 * middle * math.exp(2 * sigma))],
        [2000, round(600 * middle / math.exp(sigma))],
    ]


def test_the_value_of_an_hour() -> None:
    values = tuple(range(24))
    assert [of_hour(values, hours, 99) for hours in (0.0, 0.99, 1.0, 23.9, 24.0, 49.5)] == [0, 0, 1, 23, 0, 1]
    assert of_hour((), 5.0, 99) == 99


def lines(path: Path, *text: str) -> Path:
    path.write_text("\n".join(text))
    return path


def test_a_trace_is_read_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = ['{"at": 0, "prompt": 1, "output": 1}', '{"at": 2.5, "prompt": 7, "output": 3}']
    file = lines(tmp_path / "trace", *good, good[1])
    assert list(trace(file)) == [(0.0, 1, 1), (2.5, 7, 3), (2.5, 7, 3)]  # two may come at the same time
    monkeypatch.setattr(traffic, "LARGEST_LINE", len(good[1]) + 1)  # with its end
    assert len(list(trace(file))) == 3
    monkeypatch.setattr(traffic, "LARGEST_LINE", len(good[1]))
    with pytest.raises(UserError, match=r'^trace:2: not \{"at": seconds, "prompt": tokens, "output": tokens\}$'):
        list(trace(file))
    with pytest.raises(UserError, match=r"^simulation\.trace: .*/none: no such file$"):
        list(trace(tmp_path / "none"))


@pytest.mark.parametrize(
    "line",
    [
        '{"at": 0.5, "prompt": 1, "output": 1}',
        '{"at": Infinity, "prompt": 1, "output": 1}',
        '{"at": NaN, "prompt": 1, "output": 1}',
        '{"at": 1, "prompt": 0, "output": 1}',
        '{"at": 1, "prompt": 1, "output": 0}',
        '{"at": 1, "prompt": true, "output": 1}',
        '{"at": 1, "prompt": 1, "output": 1.0}',
        '{"at": 1, "prompt": 1.0, "output": 1.0}',
    ],
)
def test_lines_that_no_traffic_has(tmp_path: Path, line: str) -> None:
    file = lines(tmp_path / "trace", '{"at": 1, "prompt": 4, "output": 3}', line)
    with pytest.raises(UserError, match=r"^trace:2: lengths must be integers above 0, and times must not fall$"):
        list(trace(file))
    with pytest.raises(UserError, match=r"^trace:1: lengths"):
        list(trace(lines(tmp_path / "trace", '{"at": -1, "prompt": 4, "output": 3}')))


def test_prompts_of_a_trace_have_the_tokens_of_their_seed(tmp_path: Path) -> None:
    file = lines(tmp_path / "trace", '{"at": 1, "prompt": 4, "output": 3}', '{"at": 2, "prompt": 2, "output": 5}')
    first, second = arrivals(Load(), Simulation(trace=str(file), seed=5))
    choose = np.random.default_rng([5, 1])
    assert (first.at, first.output, second.at, second.output) == (1.0, 3, 2.0, 5)
    assert [list(first.prompt), list(second.prompt)] == [choose.integers(0, 1 << 30, n).tolist() for n in (4, 2)]


def shared_starts(file: Path, **more: Any) -> Iterator[bool]:
    """Whether each prompt begins as one of two beginnings of three tokens does."""
    simulation = Simulation(trace=str(file), prefixes=2, prefix_tokens=3, **more)
    choose = np.random.default_rng([0, 1])
    beginnings = [choose.integers(0, 1 << 30, 3).tolist() for _ in range(2)]
    for arrival in arrivals(Load(), simulation):
        ids = list(arrival.prompt)
        yield any(ids[:3] == beginning[: len(ids)] for beginning in beginnings)


def test_prompts_share_beginnings_as_often_as_the_hour_says(tmp_path: Path) -> None:
    hours = [f'{{"at": {60 * hour + i / 9}, "prompt": {size}, "output": 1}}' for hour in (0, 1) for i, size in
             enumerate((2, 3, 4, 5, 6, 7))]  # fmt: skip
    file = lines(tmp_path / "trace", *hours)
    assert list(shared_starts(file)) == [True] * 12
    day = Day(repeats=(0.0, 1.0, *[0.0] * 22), minutes=1.0)
    assert list(shared_starts(file, day=day)) == [False] * 6 + [True] * 6
    many = lines(tmp_path / "many", *[f'{{"at": {i}, "prompt": 3, "output": 1}}' for i in range(400)])
    half = Day(repeats=(0.25,) * 24)
    assert 60 < sum(shared_starts(many, day=half)) < 140
    firsts = {tuple(a.prompt) for a in arrivals(Load(), Simulation(trace=str(many), prefixes=2, prefix_tokens=9))}
    assert len(firsts) == 2  # both are used, cut to the prompts' length


def test_a_replica_may_have_a_quarter_more_than_the_least_loaded() -> None:
    near, prompt = Router("prefix_aware", 4, 2), array("q", range(9))
    assert near.choose(prompt) == 0
    for load, chosen in ((11, 0), (12, 1)):  # 1.25 times eight and one
        near.homes = dict.fromkeys(near.homes, 0)
        near.loads[:] = load, 8
        assert near.choose(prompt) == chosen
        assert list(near.homes.values()) == [chosen]


def test_a_beginning_is_a_whole_first_page() -> None:
    near = Router("prefix_aware", 4, 3)
    near.loads[:] = 1, 0, 1
    assert near.choose(array("q", [1, 2, 3, 4])) == 1
    near.loads[:] = 0, 1, 1
    assert near.choose(array("q", [1, 2, 3, 4, 5])) == 1  # the same page
    assert near.choose(array("q", [1, 2, 3, 5])) == 0
    assert len(near.homes) == 2
    near.loads[:] = 1, 1, 0
    assert near.choose(array("q", [1, 2, 3])) == 2  # too short for a page, and not remembered
    assert len(near.homes) == 2
    plain = Router("least_loaded", 4, 3)
    assert plain.choose(array("q", [1, 2, 3, 4])) == 0
    assert not plain.homes


def test_a_router_forgets_what_was_asked_for_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "KNOWN", 2)
    near, (a, b, c) = Router("prefix_aware", 1, 2), (array("q", [n]) for n in (1, 2, 3))
    near.choose(a)
    near.choose(b)
    near.loads[:] = 1, 0
    assert near.choose(a) == 0
    near.choose(c)  # b is forgotten
    assert len(near.homes) == 2
    assert (near.choose(a), near.choose(b)) == (0, 1)


def test_a_replica_that_is_gone_gets_nothing() -> None:
    router, prompt = Router("least_loaded", 4, 3), array("q", [1])
    router.loads[:] = 5, 10**6, 10**6
    router.lose(0)
    assert (router.choose(prompt), router.alive, int(router.loads[0])) == (1, 2, GONE)
    router.lose(1)
    assert (router.choose(prompt), router.alive) == (2, 1)
    router.regain(0)
    assert (router.choose(prompt), router.alive, int(router.loads[0])) == (0, 2, 0)

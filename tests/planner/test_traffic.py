"""Traces that a simulation reads, the prompts that it makes, and the router that gives them to replicas."""

from array import array
from pathlib import Path

import numpy as np
import pytest

from planner.cluster import Load, Simulation
from planner.simulation.router import Router
from planner.simulation.traffic import LARGEST_LINE, arrivals, trace
from umbra.errors import UserError


def lines(path: Path, *text: str) -> Path:
    path.write_text("\n".join(text))
    return path


def test_a_trace_is_read_line_by_line(tmp_path: Path) -> None:
    good = ['{"at": 0, "prompt": 1, "output": 1}', '{"at": 2.5, "prompt": 7, "output": 3}']
    file = lines(tmp_path / "trace", *good, good[1])
    assert list(trace(file)) == [(0.0, 1, 1), (2.5, 7, 3), (2.5, 7, 3)]  # two may come at the same time
    with pytest.raises(UserError, match=r"^simulation\.trace: .*/none: no such file$"):
        list(trace(tmp_path / "none"))


@pytest.mark.parametrize(
    "line",
    [
        '{"at": 0.5, "prompt": 1, "output": 1}', '{"at": Infinity, "prompt": 1, "output": 1}',
        '{"at": NaN, "prompt": 1, "output": 1}', '{"at": 1, "prompt": 0, "output": 1}',
        '{"at": 1, "prompt": true, "output": 1}', '{"at": 1, "prompt": 1, "output": 1.0}',
    ],
)  # fmt: skip
def test_lines_that_no_traffic_has(tmp_path: Path, line: str) -> None:
    file = lines(tmp_path / "trace", '{"at": 1, "prompt": 4, "output": 3}', line)
    with pytest.raises(UserError, match=r"^trace:2: lengths must be integers above 0, and times must not fall$"):
        list(trace(file))


@pytest.mark.parametrize("line", ["{", '{"at": 1}', "[]", '{"at": 1}' + " " * LARGEST_LINE])
def test_lines_that_are_no_request(tmp_path: Path, line: str) -> None:
    with pytest.raises(UserError, match=r'^trace:1: not \{"at": seconds, "prompt": tokens, "output": tokens\}$'):
        list(trace(lines(tmp_path / "trace", line)))


def test_prompts_of_a_trace_have_the_tokens_of_their_seed(tmp_path: Path) -> None:
    file = lines(tmp_path / "trace", '{"at": 1, "prompt": 4, "output": 3}', '{"at": 2, "prompt": 2, "output": 5}')
    first, second = arrivals(Load(), Simulation(trace=str(file), seed=5))
    choose = np.random.default_rng([5, 1])
    assert (first.at, first.output, second.at, second.output) == (1.0, 3, 2.0, 5)
    assert [list(first.prompt), list(second.prompt)] == [choose.integers(0, 1 << 30, n).tolist() for n in (4, 2)]


def test_a_replica_may_have_a_quarter_more_than_the_least_loaded() -> None:
    near, prompt = Router("prefix_aware", 4, 2), array("q", range(9))
    assert near.choose(prompt) == 0
    for load, chosen in ((11, 0), (12, 1)):  # 1.25 times eight and one
        near.homes = dict.fromkeys(near.homes, 0)
        near.loads[:] = load, 8
        assert near.choose(prompt) == chosen
        assert list(near.homes.values()) == [chosen]

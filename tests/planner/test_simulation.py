"""The simulation: seeds, traces and the router; queues and failures cost what they must."""

import dataclasses
from array import array
from pathlib import Path
from typing import Any

import pytest

from tests.planner.test_cluster import CLUSTER, HARDWARE, write
from umbra.base.errors import UserError
from umbra.planner.cluster import Load, SimulationSettings
from umbra.planner.layouts import Layout, Sizes, make_layout
from umbra.planner.simulation.report import show_simulation
from umbra.planner.simulation.router import ReplicaRouter
from umbra.planner.simulation.run import SimulationOutcome, Simulator
from umbra.planner.simulation.traffic import LARGEST_LINE, trace


@pytest.fixture(scope="module")
def layout() -> Layout:
    cluster = dataclasses.replace(CLUSTER, load=Load(rate=40.0, prompt_tokens=200, output_tokens=20))
    return make_layout(cluster, Sizes(2, 4, 2, 4, "none", 1.0), HARDWARE)


def simulate(layout: Layout, **settings: Any) -> SimulationOutcome:
    return Simulator(layout, SimulationSettings(**{"requests": 200, "longest": 2048, "spread": 0.5} | settings)).run()


def times(outcome: SimulationOutcome) -> list[tuple[float, float, float]]:
    return [(s.at, s.first, s.last) for s in outcome.served.values()]


def test_equal_seeds_give_equal_results(layout: Layout) -> None:
    settings = dict(rank_failure_hours=0.004, restart_s=1.0, prefixes=3, prefix_tokens=128)
    first, second, other = (simulate(layout, seed=seed, **settings) for seed in (0, 0, 1))
    assert times(first) == times(second)
    assert times(first) != times(other)


def test_a_request_alone_takes_its_prefill_and_its_steps(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"at": 5, "prompt": 128, "output": 3}\n')
    outcome = simulate(layout, trace=str(tmp_path / "trace"))
    (served,) = outcome.served.values()
    table = outcome.replicas[0].times
    assert served.first - served.at == pytest.approx(table.prefill_at(128, 0, 1.0))
    none, some = table.decode_at(1, 1.0)
    per_token = (some - none) / 2048
    assert served.last - served.first == pytest.approx(2 * none + per_token * (128 + 129))


def test_failures_lose_time_and_nothing_else(layout: Layout) -> None:
    """Requests begin again on the other replica; while none is alive they wait."""
    outcome = simulate(layout, rank_failure_hours=0.002, restart_s=2.0)
    assert outcome.failures > 2
    assert any(served.restarts for served in outcome.served.values())
    assert len(outcome.served) == 200
    assert all(served.at < served.first <= served.last for served in outcome.served.values())
    assert outcome.end > simulate(layout).end


def test_kept_prefixes_are_found_and_the_router_knows_where(layout: Layout) -> None:
    settings = dict(prefixes=20, prefix_tokens=256, requests=400)

    def cached_tokens(**more: Any) -> int:
        return sum(replica.cached_tokens for replica in simulate(layout, **settings, **more).replicas)

    assert cached_tokens(prefix_cache=False) == 0
    assert 0 < cached_tokens() <= cached_tokens(router="prefix_aware")


def test_the_command_reports_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, simulation={"requests": 60, "longest": 1024})
    show_simulation(path, [], tmp_path / "facts.json", tmp_path / "plot.png")
    out = capsys.readouterr().out
    assert "TTFT p99, ms" in out
    assert "nothing was measured" in out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def tight(layout: Layout, resident: float = 0.5) -> Layout:
    """One replica whose memory is too short for all experts and keys and values."""
    hardware = dataclasses.replace(HARDWARE, device=dataclasses.replace(HARDWARE.device, memory_gb=16.0))
    return Layout(layout.cluster, Sizes(1, 4, 4, 4, "none", resident), hardware, layout.counted)


def test_the_server_judgement_divides_memory_between_prefixes_and_experts(layout: Layout) -> None:
    """Prompts that come again win pages from experts, prompts that do not lose them."""

    def expert_pages(**settings: Any) -> float:
        (replica,) = simulate(tight(layout), requests=150, longest=4096, memory="elastic", **settings).replicas
        assert replica.memory_split
        return replica.memory_split.expert_pages / replica.memory_split.pages

    assert expert_pages(prefixes=60, prefix_tokens=1024) < expert_pages()


@pytest.mark.parametrize(
    ("case", "memory", "resident"),
    [
        ("qwen36_35b_a3b_w4a16_tp1", "fixed", 0.5),
        ("qwen36_35b_a3b_w4a16_tp1", "elastic", 0.5),
        ("qwen38_27b_w8a8_tp1", "elastic", 1.0),  # without experts
    ],
)
def test_recurrent_states_take_memory_and_prefixes_are_found_with_them(case: str, memory: str, resident: float) -> None:
    cluster = dataclasses.replace(CLUSTER, case=case, load=Load(rate=40.0, prompt_tokens=200, output_tokens=20))
    states = tight(make_layout(cluster, Sizes(1, 4, 4, 4, "auto", resident), HARDWARE), resident)
    (replica,) = simulate(states, requests=60, memory=memory, prefixes=2, prefix_tokens=512).replicas
    assert replica.cached_tokens > 0
    for cache in replica.scheduler.caches:
        cache.trim(0)
        assert cache.held == cache.kept == cache.sets == 0


def lines(path: Path, *text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(text))
    return path


def test_a_trace_is_read_line_by_line(tmp_path: Path) -> None:
    good = ['{"at": 0, "prompt": 1, "output": 1}', '{"at": 2.5, "prompt": 7, "output": 3}']
    file = lines(tmp_path / "trace", *good, good[1])
    assert list(trace(file)) == [(0.0, 1, 1), (2.5, 7, 3), (2.5, 7, 3)]  # two may come at the same time
    with pytest.raises(UserError, match=r"^simulation\.trace: .*/none: no such file$"):
        list(trace(tmp_path / "none"))
    for line in ("{", '{"at": 1}' + " " * LARGEST_LINE):
        with pytest.raises(UserError, match=r'^trace:1: not \{"at": seconds, "prompt": tokens, "output": tokens\}$'):
            list(trace(lines(tmp_path / "bad" / "trace", line)))


@pytest.mark.parametrize(
    "line",
    [
        '{"at": 0.5, "prompt": 1, "output": 1}',
        '{"at": NaN, "prompt": 1, "output": 1}',
        '{"at": 1, "prompt": 0, "output": 1}',
        '{"at": 1, "prompt": true, "output": 1}',
    ],
)
def test_lines_that_no_traffic_has(tmp_path: Path, line: str) -> None:
    file = lines(tmp_path / "trace", '{"at": 1, "prompt": 4, "output": 3}', line)
    with pytest.raises(UserError, match=r"^trace:2: lengths must be integers above 0, and times must not fall$"):
        list(trace(file))


def test_a_replica_may_have_a_quarter_more_than_the_least_loaded() -> None:
    near, prompt = ReplicaRouter("prefix_aware", 4, 2), array("q", range(9))
    assert near.choose(prompt) == 0
    for load, chosen in ((11, 0), (12, 1)):  # 1.25 times eight and one
        near.homes = dict.fromkeys(near.homes, 0)
        near.loads[:] = load, 8
        assert near.choose(prompt) == chosen
        assert list(near.homes.values()) == [chosen]

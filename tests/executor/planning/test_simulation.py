"""The simulation: the same seed gives the same hours, every request is answered once, queues and failures cost what
they must, and the real scheduler's prefixes and pages are at work."""

import dataclasses
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from errors import UserError
from executor.planning.cluster.cluster import Load, Simulation
from executor.planning.cluster.layouts import Layout, Sizes, make_layout
from executor.planning.simulation.replica import Replica
from executor.planning.simulation.report import facts_of, show_simulation
from executor.planning.simulation.run import Outcome, Simulator
from executor.planning.simulation.steps import StepTimes
from executor.planning.simulation.traffic import Arrival, arrivals, trace
from tests.executor.planning.test_cluster import CLUSTER, HARDWARE, write


@pytest.fixture(scope="module")
def layout() -> Layout:
    cluster = dataclasses.replace(CLUSTER, load=Load(rate=40.0, prompt_tokens=200, output_tokens=20))
    return make_layout(cluster, Sizes(2, 4, 2, 4, "none", 1.0), HARDWARE)


def simulate(layout: Layout, **settings: Any) -> Outcome:
    return Simulator(layout, Simulation(**{"requests": 200, "longest": 2048, "spread": 0.5} | settings)).run()


def times(outcome: Outcome) -> list[tuple[float, float, float]]:
    return [(s.at, s.first, s.last) for s in outcome.served.values()]


def test_equal_seeds_give_equal_results(layout: Layout) -> None:
    settings = dict(failure_hours=0.001, restart_s=1.0, prefixes=3, prefix_tokens=128)
    first, second, other = (simulate(layout, seed=seed, **settings) for seed in (0, 0, 1))
    assert times(first) == times(second)
    assert times(first) != times(other)


def test_every_request_is_answered_once(layout: Layout) -> None:
    outcome = simulate(layout)
    assert len(outcome.served) == 200
    for served in outcome.served.values():
        assert served.at < served.first <= served.last
    for replica in outcome.replicas:
        assert not replica.sequences
        assert replica.steps
        assert all(cache.held == 0 for cache in replica.scheduler.caches)
    assert sum(replica.busy for replica in outcome.replicas) <= 2 * outcome.end


def test_a_request_alone_takes_its_prefill_and_its_steps(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"at": 5, "prompt": 128, "output": 3}\n')
    outcome = simulate(layout, trace=str(tmp_path / "trace"))
    (served,) = outcome.served.values()
    table = outcome.replicas[0].times
    assert served.first - served.at == pytest.approx(table.prefill_at(128, 0, 1.0))
    none, some = table.decode_at(1, 1.0)
    per_token = (some - none) / 2048
    assert served.last - served.first == pytest.approx(2 * none + per_token * (128 + 129))


def test_queues_grow_with_the_rate(layout: Layout) -> None:
    def median(rate: float) -> float:
        cluster = dataclasses.replace(layout.cluster, load=dataclasses.replace(layout.cluster.load, rate=rate))
        faster = Layout(cluster, layout.sizes, layout.hardware, layout.counted)
        return float(np.median([s.first - s.at for s in simulate(faster).served.values()]))

    assert median(1.0) < median(100.0) < median(10_000.0)


def test_failures_lose_time_and_nothing_else(layout: Layout) -> None:
    """Requests begin again on the other replica; while none is alive they wait."""
    outcome = simulate(layout, failure_hours=0.0005, restart_s=2.0)
    assert outcome.failures > 2
    assert any(served.restarts for served in outcome.served.values())
    assert len(outcome.served) == 200
    assert all(served.at < served.first <= served.last for served in outcome.served.values())
    assert outcome.end > simulate(layout).end


def test_kept_prefixes_are_found_and_the_router_knows_where(layout: Layout) -> None:
    settings = dict(prefixes=20, prefix_tokens=256, requests=400)

    def found(**more: Any) -> int:
        return sum(replica.found for replica in simulate(layout, **settings, **more).replicas)

    assert found(prefix_cache=False) == 0
    assert 0 < found() <= found(router="prefix_aware")


def test_a_prompt_that_can_never_run_is_refused(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"at": 0, "prompt": 4000, "output": 3}\n{"at": 1, "prompt": 10, "output": 3}\n')
    outcome = simulate(layout, trace=str(tmp_path / "trace"))
    assert (outcome.refused, len(outcome.served)) == (1, 1)


@pytest.mark.parametrize(
    "line", ["{", '{"at": 1}', '{"at": 1, "prompt": 0, "output": 2}', '{"at": "x", "prompt": 1, "output": 1}', "[]"]
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "trace").write_text('{"at": 0, "prompt": 4, "output": 3}\n' + line)
    with pytest.raises(UserError, match="trace:2: "):
        list(trace(tmp_path / "trace"))


def test_traffic_has_its_means() -> None:
    load, simulation = Load(rate=5.0, prompt_tokens=300, output_tokens=80), Simulation(requests=4000, spread=0.7)
    made = list(arrivals(load, simulation, 128))
    assert len(made) / made[-1].at == pytest.approx(5.0, rel=0.1)
    assert np.mean([len(a.prompt) for a in made]) == pytest.approx(300, rel=0.1)
    assert np.mean([a.output for a in made]) == pytest.approx(80, rel=0.1)


def test_the_command_reports_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, simulation={"requests": 60, "longest": 1024})
    show_simulation(path, tmp_path / "facts.json", tmp_path / "plot.png")
    out = capsys.readouterr().out
    assert "TTFT p99, ms" in out
    assert "nothing was measured" in out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_facts_count_requests_in_time(layout: Layout) -> None:
    outcome = simulate(layout)
    assert facts_of(outcome, 1e9, 1e9)["in time"] == 1.0
    assert facts_of(outcome, 0.0, 0.0)["in time"] == 0.0


def test_experts_give_way_to_sequences_and_return(layout: Layout) -> None:
    """With the real arena and balance: under a burst most experts leave, and after it they are back."""
    device = dataclasses.replace(HARDWARE.device, memory_gb=16.0)
    tight = Layout(
        layout.cluster, Sizes(1, 4, 4, 4, "none", 0.5), dataclasses.replace(HARDWARE, device=device), layout.counted
    )
    simulator = Simulator(tight, Simulation(requests=300, longest=4096, elastic=True, spread=0.0))
    outcome = simulator.run()
    (replica,) = outcome.replicas
    assert len(outcome.served) == 300
    assert replica.experts is not None
    arena = replica.experts.offload.arena
    assert replica.resident
    assert arena.slot_frames + arena.free_frames <= arena.frames
    assert all(cache.held == 0 for cache in replica.scheduler.caches)
    assert times(outcome) == times(
        Simulator(tight, Simulation(requests=300, longest=4096, elastic=True, spread=0.0)).run()
    )


def test_a_server_takes_time_outside_its_steps(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"at": 5, "prompt": 128, "output": 3}\n')
    (alone,), (later,) = (
        simulate(layout, trace=str(tmp_path / "trace"), front_ms=front).served.values() for front in (0.0, 30.0)
    )
    assert later.at == alone.at
    assert later.first == pytest.approx(alone.first + 0.03)
    assert later.last == pytest.approx(alone.last + 0.03)
    (slow,) = simulate(layout, trace=str(tmp_path / "trace"), front_token_us=1e6).served.values()
    assert (slow.first, slow.last) == pytest.approx((alone.first + 1, alone.first + 3))  # the front is the slower one


def test_prompts_beside_others_are_cut_as_a_server_cuts_them(layout: Layout) -> None:
    """So that those that decode wait about as long as the pause, after what the server's warm-up has learned."""
    limits, times = Simulator(layout, Simulation(longest=4096)).limits, StepTimes(layout, 4096)
    pause = times.prefill(2048, 0, 1.0) / 6
    replica = Replica(0, limits, 4000, times, None, pause)
    replica.add(0, Arrival(0.0, array("q", range(16)), 200))
    replica.begin(0.0)
    replica.end()
    replica.add(1, Arrival(0.0, array("q", range(2048)), 2))
    found = []
    while not found or not replica.sequences[1].generated:
        found.append(replica.begin(0.0) or 0.0)
        replica.end()
    assert 4 < len(found) < 20
    assert max(found) < 2 * pause

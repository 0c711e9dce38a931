"""The simulation: the same seed gives the same hours, every request is answered once, queues and failures cost what
they must, and the real scheduler's prefixes and pages are at work."""

import dataclasses
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.cluster import Day, Load, Simulation, Targets
from planner.layouts import Layout, Sizes, make_layout
from planner.simulation.replica import Replica
from planner.simulation.report import printed, show_simulation
from planner.simulation.router import Router
from planner.simulation.run import Outcome, Simulator
from planner.simulation.steps import StepTimes
from planner.simulation.summary import summary_of
from planner.simulation.traffic import Arrival, arrivals, trace
from tests.planner.test_cluster import CLUSTER, HARDWARE, write
from umbra.errors import UserError


@pytest.fixture(scope="module")
def layout() -> Layout:
    cluster = dataclasses.replace(CLUSTER, load=Load(rate=40.0, prompt_tokens=200, output_tokens=20))
    return make_layout(cluster, Sizes(2, 4, 2, 4, "none", 1.0), HARDWARE)


def simulate(layout: Layout, **settings: Any) -> Outcome:
    return Simulator(layout, Simulation(**{"requests": 200, "longest": 2048, "spread": 0.5} | settings)).run()


def times(outcome: Outcome) -> list[tuple[float, float, float]]:
    return [(s.at, s.first, s.last) for s in outcome.served.values()]


def test_equal_seeds_give_equal_results(layout: Layout) -> None:
    settings = dict(rank_failure_hours=0.004, restart_s=1.0, prefixes=3, prefix_tokens=128)
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
    outcome = simulate(layout, rank_failure_hours=0.002, restart_s=2.0)
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
    made = list(arrivals(load, simulation))
    assert len(made) / made[-1].at == pytest.approx(5.0, rel=0.1)
    assert np.mean([len(a.prompt) for a in made]) == pytest.approx(300, rel=0.1)
    assert np.mean([a.output for a in made]) == pytest.approx(80, rel=0.1)


def test_the_command_reports_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, simulation={"requests": 60, "longest": 1024})
    show_simulation(path, [], tmp_path / "facts.json", tmp_path / "plot.png")
    out = capsys.readouterr().out
    assert "TTFT p99, ms" in out
    assert "nothing was measured" in out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_facts_count_requests_in_time(layout: Layout) -> None:
    outcome = simulate(layout)
    assert summary_of(outcome, Targets(1e9, 1e9)).facts["in time"] == 1.0
    assert summary_of(outcome, Targets(1e-3, 1e-3)).facts["in time"] == 0.0


def tight(layout: Layout, resident: float = 0.5) -> Layout:
    """One replica whose memory is too short for all experts and keys and values."""
    hardware = dataclasses.replace(HARDWARE, device=dataclasses.replace(HARDWARE.device, memory_gb=16.0))
    return Layout(layout.cluster, Sizes(1, 4, 4, 4, "none", resident), hardware, layout.counted)


def test_experts_give_way_to_sequences_and_return(layout: Layout) -> None:
    """With the real arena and balance: under a burst experts leave, and after it they are back."""
    settings = dict(requests=150, longest=4096, memory="elastic", spread=0.0, prefix_cache=False)
    outcome = simulate(tight(layout), **settings)
    (replica,) = outcome.replicas
    assert replica.experts
    arena = replica.experts.offload.arena
    held, experts = ([getattr(s, name) / arena.frames for s in replica.samples] for name in ("held", "experts"))
    assert all(s.held + s.kept + s.experts + s.free == arena.frames for s in replica.samples)
    assert held
    assert experts
    assert len(outcome.served) == 150
    assert all(cache.held == 0 for cache in replica.scheduler.caches)
    assert times(outcome) == times(simulate(tight(layout), **settings))


def test_the_server_judgement_divides_memory_between_prefixes_and_experts(layout: Layout) -> None:
    """Prompts that come again win pages from experts, prompts that do not lose them."""

    def expert_pages(**settings: Any) -> float:
        (replica,) = simulate(tight(layout), requests=150, longest=4096, memory="elastic", **settings).replicas
        assert replica.shares
        return replica.shares.expert_pages / replica.shares.pages

    assert expert_pages(prefixes=60, prefix_tokens=1024) < expert_pages()


@pytest.mark.parametrize("resident", [1.0, 0.5])
def test_steps_that_are_taken_together_change_nothing(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, resident: float
) -> None:
    """Every request has the times that it has if each step is scheduled by itself, also while memory is short."""
    one = tight(layout, resident) if resident < 1 else layout
    settings = dict(prefixes=3, prefix_tokens=256, reserve=1, rank_failure_hours=0.01, restart_s=1.0, longest=4096)
    together = simulate(one, **settings)
    calls = 0

    def alone(self: Replica, step: object) -> int:
        nonlocal calls
        calls += 1
        return 1

    monkeypatch.setattr(Replica, "_alike", alone)
    stepwise = simulate(one, **settings)
    for a, b in zip(times(together), times(stepwise), strict=True):
        assert a == pytest.approx(b, rel=1e-9)
    assert [r.steps for r in together.replicas] == [r.steps for r in stepwise.replicas]
    assert [r.preemptions for r in together.replicas] == [r.preemptions for r in stepwise.replicas]
    assert calls


def test_a_node_takes_all_its_replicas_with_it(layout: Layout) -> None:
    """Both replicas are on one node of eight devices: whatever it does, they fail together."""
    outcome = simulate(layout, node_failure_hours=0.0005, node_restart_s=2.0)
    assert outcome.failures >= 2
    assert outcome.failures % 2 == 0
    assert all(served.at < served.first <= served.last for served in outcome.served.values())


def test_the_router_takes_the_least_loaded_replica_that_is_alive() -> None:
    router, prompt = Router("least_loaded", 4, 3), array("q", range(8))
    router.loads[:] = 2, 1, 5
    assert router.choose(prompt) == 1
    router.lose(1)
    assert (router.choose(prompt), router.alive) == (0, 2)
    router.regain(1)
    assert router.choose(prompt) == 1
    near = Router("prefix_aware", 4, 3)
    assert near.choose(prompt) == 0
    near.loads[:] = 1, 0, 0
    assert near.choose(prompt) == 0  # where it was before
    near.loads[0] = 9
    assert near.choose(prompt) == 1


def test_the_hours_of_a_day_differ() -> None:
    hours, load = range(24), Load(rate=1.0, prompt_tokens=300, output_tokens=80)
    day = Day(
        tuple(0.1 * (h % 3) for h in hours), tuple(10 + h for h in hours), tuple(2 + h for h in hours),
        tuple(float(h > 11) for h in hours),
    )  # fmt: skip
    made = list(arrivals(load, Simulation(requests=10**6, hours=48, day=day, prefixes=1, prefix_tokens=4)))
    counts = np.bincount([int(a.at // 3600) for a in made], minlength=48)
    assert not counts[::3].any()
    assert counts[2::3].sum() / counts[1::3].sum() == pytest.approx(2, rel=0.1)
    assert {(int(a.at // 3600) % 24, len(a.prompt), a.output) for a in made} <= {(h, 10 + h, 2 + h) for h in hours}
    morning, evening = ({tuple(a.prompt[:4]) for a in made if (a.at // 3600 % 24 > 11) == late} for late in (0, 1))
    assert len(evening) == 1
    assert len(morning) > 1000


def test_all_divisions_of_memory_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})  # in this process
    path = write(tmp_path, search={"worlds": [8], "resident": [0.9, 0.5, 1.0]}, load={"rate": 1.0, "output_tokens": 16})
    sets = ["simulation.requests=40", "simulation.longest=1024", "simulation.memory=all"]
    show_simulation(path, sets, tmp_path / "facts.json", tmp_path / "plot.png")
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == ["resident", "experts", "50%", "90%", "100%", "elastic"]
    assert "experts hit" in out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


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


def test_facts_are_printed_as_shares_whole_numbers_or_hundredths() -> None:
    facts = {"in time": 0.9876, "requests": 12_345.0, "requests/s": 2.125, "none": 0.0}
    assert printed(facts) == {"in time": "98.8%", "requests": "12,345", "requests/s": "2.12", "none": "0"}

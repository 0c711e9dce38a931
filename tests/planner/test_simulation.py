"""The simulation: the same seed gives the same hours, every request is answered once, queues and failures cost what
they must, and the real scheduler's prefixes and pages are at work."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from planner.cluster import Load, Simulation
from planner.layouts import Layout, Sizes, make_layout
from planner.simulation.report import show_simulation
from planner.simulation.run import Outcome, Simulator
from tests.planner.test_cluster import CLUSTER, HARDWARE, write


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
        return sum(replica.cached_tokens for replica in simulate(layout, **settings, **more).replicas)

    assert found(prefix_cache=False) == 0
    assert 0 < found() <= found(router="prefix_aware")


def test_a_prompt_that_can_never_run_is_refused(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"at": 0, "prompt": 4000, "output": 3}\n{"at": 1, "prompt": 10, "output": 3}\n')
    outcome = simulate(layout, trace=str(tmp_path / "trace"))
    assert (outcome.refused, len(outcome.served)) == (1, 1)


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


def test_a_node_takes_all_its_replicas_with_it(layout: Layout) -> None:
    """Both replicas are on one node of eight devices: whatever it does, they fail together."""
    outcome = simulate(layout, node_failure_hours=0.0005, node_restart_s=2.0)
    assert outcome.failures >= 2
    assert outcome.failures % 2 == 0
    assert all(served.at < served.first <= served.last for served in outcome.served.values())


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

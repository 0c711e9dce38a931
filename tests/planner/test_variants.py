"""What `umbra plan --cluster --simulate` runs and says, with plans and simulations that are made up."""

import dataclasses
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.cluster import Cluster, Load, Search, Simulation
from planner.layouts import Sizes
from planner.simulation import report as module
from planner.simulation.report import Simulated, Variant, show_simulation, simulate, simulate_all, variants_of
from umbra.errors import UserError

SIZES = Sizes(2, 4, 2, 4, "none", 0.5)
HARDWARE: Any = SimpleNamespace(name="made")


def found(tpot: float, resident: float = 0.5) -> Any:
    layout = SimpleNamespace(sizes=dataclasses.replace(SIZES, resident=resident))
    return SimpleNamespace(layout=layout, load=SimpleNamespace(tpot=tpot, ttft=0.25))


def plan(memory: str, *layouts: Any, cheapest: Any = (), slow: Any = ()) -> Any:
    cluster = Cluster(
        devices=8, load=Load(rate=2.5), search=Search(resident=(1.0, 0.75, 0.5, 0.25)),
        simulation=Simulation(memory=memory, seed=4),
    )  # fmt: skip
    return SimpleNamespace(
        cluster=cluster, hardware=HARDWARE, found=list(layouts), cheapest=list(cheapest), slow=list(slow)
    )


def test_one_variant_or_every_possible_share_and_memory_that_moves() -> None:
    one = plan("fixed", found(1.0))
    assert variants_of(one, SIZES) == [Variant(one.cluster, SIZES, HARDWARE, one.cluster.simulation)]
    slow = SimpleNamespace(sizes=dataclasses.replace(SIZES, resident=0.25))
    many = plan("all", found(1.0), found(1.0, 1.0), slow=[slow])
    variants = variants_of(many, SIZES)
    assert [(v.sizes.resident, v.simulation.memory, v.name) for v in variants] == [
        (0.25, "fixed", "25%"), (0.5, "fixed", "50%"), (1.0, "fixed", "100%"), (0.5, "elastic", "elastic"),
    ]  # fmt: skip
    assert all((v.cluster, v.hardware, v.simulation.seed) == (many.cluster, HARDWARE, 4) for v in variants)


def test_a_simulation_is_timed_and_collects_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(simulation=Simulation())
    variant = Variant(cluster, SIZES, HARDWARE, dataclasses.replace(cluster.simulation, seed=9))
    asked: Any = []
    outcome, times = object(), iter([3.0, 4.5, 6.0])

    class Made:
        def __init__(self, *given: Any):
            asked.append(given)

        def run(self) -> object:
            assert not gc.isenabled()
            if outcome is None:
                raise UserError("too long")
            return outcome

    monkeypatch.setattr(module, "make_layout", lambda *given: (asked.append(given), "layout")[1])
    monkeypatch.setattr(module, "Simulator", Made)
    monkeypatch.setattr(module, "summary_of", lambda *given: (asked.append(given), "summary")[1])
    monkeypatch.setattr(module.time, "process_time", lambda: next(times))
    before = gc.isenabled()
    try:
        assert simulate(variant) == Simulated(variant, "summary", 1.5)  # type: ignore[arg-type]
        assert gc.isenabled()
        outcome = None
        with pytest.raises(UserError, match="too long"):
            simulate(variant)
        assert gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
    assert asked[:3] == [
        (cluster, SIZES, HARDWARE), ("layout", variant.simulation), (asked[2][0], cluster.targets, 3600.0),
    ]  # fmt: skip


@pytest.mark.parametrize(("variants", "cores", "processes"), [(1, 8, 0), (3, 1, 0), (3, 2, 2), (2, 8, 2)])
def test_variants_are_simulated_on_all_cores(
    monkeypatch: pytest.MonkeyPatch, variants: int, cores: int, processes: int
) -> None:
    started: list[int] = []

    class Pool:
        def __init__(self, count: int, context: Any):
            assert context.get_start_method() == "spawn"
            started.append(count)
            self.map = map

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(module, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(module, "simulate", lambda variant: f"of {variant}")
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(cores)))
    names: Any = [f"variant {number}" for number in range(variants)]
    assert simulate_all(names) == [f"of {name}" for name in names]
    assert started == [processes] * bool(processes)


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_simulation_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    of = plan("fixed", found(0.02), found(0.01, 1.0))
    written: Any = []
    facts = {"seconds": 5400.0}
    times = iter([1.0, 3.25])

    def simulated(variants: Any) -> Any:
        summary = SimpleNamespace(facts=facts)
        return [Simulated(variant, summary, 2.0) for variant in variants]  # type: ignore[arg-type]

    monkeypatch.setattr(module, "make_cluster_plan", lambda path, overrides: (written.append((path, overrides)), of)[1])
    monkeypatch.setattr(module, "simulate_all", simulated)
    monkeypatch.setattr(module, "table", lambda found: [f"{len(found)} columns"])
    one: Any = lambda plan, sizes: Variant(plan.cluster, sizes, HARDWARE, plan.cluster.simulation)  # noqa: E731
    monkeypatch.setattr(module, "variants_of", lambda plan, sizes: [one(plan, sizes)] * count)
    monkeypatch.setattr(module, "write_json", lambda *given: written.append(given))
    monkeypatch.setattr(module, "draw", lambda found, path: written.append((len(found), path)))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))
    show_simulation(tmp_path, ["a=1"], tmp_path / "json", tmp_path / "plot")
    quickest = dataclasses.replace(SIZES, resident=1.0)
    assert capsys.readouterr().out == (
        f"8 devices of made: {quickest}\n{count} columns\n"
        + ("the plan expects             10.00 ms a token, first after 250 ms\n" if count == 1 else "")
        + f"{1.5 * count:.2f} hours of traffic in 2.2 s, {2.0 * count:.1f} s of CPU time\n"
        "Step times are modelled, nothing was measured.\n"
    )
    assert written == [
        (tmp_path, ["a=1"]),
        (tmp_path / "json", {"layout": dataclasses.asdict(quickest), "rows": [{"memory": "100%", **facts}] * count}),
        (count, tmp_path / "plot"),
    ]
    del written[:]
    of.cheapest, times = [of.found[0]], iter([0.0, 0.0])
    show_simulation(tmp_path, [], None, None)
    assert capsys.readouterr().out.startswith(f"8 devices of made: {SIZES}\n")
    assert len(written) == 1
    of.cheapest, of.found = [], []
    with pytest.raises(UserError, match=r": no layout keeps up with 2\.5 requests/s: nothing to simulate$"):
        show_simulation(tmp_path, [], None, None)

"""Whole simulations against the figures that they gave when they were last looked at: every rule and constant of the
simulation is in them. After a change of the rules, UMBRA_SIMULATED=write writes the new figures."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot

from planner.cluster import Day, Load, Simulation, Targets
from planner.layouts import Layout, Sizes, make_layout
from planner.simulation import replica, report
from planner.simulation.report import Simulated, Variant, draw, printed, table
from planner.simulation.run import Outcome, Simulator
from planner.simulation.summary import BUCKETS, Summary, summary_of
from tests.planner.test_cluster import CLUSTER, HARDWARE
from umbra.files import write_json

HOUR_S = 0.5  # seconds of an hour of the day
DAY = Day(
    tuple(20.0 + 5 * (h % 4) for h in range(24)), tuple(100 + 10 * h for h in range(24)),
    tuple(10 + h for h in range(24)), tuple(float(h % 2) for h in range(24)), HOUR_S / 60,
)  # fmt: skip
COMMON: dict[str, Any] = {"requests": 200, "longest": 2048, "spread": 0.5}
TARGETS = {"elastic": Targets(6000.0, 256.0), "half of the experts": Targets(20_000.0, 365.0)}
SCENARIOS: dict[str, tuple[Sizes, float, dict[str, Any]]] = {  # a layout, a device's memory in GB, the traffic
    "failures": (
        Sizes(2, 4, 2, 4, "none", 1.0), 64, dict(
            prefixes=5, prefix_tokens=128, router="prefix_aware", rank_failure_hours=0.01, restart_s=1.0,
            node_failure_hours=0.002, node_restart_s=2.0, front_ms=2.0, front_token_us=50.0,
        ),
    ),
    "elastic": (
        Sizes(1, 4, 4, 4, "none", 0.5), 10,
        dict(memory="elastic", prefixes=20, prefix_tokens=512, reserve=1, longest=4096, skew=2.0),
    ),
    "half of the experts": (Sizes(1, 4, 4, 4, "none", 0.5), 7.7, dict(longest=4096, skew=0.5, reserve=1)),
    "groups and a pause": (Sizes(1, 8, 2, 4, "none", 1.0), 64, dict(mixed_tokens=0)),
    "a day": (Sizes(1, 8, 8, 8, "none", 1.0), 64, dict(day=DAY, hours=12, prefixes=1, prefix_tokens=64)),
}  # fmt: skip
EXPECTED = Path(__file__).parents[1] / "data" / "simulated_hours.json"


def simulated(name: str) -> tuple[Outcome, Summary]:
    sizes, memory_gb, settings = SCENARIOS[name]
    cluster = dataclasses.replace(CLUSTER, load=Load(rate=40.0, prompt_tokens=200, output_tokens=20))
    hardware = dataclasses.replace(HARDWARE, device=dataclasses.replace(HARDWARE.device, memory_gb=memory_gb))
    layout: Layout = make_layout(cluster, dataclasses.replace(sizes, resident=1.0), HARDWARE)
    layout = Layout(layout.cluster, sizes, hardware, layout.counted)
    outcome = Simulator(layout, Simulation(**COMMON | settings)).run()
    return outcome, summary_of(outcome, TARGETS.get(name, Targets(600.0, 42.0)), HOUR_S)


@pytest.mark.parametrize("name", SCENARIOS)
def test_figures_are_those_of_the_last_look(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "SAMPLE_S", 0.4)  # they take seconds in all
    outcome, summary = simulated(name)
    assert all(len(line) == len(summary.hours) == BUCKETS for line in summary.lines.values())
    found = summary.facts | {f"mean of {line}": float(np.nanmean(v)) for line, v in summary.lines.items()}
    found["last hour"] = float(summary.hours[-1])
    found |= {f"memory {n}": float(share) for n, share in enumerate(summary.memory.mean(axis=0))}
    found["hash of times"] = float(sum(i * s.last % 1 for i, s in enumerate(outcome.served.values())))
    if os.environ.get("UMBRA_SIMULATED") == "write":
        known = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
        write_json(EXPECTED, known | {name: {key: float(f"{value:.9g}") for key, value in found.items()}})
    assert found == pytest.approx(json.loads(EXPECTED.read_text())[name], rel=1e-6, abs=1e-9, nan_ok=True)


def variant(name: str, memory: str, resident: float) -> Simulated:
    sizes, _, settings = SCENARIOS[name]
    simulation = Simulation(**COMMON | settings | {"memory": memory})
    found = Variant(CLUSTER, dataclasses.replace(sizes, resident=resident), HARDWARE, simulation)
    return Simulated(found, simulated(name)[1], 1.5)


@pytest.fixture(scope="module")
def two() -> list[Simulated]:
    return [variant("a day", "fixed", 0.5), variant("half of the experts", "elastic", 1.0)]


def test_the_table_has_a_column_for_each_variant(two: list[Simulated]) -> None:
    assert [one.variant.name for one in two] == ["50%", "elastic"]
    lines = table(two)
    assert lines[0] == f"{'resident experts':<28}{'50%':>12}{'elastic':>12}"
    rows = {line[:28].strip(): line[28:].split() for line in lines[1:]}
    assert list(rows) == list(two[-1].summary.facts)
    assert rows["requests"] == ["156", "200"]
    assert rows["in time"][0] == "100.0%"
    assert rows["experts hit"] == ["-", f"{two[1].summary.facts['experts hit']:.1%}"]
    assert rows["seconds"] == [f"{one.summary.facts['seconds']:,.2f}" for one in two]
    assert table(two[:1]) == [f"{name:<28}{columns[0]:>12}" for name, columns in rows.items() if columns[0] != "-"]
    assert printed({"busy": 0.5, "steps": 1234.0, "seconds": 1234.5}) == {
        "busy": "50.0%", "steps": "1,234", "seconds": "1,234.50",
    }  # fmt: skip


def test_the_drawing_has_the_last_variant_in_black(
    two: list[Simulated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    real = pyplot.subplots
    monkeypatch.setattr(pyplot, "subplots", lambda *given, **more: drawn.append(real(*given, **more)) or drawn[-1])
    for found in (two, two[1:]):
        draw(found, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        _, (rate, memory, *panels) = drawn[-1]
        last = found[-1].summary
        [line] = rate.lines
        np.testing.assert_array_equal(line.get_xdata(), last.hours)
        np.testing.assert_array_equal(line.get_ydata(), last.lines["requests/s"])
        assert memory.get_ylabel() == ("memory, %: elastic" if found[1:] else "memory, %")
        assert memory.get_ylim() == (0, 100)
        tops = [area.get_paths()[0].vertices[:, 1].max() for area in memory.collections]
        np.testing.assert_allclose(tops, 100 * last.memory.cumsum(1).max(0))
        for axes, name in zip(panels, ("TTFT", "TPOT", ""), strict=True):
            for number, one in enumerate(found):
                lines = axes.lines[2 * number : 2 * number + 2] if name else axes.lines[number : number + 1]
                wanted = [one.summary.lines[f"{name} p{p}, ms"] for p in (50, 99)] if name else []
                wanted = wanted or [100 * one.summary.lines["in time"]]
                for drawing, values in zip(lines, wanted, strict=True):
                    np.testing.assert_array_equal(drawing.get_ydata(), values)
                    assert drawing.get_color() == ("black" if one is found[-1] else f"C{number}")
                    assert drawing.get_linewidth() == 1
            assert axes.get_yscale() == ("log" if name else "linear")
        assert (panels[0].get_legend() is not None) == bool(found[1:])


def test_variants_run_in_as_many_processes_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Pool:
        def __init__(self, processes: int, context: Any):
            made.append((processes, context.get_start_method()))

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *error: object) -> None: ...

        def map(self, does: Any, variants: Any) -> Any:
            return map(does, variants)

    monkeypatch.setattr(report, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(report, "simulate", lambda variant: f"of {variant}")
    found: list[Any] = []
    for cores, variants in (({0, 1}, "abc"), ({0, 1, 2, 3}, "abc"), ({0}, "ab"), ({0, 1}, "a")):
        monkeypatch.setattr(report.os, "sched_getaffinity", lambda pid, cores=cores: cores)
        found.append(report.simulate_all([*variants]))  # type: ignore[arg-type]
    assert found == [["of a", "of b", "of c"]] * 2 + [["of a", "of b"], ["of a"]]
    assert made == [(2, "spawn"), (3, "spawn")]

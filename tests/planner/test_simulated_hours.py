"""Whole simulations against the figures that they gave when they were last looked at: every rule and constant of the
simulation is in them. After a change of the rules, UMBRA_SIMULATED=write writes the new figures."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.cluster import Day, Load, Simulation, Targets
from planner.layouts import Layout, Sizes, make_layout
from planner.simulation import replica
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

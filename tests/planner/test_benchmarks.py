"""The planner's benchmarks: what is measured of a tiny model can be simulated; routing is as uneven as published."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.fakes.scripted import Server
from tests.tiny import make_runner, save_tiny, tiny_case, write_case
from umbra.executor.engine.schedule.scheduler import Step
from umbra.planner.benchmarks import server_steps, simulated_server
from umbra.planner.benchmarks.expert_placement import published
from umbra.planner.benchmarks.server_steps import Kind, MeasuredTimes, kind_of
from umbra.planner.cluster import SimulationSettings
from umbra.planner.simulation.run import Simulator


def test_measured_steps_of_a_tiny_server_are_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FEW", 4), ("TOKENS", (4, 16)), ("DECODE_STEPS", 4), ("REPEATS", 1), ("COLD_STEPS", 3)):
        monkeypatch.setattr(server_steps, name, value)
    save_tiny(tmp_path / "model")
    settings = {
        "threads": 1,
        "serve_config": {"reserve": 16},
        "data_config": {"input_max_len": 48, "max_new_tokens": 16, "batch_size": 2, "chunked_prefill_size": 16},
    }
    runner = make_runner(tiny_case(tmp_path, tmp_path / "model", exe_mode="graph", **settings), tmp_path)
    worker, clock = Server(runner).worker, SimpleNamespace(now=0.0)
    run_step = worker.step

    def step(step: Step | None) -> None:
        if step:
            kind = kind_of(step)
            clock.now += 0.010 + 0.001 * kind.rows + 0.002 * kind.tokens + 0.0001 * kind.cached
        run_step(step)

    monkeypatch.setattr(worker, "step", step)
    monkeypatch.setattr(server_steps, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    figures = server_steps.measured_for(worker, 1.0)
    assert clock.now >= 1
    assert figures.spread == pytest.approx(1)
    assert figures.cold == pytest.approx([0, 0, 0])
    assert np.array(figures.decode) == pytest.approx(np.array([[1, 0.011], [2, 0.012]]))
    assert np.array(figures.decode_cached) == pytest.approx(np.array([[1, 0.0001], [2, 0.0001]]))
    assert np.array(figures.prefill) == pytest.approx(np.array([[4, 0.018], [16, 0.042]]))
    assert json.loads(json.dumps(figures.__dict__))["pages"] == figures.pages

    trace = tmp_path / "trace"
    trace.write_text("".join(json.dumps({"at": i, "prompt": 20 + i, "output": 5}) + "\n" for i in range(3)))
    for name, value in (("ROWS", 2), ("CHUNK", 16)):
        monkeypatch.setattr(simulated_server, name, value)
    path = write_case(tmp_path / "tiny.yaml", tmp_path / "model", exe_mode="graph", **settings)
    layout = simulated_server.layout_of(path, figures)
    simulation = SimulationSettings(trace=str(trace), longest=64, reserve=16, mixed_tokens=0, front_ms=7.0)
    simulator = Simulator(layout, simulation, MeasuredTimes(layout, 64, figures))
    (replica,) = simulator.outcome.replicas
    assert replica.pages == figures.pages
    outcome = simulator.run()
    whole = figures.seconds(Kind(0, 0, 16, 128.0)) + figures.seconds(Kind(0, 0, 4, 4 * (16 + 2)))
    assert outcome.served[0].first == pytest.approx(0.007 + whole)
    calls = simulated_server.calls_of(simulation, 96)
    assert [(len(call.ids), call.tokens, call.at) for call in calls] == [(20, 5, 0), (21, 5, 1), (22, 5, 2)]


def test_routing_is_as_uneven_as_published() -> None:
    in_order, placed = (line.split("imbalance ")[1].split(", published ") for line in published(1.1))
    assert float(in_order[0]) == pytest.approx(float(in_order[1]), rel=0.05)
    assert float(placed[0]) == pytest.approx(float(placed[1]), rel=0.1)

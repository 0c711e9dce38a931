"""The server beside its simulation, and ranks beside the cluster model: what is measured of a tiny model can be
simulated, and equal requests give equal figures on both sides."""

import argparse
import json
import os
from pathlib import Path

import pytest

from planner.benchmarks import cpu_ranks, server_steps, simulated_server
from planner.benchmarks.server_steps import Figures, Kind, MeasuredTimes, line
from planner.cluster import Simulation
from planner.simulation.run import Outcome, Served, Simulator
from tests.fakes.scripted import Server
from tests.tiny import make_runner, save_tiny, tiny_case, write_case
from tools.benchmarks import cpu
from tools.benchmarks.machine import Limits, wake_seconds
from tools.benchmarks.serving_client import Answer

FIGURES = Figures(100, [(1, 1.0), (2, 1.5)], [(1, 0.01), (2, 0.02)], [(16, 2.0), (32, 3.0)], 0.001, 0.1, [0.5, 0.25])


def test_steps_between_measured_ones_are_interpolated() -> None:
    assert [line(FIGURES.prefill, x) for x in (8, 16, 24, 32, 40)] == [1.5, 2.0, 2.5, 3.0, 3.5]
    decode = Kind(2, 50, 0, 0.0)
    assert FIGURES.seconds(decode) == pytest.approx(1.5 + 0.02 * 50)
    behind_a_prompt = [FIGURES.seconds(decode, since) - FIGURES.seconds(decode) for since in range(3)]
    assert behind_a_prompt == pytest.approx([0.5, 0.25, 0])
    alone = FIGURES.seconds(Kind(0, 0, 32, 512.0))
    assert alone == pytest.approx(3.0)
    assert FIGURES.seconds(Kind(0, 0, 32, 512.0 + 3200)) == pytest.approx(alone + 3.2)  # behind 100 cached tokens
    beside = FIGURES.seconds(Kind(2, 50, 30, 450.0))
    assert beside == pytest.approx(3.0 + 0.001 * (450 - 512) + 2 * 0.1 + 50 * 0.01)


def test_measured_steps_of_a_tiny_server_are_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FEW", 4), ("TOKENS", (4, 16)), ("DECODE_STEPS", 4), ("REPEATS", 1), ("COLD_STEPS", 3)):
        monkeypatch.setattr(server_steps, name, value)
    save_tiny(tmp_path / "model")
    settings = {
        "threads": 1, "serve_config": {"reserve": 16},
        "data_config": {"input_max_len": 48, "max_new_tokens": 16, "batch_size": 2, "chunked_prefill_size": 16},
    }  # fmt: skip
    runner = make_runner(tiny_case(tmp_path, tmp_path / "model", exe_mode="graph", **settings), tmp_path)
    figures = server_steps.measured_for(Server(runner).worker, 0.01)
    assert len(figures.cold) == 3
    assert figures.spread >= 1
    assert [rows for rows, _ in figures.decode] == [1, 2]
    assert all(seconds > 0 for _, seconds in figures.prefill)
    assert json.loads(json.dumps(figures.__dict__))["pages"] == figures.pages

    trace = tmp_path / "trace"
    trace.write_text("".join(json.dumps({"at": i, "prompt": 20 + i, "output": 5}) + "\n" for i in range(3)))
    for name, value in (("ROWS", 2), ("CHUNK", 16)):
        monkeypatch.setattr(simulated_server, name, value)
    path = write_case(tmp_path / "tiny.yaml", tmp_path / "model", exe_mode="graph", **settings)
    layout = simulated_server.layout_of(path, figures)
    simulation = Simulation(trace=str(trace), longest=64, reserve=16, mixed_tokens=0, front_ms=7.0)
    simulator = Simulator(layout, simulation, MeasuredTimes(layout, 64, figures))
    (replica,) = simulator.outcome.replicas
    assert replica.pages == figures.pages
    outcome = simulator.run()
    whole = figures.seconds(Kind(0, 0, 16, 128.0)) + figures.seconds(Kind(0, 0, 4, 4 * (16 + 2)))
    assert outcome.served[0].first == pytest.approx(0.007 + whole)
    calls = simulated_server.calls_of(simulation, 96)
    assert [(len(call.ids), call.tokens, call.at) for call in calls] == [(20, 5, 0), (21, 5, 1), (22, 5, 2)]


def test_both_sides_have_the_same_figures() -> None:
    answers, outcome = [], Outcome()
    for number, (at, first, last, tokens) in enumerate([(0.0, 0.5, 2.5, 5), (1.0, 1.2, 3.2, 11)]):
        answers.append(Answer(10 + at, times=[10 + first, 10 + last], tokens=tokens, cached_tokens=16))
        outcome.served[number] = Served(at, 20, tokens, first, last)
    outcome.replicas = [argparse.Namespace(preemptions=3, cached_tokens=32)]  # type: ignore[list-item]
    real, made = simulated_server.served(answers, 3), simulated_server.simulated(outcome)
    assert real == pytest.approx(made)
    assert real["a token, mean"] == pytest.approx((500 + 200) / 2)
    assert real["tokens/s"] == pytest.approx(16 / 3.2)
    rounds = [{"predicted": made, "measured": real}] * 2
    rows = list(simulated_server.compared("demo", "light", rounds))
    assert all(row["ratio"] == pytest.approx(1) for row in rows)


def test_a_process_on_another_core_wakes() -> None:
    cores = os.sched_getaffinity(0)
    assert wake_seconds(min(cores), max(cores), 10) > 0
    assert os.sched_getaffinity(0) == cores


def test_a_rank_predicts_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MATRICES", 1), ("ROWS", 64), ("WIDTH", 64), ("TINY_OPS", 8), ("CACHED", 64)):
        monkeypatch.setattr(cpu_ranks, name, value)
    monkeypatch.setattr(cpu, "BEYOND", 1 << 10)
    monkeypatch.setattr(Limits, "READ_BYTES", 1 << 20)
    save_tiny(tmp_path / "model", moe_intermediate_size=32)
    case = write_case(tmp_path / "tiny.yaml", tmp_path / "model", model_config={"dtype": "bfloat16"})
    args = argparse.Namespace(
        case=str(case), ranks=[1], threads=1, instruction_set="auto", batches=[1, 2], contexts=[8], rounds=2
    )
    rows = list(cpu_ranks.rank_rows(args))
    assert [(row["ranks"], row["sequences"], row["cached"]) for row in rows] == [(1, 1, 8), (1, 2, 8)]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["predicted"] / row["measured"])
        assert set(row["constants"]) == set(cpu_ranks.CONSTANTS)
        assert row["constants"]["launch_us"] > 0

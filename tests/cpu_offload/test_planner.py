"""The planner of shadow experts: its model on made-up measurements, its choices, printed lines and report."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.families.minimax_m2 import AS_OTHERS
from tests.tiny import ONE_RANK, save_tiny, save_tiny_m2, tiny_case
from umbra.cpu_offload.costs import Costs, Line
from umbra.cpu_offload.planner.model import ExpertsShape, LayerSample, Planner, fit
from umbra.executor.config.case import Case
from umbra.executor.model_runner import make_runner
from umbra.executor.run.memory_report import show_plan

SHAPE = ExpertsShape(layers=10, experts=64, top_k=8)
COSTS = Costs(
    base=0.01,
    device=Line(0.002, 0.001, 0.0002),
    shadow=Line(0.04, 0.02, 0.001),
    slip=0.0,
    copy=0.052,
    block_bytes=4_200_000,
    threads=(4, 2),
    seconds=1.0,
)


def test_fit_finds_the_coefficients() -> None:
    wanted = Line(0.5, 0.25, 0.0625)
    fitted = fit(
        [LayerSample(e, p, wanted.ms(e, p)) for e, p in [(1, 1), (2, 2), (8, 8), (1, 4), (2, 8), (8, 32), (30, 32)]]
    )
    assert dataclasses.astuple(fitted) == pytest.approx(dataclasses.astuple(wanted))


def test_a_layer_is_the_longer_side_and_what_is_not_hidden() -> None:
    planner = Planner(SHAPE, COSTS)
    both = 1 - 0.5**8  # of one token's eight experts some are here, some missing
    device, shadow = 0.002 * both + 4 * 0.001 + 4 * 0.0002, 0.04 * both + 4 * 0.02 + 4 * 0.001
    assert planner.layer_ms(1, 0.5) == pytest.approx(0.01 + shadow)
    slower = dataclasses.replace(COSTS, device=Line(0, 0.1, 0))
    assert Planner(SHAPE, slower).layer_ms(1, 0.5) == pytest.approx(0.01 + 0.4)
    half = Planner(SHAPE, dataclasses.replace(COSTS, slip=0.5))
    assert half.layer_ms(1, 0.5) == pytest.approx(0.01 + shadow + device / 2)
    assert planner.layer_ms(1, 1.0) == pytest.approx(0.01 + 0.002 + 8 * 0.0012)  # nothing is handed over
    assert planner.layer_ms(1, 0.0) == pytest.approx(0.01 + 0.04 + 8 * 0.021)  # the device has nothing to do
    assert dataclasses.replace(planner, rest=3.0).step_ms(1, 0.5) == pytest.approx(3 + 10 * (0.01 + shadow))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planner") / "model"
    save_tiny(folder, eos_token_id=None)
    return folder


def case_of(model: Path, folder: Path, family: str = "qwen3_moe", arena_kb: int = 0, **offload: Any) -> Case:
    """A case, written to `folder`, that measures for a moment only."""
    settings = {"arena_mb": arena_kb / 1024} | ({"measure_s": 0.01} if offload["mode"] != "none" else {}) | offload
    return tiny_case(folder, model, model_name=family, exe_mode="graph", threads=0, offload_config=settings)


# frames of 2 layers x (keys, values) x 4 tokens x 2 heads x 8 float32 = 1024 bytes; blocks of 3 x 32 x 32 float32, as
# 16 columns are padded to 32: 12 frames each
@pytest.mark.parametrize(
    ("offload", "wanted"),
    [
        (
            {"mode": "elastic", "arena_kb": 100},
            [
                "100 frames of 1024 bytes, each a page of 4 tokens or part of 1 slots in 12 frames",
                "16 with shadows, 12288 bytes each; 16 may be resident",
                "KV pages: 56 for 4 sequence(s) at their longest, 99 can be had\n",
                "no sequence         0 pages,      8 slots:  50% of the experts fit",
                "slots             as many as the KV cache leaves room for",
                "half as long       28 pages,      5 slots:  31%",
                "the longest        56 pages,      3 slots:  19%",
            ],
        ),
        (
            {"mode": "fixed", "slots": -1, "max_swaps": -1, "stream_tokens": 9, "shadow_threads": 2},
            [
                "16 with shadows, 12288 bytes each; 0 may be resident",
                "slots             0 of 16: given",
                "max_swaps         0: given",
                "stream_tokens     9: given",
                "+ 2: ",
            ],
        ),
        (
            {"mode": "resident"},
            [
                "slots             all 16",
                "max_swaps         0: all experts stay",
                "stream_tokens     ",
                "249 frames",
                "the longest        56 pages,     16 slots: 100%",
            ],
        ),
    ],
)
def test_plan_counts_memory_and_predicts_without_the_checkpoint(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], offload: dict[str, Any], wanted: list[str]
) -> None:
    shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    show_plan(case_of(tmp_path / "model", tmp_path, **offload))
    out = capsys.readouterr().out
    assert all(line in out for line in wanted), out
    assert "hit rate                0%      25%      50%" in out
    assert "ms per token" in out
    assert "the time to read" in out


def test_plan_agrees_with_what_a_run_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_m2(model := tmp_path / "model", **AS_OTHERS)
    case = case_of(model, tmp_path, "minimax_m2", mode="elastic", arena_kb=100)
    show_plan(case)
    planned = capsys.readouterr().out
    runner = make_runner(case, tmp_path, ONE_RANK)
    runner.setup()
    arena = runner.engine.shadows.arena if runner.engine.shadows else None
    assert arena is not None
    assert f"{arena.frames} frames of {arena.frame_bytes} bytes" in planned
    assert f"part of {arena.extent_slots} slots in {arena.extent_frames} frames" in planned


def test_a_run_values_copies_and_compares(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = case_of(model, tmp_path, mode="fixed", slots=5)
    data = dataclasses.replace(case.data_config, prompts=(), input_max_len=6, max_new_tokens=12)
    runner = make_runner(dataclasses.replace(case, data_config=data), tmp_path, ONE_RANK)
    report = runner.run()
    assert runner.engine.shadows is not None
    plan = json.loads(json.dumps(report["offload"]["plan"]))
    measured = plan["costs"]
    sides = {side: Line(**measured[side]) for side in ("device", "shadow", "whole")}
    planner = Planner(ExpertsShape(2, 8, 3), Costs(**measured | sides))
    assert runner.engine.shadows.residency.settings.swap_cost == planner.swap_cost
    assert runner.engine.shadows.residency.settings.max_swaps == plan["choices"]["max_swaps"]
    assert plan["ratio"] == pytest.approx(plan["predicted_ms"] / plan["measured_ms"])
    assert plan["hit_rate"] == pytest.approx(report["offload"]["hit_rate"])
    assert plan["tokens"] == 4
    out = capsys.readouterr().out
    assert "predicted ms of a step of 4 sequence(s), by hit rate: " in out
    assert "ms per token predicted at hit rate" in out
    assert plan["prefill"]["layers"] == 1  # the last one computes the wanted rows only
    assert plan["prefill"]["measured_ms"] > 0
    assert "planner: a layer of a prefill: " in out
    assert "(medians of 1 layers with 24 tokens, " in out
    assert "  experts copied to the device: at most " in out

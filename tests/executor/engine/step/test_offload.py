"""Cases with shadow experts: the same tokens wherever experts are, one capture, memory within the arena, the report."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.shadow_experts import CopyingPlatform
from tests.families import ROWS
from tests.families.row import Row
from tests.quantised import mxfp4_tiny
from tests.tiny import make_runner, tiny_case
from tests.variants import thorough_but
from umbra.base.errors import UserError
from umbra.commands.logits import collect_logits
from umbra.executor.model_runner import ModelRunner
from umbra.executor.platform.cpu.device import CpuPlatform
from umbra.executor.platform.cpu.shadow_device import CpuDevice, CpuExperts
from umbra.executor.run.shadow_report import write_shadow_report
from umbra.ops.parallel.groups import Group

PROMPTS = [("a", [5, 17, 3]), ("b", [7]), ("c", list(range(30, 53))), ("d", [11, 12]), ("e", [90, 3, 3, 8])]
MB = 60 / 1024  # size of the arena: room for the whole cache and few experts, or for more experts and little cache


@pytest.fixture(scope="module", params=[row for row in ROWS.values() if row.offload is not None], ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder named as its family. Blocks and pages of all families take much the same."""
    row: Row = request.param
    folder = tmp_path_factory.mktemp("offload") / row.name
    row.save(folder, eos_token_id=None, **row.offload or {})
    if row.name == "gpt_oss":  # with biases, in MXFP4
        mxfp4_tiny(folder.rename(folder.with_name("floats")), folder)
    return folder


def runner_of(
    model: Path, folder: Path, exe_mode: str = "graph", platform: type[CpuPlatform] = CpuPlatform, **offload: Any
) -> ModelRunner:
    """The runner of a case in `folder` that measures for a moment only."""
    offload = ({"measure_s": 0.01} if offload["mode"] != "none" else {}) | offload
    data = {"batch_size": 3, "max_new_tokens": 24}
    sections = {"model_name": model.name, "data_config": data, "offload_config": offload}
    return make_runner(tiny_case(folder, model, exe_mode=exe_mode, **sections), folder, platform)


MODES: list[dict[str, Any]] = [
    {"mode": "resident"},
    {"mode": "fixed", "arena_mb": 150 / 1024, "stream_tokens": 20, "platform": CopyingPlatform},
    {"mode": "fixed", "slots": 5, "max_swaps": -1, "stream_tokens": -1},
    {"mode": "elastic", "arena_mb": MB, "interval": 3, "max_swaps": 8},
    {"mode": "elastic", "arena_mb": MB, "start_layer": 1, "stream_tokens": 20, "platform": CopyingPlatform},
]


@pytest.mark.parametrize("exe_mode", thorough_but(["eager", "graph"], "graph"))
def test_tokens_and_logits_are_those_without(model: Path, tmp_path: Path, exe_mode: str) -> None:
    plain = runner_of(model, tmp_path, exe_mode, mode="none")
    expected = [s.ids for s in plain.model_generate(PROMPTS)]
    logits = collect_logits(plain, [ids for _, ids in PROMPTS[:3]], steps=6)
    for offload in MODES:
        runner = runner_of(model, tmp_path, exe_mode, **offload)
        assert [s.ids for s in runner.model_generate(PROMPTS)] == expected, offload
        assert runner.engine.shadows
        streamed = runner.engine.shadows.history.streamed()["layers"] > 0
        assert streamed == ("platform" in offload and "start_layer" not in offload)  # else the last layer has few rows
        ours = collect_logits(runner, [ids for _, ids in PROMPTS[:3]], steps=6)
        assert all(np.array_equal(ours[name], logits[name]) for name in logits), offload


def test_residents_change_under_one_capture_within_the_arena(model: Path, tmp_path: Path) -> None:
    runner = runner_of(model, tmp_path, mode="elastic", arena_mb=MB, max_swaps=8)
    for _ in range(4):
        runner.model_generate(PROMPTS)
    graphs = runner.engine.decode_step.graphs  # type: ignore[attr-defined]
    assert sorted(rows for _, rows in graphs) == [2, 3]
    shadows = runner.engine.shadows
    assert shadows is not None
    steps, arena = shadows.history.steps, shadows.arena
    assert len({step.resident.tobytes() for step in steps}) > 3
    routed = {int(pairs) for step in steps for pairs in step.hits + step.misses}
    assert routed <= {rows * runner.config.experts_per_token for rows in (1, 2, 3)}
    assert all(step.kv_frames + step.expert_frames + step.free_frames == arena.frames for step in steps)
    assert shadows.history.for_cache > 0
    assert arena.frames - arena.free_frames - arena.slot_frames == 1  # the padding page: all others were given back


def test_an_expert_may_leave_while_its_copy_is_under_way(model: Path, tmp_path: Path) -> None:
    runner = runner_of(model, tmp_path, mode="fixed", slots=5, max_swaps=-1)
    shadows = runner.engine.shadows
    assert shadows
    layer, expert = id = next(iter(shadows.slots))
    for _ in range(50):
        shadows.evict(id)
        experts = shadows.layers[layer]
        assert isinstance(experts, CpuExperts)
        assert experts.table[expert] == experts.arrived[expert] == 0
        shadows.fetch(id)
    assert [s.ids for s in runner.model_generate(PROMPTS)] == [
        s.ids for s in runner_of(model, tmp_path, mode="none").model_generate(PROMPTS)
    ]


def test_what_a_run_leaves(model: Path, tmp_path: Path) -> None:
    runner = runner_of(model, tmp_path, mode="fixed", slots=5)
    assert runner.engine.shadows is not None
    id = next(iter(runner.engine.shadows.slots))
    runner.engine.shadows.evict(id)
    runner.engine.shadows.fetch(id)
    runner.model_generate(PROMPTS[:2])
    report = write_shadow_report(runner.engine.shadows, tmp_path, Group(), torch.device("cpu"))
    assert report["steps"] == 23
    assert 0 < report["hit_rate"] < 1
    layers = report["layers"]
    assert len(layers) == 2
    for name in ("copies", "evictions"):
        assert sum(layer[name] for layer in layers) == report[name] > 0
    assert report["shadow_ms"] > 0
    assert (tmp_path / "offload.png").read_bytes()[1:4] == b"PNG"
    events = json.loads((tmp_path / "offload_trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    spans = {lane: sum(e["ph"] == "X" and e["tid"] == tid for e in events) for lane, tid in lanes.items()}
    assert spans["shadow pool"] > 20
    assert spans["device"] >= 23


def test_a_stalled_pool_is_an_error_that_names_layer_and_step(model: Path, tmp_path: Path) -> None:
    runner = runner_of(model, tmp_path, mode="fixed", slots=-1, stream_tokens=-1)
    assert runner.engine.shadows is not None
    runner.engine.shadows.pool.stop()
    with pytest.raises(UserError, match=r"shadow experts: layer 0, step 1: the shadow pool was stopped"):
        runner.model_generate(PROMPTS)


@pytest.mark.parametrize(
    ("offload", "complaint"),
    [
        ({"mode": "none", "slots": 3}, "offload_config.slots: has no meaning with offload_config.mode: none"),
        ({"mode": "elastic", "slots": -1}, "offload_config.slots: -1 needs mode: fixed, not elastic"),
        ({"mode": "elastic", "stream_tokens": 3}, "stream_tokens: 3 must be above the 3 rows of a decode step"),
        ({"mode": "elastic", "arena_mb": 3 / 1024}, "have no room for one sequence of (18|36) pages"),
        ({"mode": "elastic", "start_layer": 2}, "no layers with experts of one size"),
    ],
)
def test_refusals(model: Path, tmp_path: Path, offload: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        runner_of(model, tmp_path, **offload)


def test_more_prompts_than_the_arena_has_room_for_at_once_are_refused(model: Path, tmp_path: Path) -> None:
    runner = runner_of(model, tmp_path, mode="fixed", slots=2, arena_mb=MB)
    with pytest.raises(UserError, match=r"arena_mb: there is no room for \d+ of 3 sequences that are to run together"):
        collect_logits(runner, [list(range(48))] * 3, steps=23)


def test_a_copy_that_is_not_made_is_an_error_and_nobody_is_published(model: Path, tmp_path: Path) -> None:
    runner = runner_of(model, tmp_path, mode="fixed", slots=5, max_swaps=-1)
    runner.model_generate(PROMPTS[:1])
    shadows = runner.engine.shadows
    assert shadows
    assert isinstance(shadows.device, CpuDevice)
    id = next(iter(shadows.slots))
    shadows.evict(id)
    shadows.device.copier.stop()
    with pytest.raises(UserError, match="the copier was stopped"):
        shadows.fetch(id)
    assert not shadows.published[id]
    assert not shadows.layers[id[0]].table[id[1]]

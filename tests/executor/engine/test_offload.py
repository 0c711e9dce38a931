"""Cases with shadow experts: the same tokens wherever experts are, one capture, memory within the arena, the report."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cpu_offload.device import CpuDevice
from errors import UserError
from executor.job.logits import collect_logits
from executor.job.runner import ModelRunner
from executor.job.shadow_report import write_offload
from executor.parallel.groups import Group
from tests.tiny import make_runner, save_tiny, tiny_case

PROMPTS = [("a", [5, 17, 3]), ("b", [7]), ("c", list(range(30, 53))), ("d", [11, 12]), ("e", [90, 3, 3, 8])]
ARENA_MB = 60 / 1024  # of the arena: all cache and few experts, or more experts and little cache


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "model", eos_token_id=None)
    return tmp_path / "model"


def runner_of(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, exe_mode: str = "graph", **offload: Any
) -> ModelRunner:
    monkeypatch.setattr("cpu_offload.cost.probe.SECONDS", 0.01)
    folder = checkpoint.parent
    data = {"batch_size": 3, "max_new_tokens": 24}
    return make_runner(
        tiny_case(folder, checkpoint, exe_mode=exe_mode, data_config=data, offload_config=offload), folder
    )


MODES: list[dict[str, Any]] = [
    {"mode": "resident"},
    {"mode": "fixed", "slots": -1},
    {"mode": "fixed", "arena_mb": 150 / 1024},
    {"mode": "fixed", "slots": 5, "stream_tokens": 4},
    {"mode": "fixed", "slots": 5, "max_swaps": -1, "stream_tokens": -1},
    {"mode": "elastic", "arena_mb": ARENA_MB},
    {"mode": "elastic", "arena_mb": ARENA_MB, "interval": 3, "max_swaps": 8},
    {"mode": "elastic", "arena_mb": ARENA_MB, "start_layer": 1, "stream_tokens": 20},
]


@pytest.mark.parametrize("exe_mode", ["eager", "graph"])
def test_tokens_and_logits_are_those_without(checkpoint: Path, exe_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = runner_of(checkpoint, monkeypatch, exe_mode, mode="none")
    expected = [s.ids for s in plain.model_generate(PROMPTS)]
    logits = collect_logits(plain, [ids for _, ids in PROMPTS[:3]], steps=6)
    for offload in MODES:
        runner = runner_of(checkpoint, monkeypatch, exe_mode, **offload)
        assert [s.ids for s in runner.model_generate(PROMPTS)] == expected, offload
        assert runner.engine.offload
        assert runner.engine.offload.history.streamed()["layers"] or offload.get("stream_tokens", -1) < 0
        found = collect_logits(runner, [ids for _, ids in PROMPTS[:3]], steps=6)
        assert all(np.array_equal(found[name], logits[name]) for name in logits), offload


def test_residents_change_under_one_capture_within_the_arena(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(checkpoint, monkeypatch, mode="elastic", arena_mb=ARENA_MB, max_swaps=8)
    for _ in range(4):
        runner.model_generate(PROMPTS)
    assert sorted(runner.engine.decode_step.graphs) == [(2,), (3,)]  # type: ignore[attr-defined]
    offload = runner.engine.offload
    assert offload is not None
    steps, arena = offload.history.steps, offload.arena
    assert len({step.resident.tobytes() for step in steps}) > 3
    assert all(step.kv_frames + step.expert_frames + step.free_frames == arena.frames for step in steps)
    assert offload.history.for_cache > 0
    assert arena.frames - arena.free_frames - arena.slot_frames == 1  # the padding page: all others came back


def test_what_a_run_leaves(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(checkpoint, monkeypatch, mode="fixed", slots=5)
    assert runner.engine.offload is not None
    place = next(iter(runner.engine.offload.slots))
    runner.engine.offload.evict(place)
    runner.engine.offload._fetch(place)
    runner.model_generate(PROMPTS[:2])
    report = write_offload(runner.engine.offload, checkpoint.parent, Group(), torch.device("cpu"))
    assert report["steps"] == 23
    assert 0 < report["hit_rate"] < 1
    layers = report["layers"]
    assert len(layers) == 2
    for name in ("copies", "evictions"):
        assert sum(layer[name] for layer in layers) == report[name] > 0
    assert report["shadow_ms"] > 0
    assert (checkpoint.parent / "offload.png").read_bytes()[1:4] == b"PNG"
    events = json.loads((checkpoint.parent / "offload_trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    spans = {lane: sum(e["ph"] == "X" and e["tid"] == tid for e in events) for lane, tid in lanes.items()}
    assert spans["shadow pool"] > 20
    assert spans["device"] >= 23


def test_a_stalled_pool_is_an_error_that_names_layer_and_step(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(checkpoint, monkeypatch, mode="fixed", slots=-1, stream_tokens=-1)
    assert runner.engine.offload is not None
    runner.engine.offload.pool.stop()
    with pytest.raises(UserError, match=r"shadow experts: layer 0, step 1: the shadow pool was stopped"):
        runner.model_generate(PROMPTS)


@pytest.mark.parametrize(
    ("offload", "complaint"),
    [
        ({"mode": "none", "slots": 3}, "offload_config.slots: has no meaning with offload_config.mode: none"),
        ({"mode": "elastic", "slots": 3}, "offload_config.slots: 3 needs mode: fixed, not elastic"),
        ({"mode": "elastic", "slots": -1}, "offload_config.slots: -1 needs mode: fixed, not elastic"),
        ({"mode": "elastic", "stream_tokens": 3}, "stream_tokens: 3 must be above data_config.batch_size: 3"),
        ({"mode": "elastic", "stream_tokens": -2}, "offload_config.stream_tokens: -2"),
        ({"mode": "elastic", "arena_mb": 3 / 1024}, "have no room for one sequence of 18 pages"),
        ({"mode": "elastic", "start_layer": 2}, "no layers with experts of one size"),
    ],
)
def test_refusals(checkpoint: Path, offload: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=complaint):
        runner_of(checkpoint, monkeypatch, **offload)


def test_a_copy_that_is_not_made_is_an_error_and_nobody_is_published(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(checkpoint, monkeypatch, mode="fixed", slots=5, max_swaps=-1)
    runner.model_generate(PROMPTS[:1])
    offload = runner.engine.offload
    assert offload
    assert isinstance(offload.device, CpuDevice)
    place = next(iter(offload.slots))
    offload.evict(place)
    offload.device.copier.stop()
    with pytest.raises(UserError, match="the copier was stopped"):
        offload._fetch(place)
    assert not offload.published[place]
    assert not offload.layers[place[0]].table[place[1]]

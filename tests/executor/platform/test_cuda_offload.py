"""Shadow experts of platform cuda, with the GPU's side on CPU tensors: the tokens of the same ops with all experts on
the device, wherever experts are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.gpu_nodes import GpuOfTensors, without_gpu
from tests.families import ROWS
from tests.tiny import make_runner, tiny_case
from umbra.commands.logits import collect_logits
from umbra.cpu_offload import expert_ring
from umbra.cpu_offload.prefill_split import Bools, Pairs, PrefillSplit
from umbra.executor.model_runner import ModelRunner
from umbra.tools.gpu_check.stages import shares

PROMPTS = [("a", [5, 17, 3]), ("b", [7]), ("c", list(range(30, 53))), ("d", [11, 12]), ("e", [90, 3, 3, 8])]
MODES: list[dict[str, Any]] = [
    {"mode": "fixed", "slots": -1},
    {"mode": "fixed", "slots": 8, "max_swaps": 4, "interval": 1},
    {"mode": "resident"},
    {"mode": "elastic", "arena_mb": 0.25, "interval": 2, "max_swaps": 8},
    {"mode": "fixed", "slots": 8, "stream_tokens": 4},
    {"mode": "elastic", "arena_mb": 0.25, "interval": 2, "max_swaps": 8, "stream_tokens": 4},
]


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "qwen3_next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    row = ROWS[request.param]
    folder = tmp_path_factory.mktemp("cuda_offload") / row.name
    row.save(folder, eos_token_id=None, **row.offload or {})
    return folder


def runner_of(model: Path, folder: Path, tokens: int = 16, **offload: Any) -> ModelRunner:
    offload = ({"measure_s": 0.01} if offload["mode"] != "none" else {}) | offload
    data = {"batch_size": 3, "max_new_tokens": tokens}
    sections = {"model_name": model.name, "data_config": data, "offload_config": offload}
    return make_runner(tiny_case(folder, model, exe_mode="graph", platform="cuda", **sections), folder, GpuOfTensors)


def by_halves(pairs: Pairs, here: Bools, *_: Any) -> PrefillSplit:
    """Copies every second missing expert, whatever was measured."""
    missing = np.flatnonzero((pairs > 0) & ~here).tolist()
    return PrefillSplit(missing[::2], missing[1::2], 1.0)


def test_tokens_are_those_without(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = without_gpu(monkeypatch)
    monkeypatch.setattr(expert_ring, "split", by_halves)
    plain = runner_of(model, tmp_path, mode="none")
    wanted = [list(s.generated) for s in plain.model_generate(PROMPTS)]
    logits = collect_logits(plain, [prompt for _, prompt in PROMPTS[:3]], 4)
    assert not opened
    for mode in MODES:
        runner = runner_of(model, tmp_path, **mode)
        assert [list(s.generated) for s in runner.model_generate(PROMPTS)] == wanted, mode
        ours = collect_logits(runner, [prompt for _, prompt in PROMPTS[:3]], 4)
        assert all(np.allclose(ours[name], logits[name], rtol=0, atol=2e-4) for name in logits), mode
        shadows = runner.engine.shadows
        assert shadows is not None
        if mode["mode"] == "fixed" and "stream_tokens" in mode:
            assert shadows.device.copies.streamed > 0  # type: ignore[attr-defined]
        experts, resident = shadows.published.size, int(shadows.published.sum())
        if mode["mode"] == "resident":
            assert resident == experts
        elif mode["mode"] == "fixed":
            assert resident <= max(0, mode["slots"])
    assert len(opened) == len(MODES)
    assert all(nodes.jobs > 0 for nodes in opened)


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_the_stage_that_times_shares(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases pass, one after the other, as on a card; their times mean nothing here."""
    without_gpu(monkeypatch)
    runner = runner_of(model, tmp_path, 5, mode="fixed", max_swaps=-1)
    monkeypatch.setattr(shares, "opened", lambda: runner)
    for name, value in (("BATCHES", (1, 3)), ("PREFILLS", (30,)), ("SHARES", (100, 50, 25, 0)), ("WARM", 2)):
        monkeypatch.setattr(shares, name, value)
    shares.times_of.cache_clear()
    hits = {check.name: check.run().measured.get("hits %", -1) for check in shares.checks()}
    assert hits["decode, 100% resident, batch 1"] == 100
    assert 0 < hits["decode, 50% resident, batch 3"] < 100
    assert hits["decode, 0% resident, batch 3"] == 0

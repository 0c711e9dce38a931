"""Experts on the CPU beside the Ascend model code, which runs in plain CPU code under the real schemas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor import model_runner, offloading
from executor.model_runner import ModelRunner
from executor.runners import make_runner
from tests.ascend.on_cpu import ascend_on_cpu
from tests.tiny import ONE_RANK, save_tiny, tiny_case
from tools.logits import collect_logits

IDS = [[5, 17, 3, 88, 21, 9, 40], [7], list(range(30, 53))]
SIZES = dict(hidden_size=128, head_dim=64, num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=64)
ELASTIC = {"mode": "elastic", "arena_mb": 400}


def runner_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, routing: str = "fusion_v2", **sections: Any
) -> ModelRunner:
    """`arena_mb` counts kilobytes here: the model is tiny."""
    monkeypatch.setattr(offloading, "MB", 1 << 10)
    monkeypatch.setattr(model_runner, "load_platform", lambda name: ascend_on_cpu(routing))
    case = tiny_case(
        folder, folder / "model", cache_config={"page_size": 16}, exe_mode="eager",
        data_config={"input_max_len": 32, "max_new_tokens": 8, "batch_size": 4}, **sections,
    )  # fmt: skip
    runner = make_runner(case, folder, ONE_RANK)
    runner.setup()
    return runner


@pytest.mark.parametrize("offload", [ELASTIC, {"mode": "fixed"}, {"mode": "fixed", "slots": 5}, {"mode": "resident"}])
def test_logits_are_those_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: dict[str, Any]) -> None:
    save_tiny(tmp_path / "model", **SIZES)
    expected = collect_logits(runner_of(tmp_path, monkeypatch), IDS, steps=5)
    runner = runner_of(tmp_path, monkeypatch, offload_config=offload)
    ours = collect_logits(runner, IDS, steps=5)
    for name, array in expected.items():
        np.testing.assert_allclose(ours[name], array, atol=1e-4, err_msg=name)

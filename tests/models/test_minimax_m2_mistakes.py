"""Each known way to compute MiniMax-M2 wrongly changes the logits of the tiny model by far more than the tests of
equality allow, so that these would fail. Mistakes of splits: tests/executor/test_parallel.py."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.minimax_m2_mistakes import MISTAKES, gate_in_bfloat16
from tests.models.test_minimax_m2 import PROMPTS, edit_tensors
from tests.tiny import make_runner, oracle_logits, save_tiny_m2, tiny_case
from umbra.commands.logits import prefill_logits

ALLOWED = 1e-4  # by the tests of equality


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes") / "model"
    save_tiny_m2(folder)
    return folder


def logits_of(folder: Path) -> list[np.ndarray]:
    runner = make_runner(tiny_case(folder.parent, folder, model_name="minimax_m2"), folder.parent)
    return [logits.numpy() for logits in prefill_logits(runner, PROMPTS)]


def difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def right(model: Path) -> list[np.ndarray]:
    return logits_of(model)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_changes_the_logits(
    model: Path, right: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    MISTAKES[mistake](monkeypatch)
    assert difference(logits_of(model), right) > 1000 * ALLOWED


def test_bfloat16_gate_changes_the_logits_near_ties(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts come in pairs whose scores differ by less than bfloat16 tells apart, but by enough for float32."""

    def near_ties(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if "gate" in name:
                tensor[8:] = tensor[:8] * (1 + 1e-3 * torch.linspace(-1, 1, 8)[:, None])
            elif "e_score" in name:
                tensor[8:] = tensor[:8]

    save_tiny_m2(tmp_path / "model")
    oracle = edit_tensors(tmp_path / "model", near_ties)
    right = [oracle_logits(oracle, prompt).numpy() for prompt in PROMPTS]
    assert difference(logits_of(tmp_path / "model"), right) < ALLOWED
    gate_in_bfloat16(monkeypatch)
    assert difference(logits_of(tmp_path / "model"), right) > 1000 * ALLOWED

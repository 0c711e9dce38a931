"""The settings that are chosen for a checkpoint without a case, and what must be there before a rank is started."""

import json
from pathlib import Path

import pytest

from executor.config.load import load_case, make_case
from executor.config.units import GB
from executor.run.defaults import SERVING, case_of_checkpoint
from tests.command import umbra
from umbra.files import ROOT

DEMO = ROOT / "checkpoints/austen_moe"


def folder(path: Path, positions: int, **more: int) -> Path:
    path.mkdir(exist_ok=True)
    config = json.loads((DEMO / "config.json").read_text()) | {"max_position_embeddings": positions} | more
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("positions", "settings", "prompt", "new"),
    [
        (2, {}, 1, 1),
        (601, {}, 301, 300),
        (5000, {}, 3976, 1024),
        (90_000, {}, 31_744, 1024),
        (5000, {"max_model_len": 100}, 50, 50),
        (5000, {"input_max_len": 70, "max_new_tokens": 8}, 70, 8),
    ],
)
def test_a_context_that_the_model_has(
    tmp_path: Path, positions: int, settings: dict[str, object], prompt: int, new: int
) -> None:
    case, _ = case_of_checkpoint(folder(tmp_path / "model", positions), SERVING, (), settings)
    assert (case.data_config.input_max_len, case.data_config.max_new_tokens) == (prompt, new)
    assert (case.exe_mode, case.data_config.batch_size) == ("graph", 8)


@pytest.mark.parametrize(
    ("gigabytes", "method", "sequences", "context"),
    [(100, "auto", 8, 32_768), (3, "auto", 8, 16_384), (1.7, "auto", 4, 8192), (1.2, "q8", 2, 8192),
     (0.9, "q4", 1, 4096), (0.01, "q4", 1, 256)],
)  # fmt: skip
def test_settings_follow_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gigabytes: float, method: str, sequences: int, context: int
) -> None:
    """The model has 0.5 GB of weights and 8 kB of KV cache a token."""
    model = folder(tmp_path / "model", 40_960, num_hidden_layers=16, num_experts=64, moe_intermediate_size=640)
    monkeypatch.setattr("executor.run.defaults.free_memory", lambda: int(gigabytes * GB))
    case, keys = case_of_checkpoint(model, SERVING)
    data = case.data_config
    assert (case.quantization.method, data.batch_size, case.max_sequence_length) == (method, sequences, context)
    assert make_case(keys, case.name, "").data_config == data  # what `umbra init` writes


def test_init_writes_a_case_that_serves(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    assert umbra("init", str(DEMO), "--out", str(out), "--max-num-seqs", "3").returncode == 0
    assert load_case(str(out)).data_config.batch_size == 3
    again = umbra("init", str(DEMO), "--out", str(out))
    assert (again.returncode, "is there already" in again.stderr) == (2, True)

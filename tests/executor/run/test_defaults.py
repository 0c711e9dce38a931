"""The settings that are chosen for a checkpoint without a case, and what must be there before a rank is started."""

import json
from pathlib import Path

import pytest

from executor.run.defaults import case_of_checkpoint
from umbra.files import ROOT

DEMO = ROOT / "checkpoints/austen_moe"


def folder(path: Path, positions: int) -> Path:
    path.mkdir(exist_ok=True)
    config = json.loads((DEMO / "config.json").read_text()) | {"max_position_embeddings": positions}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("positions", "prompt", "new"),
    [(2, 1, 1), (2047, 1024, 1023), (5000, 3976, 1024), (9000, 4096, 1024)],
)
def test_half_of_the_positions_are_for_answers(tmp_path: Path, positions: int, prompt: int, new: int) -> None:
    data = case_of_checkpoint(folder(tmp_path / "model", positions), {}).data_config
    assert (data.input_max_len, data.max_new_tokens) == (prompt, new)


@pytest.mark.parametrize(("values", "method"), [(8, "auto"), (1 << 40, "q4")])
def test_weights_that_do_not_fit_into_memory_are_quantised(tmp_path: Path, values: int, method: str) -> None:
    model = folder(tmp_path / "model", 600)
    header = json.dumps({"x": {"dtype": "BF16", "shape": [values], "data_offsets": [0, 2 * values]}}).encode()
    with open(model / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * values)  # without blocks on the disk
    assert case_of_checkpoint(model, {}).quantization.method == method

"""Families with gated DeltaNet layers, compared with transformers, and with themselves in other steps."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.tiny import make_runner, oracle_logits, save_pictured, save_tiny_of, tiny_case
from umbra.commands.logits import collect_logits

LENGTHS = 1, 2, 3, 4, 63, 64, 65, 130
IDS = [[(7 * i + 31 * length) % 319 + 1 for i in range(length)] for length in LENGTHS]
MODELS: dict[str, Callable[[Path], PreTrainedModel]] = {
    "qwen3_next": lambda folder: save_tiny_of(folder, "qwen3_next"),
    "qwen3_5_moe": lambda folder: save_pictured(folder, shared_expert_intermediate_size=48),
}


@pytest.mark.parametrize("family", MODELS)
def test_logits_do_not_depend_on_steps(tmp_path: Path, family: str) -> None:
    """Cuts are inside of the convolution's window and at lengths that other engines' chunks have."""

    def logits_in(chunk: int) -> dict[str, np.ndarray]:
        sizes = {"input_max_len": 130, "batch_size": len(IDS), "chunked_prefill_size": chunk}
        runner = make_runner(tiny_case(tmp_path, tmp_path / "model", model_name=family, data_config=sizes), tmp_path)
        return collect_logits(runner, IDS, 2)

    oracle, found = MODELS[family](tmp_path / "model"), logits_in(1024)
    for i in range(len(IDS)):
        expected = oracle_logits(oracle, found[f"ids_{i}"].tolist()).numpy()
        assert expected.std() > 0.5
        np.testing.assert_allclose(np.concatenate([found[f"prefill_{i}"], found[f"decode_{i}"]]), expected, atol=1e-4)
    for chunk in (1, 2, 3, 5, 16, 64):
        for name, logits in logits_in(chunk).items():
            np.testing.assert_array_equal(logits, found[name])

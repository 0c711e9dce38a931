"""Umbra's MiniMax-M2 compared with that of transformers: the same logits for all configuration options."""

from pathlib import Path

import numpy as np
import pytest

from executor.job.logits import collect_logits
from tests.tiny import make_runner, oracle_logits, save_tiny_m2, tiny_case

PROMPTS = [[5, 17, 3, 88, 21, 9, 40], [7], list(range(130, 153))]


@pytest.mark.parametrize("rotary_dim", [16, 32, 8])
@pytest.mark.parametrize("official", [True, False])
def test_logits_equal_transformers(tmp_path: Path, official: bool, rotary_dim: int) -> None:
    """A packed prefill of three lengths, then decoding one by one, equals one full forward of each sequence."""
    oracle = save_tiny_m2(tmp_path / "model", official, rotary_dim=rotary_dim)
    case = tiny_case(tmp_path, tmp_path / "model", model_name="minimax_m2")
    arrays = collect_logits(make_runner(case, tmp_path), PROMPTS, steps=5)
    for i, prompt in enumerate(PROMPTS):
        ids = arrays[f"ids_{i}"].tolist()
        assert ids[: len(prompt)] == prompt
        ours = np.concatenate([arrays[f"prefill_{i}"], arrays[f"decode_{i}"]])
        expected = oracle_logits(oracle, ids).numpy()
        assert expected.std() > 0.5  # the comparison has something to compare
        np.testing.assert_allclose(ours, expected, atol=1e-4)

"""Half precision stays close to transformers' floats, and so do the demo models, whose weights are trained."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoTokenizer,
    MiniMaxM2ForCausalLM,
    PreTrainedModel,
    Qwen3_5MoeForCausalLM,
    Qwen3MoeForCausalLM,
)

from tests.tiny import make_runner, oracle_logits, save_tiny, tiny_case
from umbra.commands.logits import collect_logits, sized_for
from umbra.executor.config.load import load_case, model_folder

PROMPTS = [[5, 17, 3, 88, 21, 9, 40], [7], list(range(30, 53))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(tmp_path: Path, dtype: str) -> None:
    oracle = save_tiny(tmp_path / "model", initializer_range=0.1)
    case = tiny_case(tmp_path, tmp_path / "model", model_config={"dtype": dtype})
    arrays = collect_logits(make_runner(case, tmp_path), PROMPTS, steps=0)
    for i, prompt in enumerate(PROMPTS):
        expected = oracle_logits(oracle, prompt).numpy()
        error = np.abs(arrays[f"prefill_{i}"] - expected).max()
        assert error < {"bfloat16": 0.06, "float16": 0.008}[dtype] * np.abs(expected).max()


@pytest.mark.parametrize(
    ("case_name", "oracle"),
    [("demo", Qwen3MoeForCausalLM), ("demo_minimax", MiniMaxM2ForCausalLM), ("demo_hybrid", Qwen3_5MoeForCausalLM)],
)
def test_demo_models_equal_transformers(tmp_path: Path, case_name: str, oracle: type[PreTrainedModel]) -> None:
    case = load_case(case_name, ["dtype=float32", "method=none"])
    folder = model_folder(case)
    theirs = oracle.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(p).input_ids for p in case.data_config.prompts]
    arrays = collect_logits(make_runner(sized_for(case, ids, 12), tmp_path), ids, steps=12)
    for i in range(len(ids)):
        expected = oracle_logits(theirs, arrays[f"ids_{i}"].tolist()).numpy()
        ours = np.concatenate([arrays[f"prefill_{i}"], arrays[f"decode_{i}"]])
        np.testing.assert_allclose(ours, expected, atol=1e-4)

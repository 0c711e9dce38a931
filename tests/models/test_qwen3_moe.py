"""Umbra's Qwen3-MoE compared with that of transformers: the same logits for all configuration options."""

import itertools
import json
from pathlib import Path
from typing import Any

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
from umbra.base.errors import UserError
from umbra.commands.logits import collect_logits, sized_for
from umbra.executor.config.load import load_case, model_folder

LAYERS: dict[str, dict[str, Any]] = {
    "sparse": {},
    "dense_first": {"mlp_only_layers": [0]},
    "every_second": {"decoder_sparse_step": 2},
}
ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"yarn": {"factor": 4.0, "original_max_position_embeddings": 16}},
    "yarn_detailed": {
        "yarn": {
            "factor": 2.0,
            "original_max_position_embeddings": 24,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.3,
            "truncate": False,
        }
    },
}
GRID = list(itertools.product((False, True), (False, True), (False, True), LAYERS, ROPES))
PROMPTS = [[5, 17, 3, 88, 21, 9, 40], [7], list(range(30, 53))]


@pytest.mark.parametrize(("bias", "tied", "renormalise", "layers", "rope"), GRID)
def test_logits_equal_transformers(
    tmp_path: Path, bias: bool, tied: bool, renormalise: bool, layers: str, rope: str
) -> None:
    """A packed prefill of three lengths, then decoding one by one, equals one full forward of each sequence."""
    options = dict(attention_bias=bias, tie_word_embeddings=tied, norm_topk_prob=renormalise)
    oracle = save_tiny(tmp_path / "model", bias != tied, **options, **LAYERS[layers], **ROPES[rope])
    case = tiny_case(tmp_path, tmp_path / "model")
    arrays = collect_logits(make_runner(case, tmp_path), PROMPTS, steps=5)
    for i, prompt in enumerate(PROMPTS):
        ids = arrays[f"ids_{i}"].tolist()
        assert ids[: len(prompt)] == prompt
        ours = np.concatenate([arrays[f"prefill_{i}"], arrays[f"decode_{i}"]])
        expected = oracle_logits(oracle, ids).numpy()
        assert expected.std() > 0.5  # the comparison has something to compare
        np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_every_number_of_kv_heads(tmp_path: Path, kv_heads: int) -> None:
    oracle = save_tiny(tmp_path / "model", num_key_value_heads=kv_heads)
    arrays = collect_logits(make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path), PROMPTS, steps=0)
    for i, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(arrays[f"prefill_{i}"], oracle_logits(oracle, prompt).numpy(), atol=1e-4)


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


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not implemented"),
        ({"model_type": "llama"}, "model_type: 'llama' does not match the case's model_name: 'qwen3_moe'"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not implemented"),
        ({"use_sliding_window": True}, "use_sliding_window: True is not implemented"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads: 8"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than num_experts: 8"),
        ({"hidden_size": 1 << 40}, "hidden_size: 1099511627776 must be an integer from 1 to"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: -1 must be a positive number"),
        ({"eos_token_id": [0, "end"]}, "eos_token_id"),
        ({"mlp_only_layers": "none"}, "mlp_only_layers: 'none' must be a list"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    save_tiny(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=r"config\.json") as raised:
        make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path)
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)

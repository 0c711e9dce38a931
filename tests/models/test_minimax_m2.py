"""Umbra's MiniMax-M2 compared with that of transformers: the same logits for all configuration options; and what known
mistakes would do to them (of splits: tests/executor/test_parallel.py)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MiniMaxM2ForCausalLM

from tests.models.minimax_m2_mistakes import MISTAKES, gate_in_bfloat16
from tests.tiny import OFFICIAL_M2, TINY_M2, make_runner, oracle_logits, save_tiny_m2, tiny_case
from umbra.base.errors import UserError
from umbra.commands.logits import collect_logits, prefill_logits

PROMPTS = [[5, 17, 3, 88, 21, 9, 40], [7], list(range(130, 153))]
STEPS = 5
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "as_transformers_saves_it": {"official": False},
    "whole_heads_rotate": {"rotary_dim": 32},
    "a_quarter_rotates": {"rotary_dim": 8},
    "16_heads_on_2": {"num_attention_heads": 16, "num_key_value_heads": 2},
    "as_many_kv_heads": {"num_key_value_heads": 12},
    "official_heads": {"head_dim": 128, "rotary_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "sizes_that_no_vector_divides": {
        "hidden_size": 52,
        "intermediate_size": 20,
        "head_dim": 20,
        "rotary_dim": 6,
        "num_local_experts": 13,
        "num_experts_per_tok": 3,
        "vocab_size": 199,
        "num_hidden_layers": 2,
        "initializer_range": 0.2,
    },
}
RUNS: dict[str, dict[str, Any]] = {
    "graph": {"exe_mode": "graph"},
    "pages_of_2": {"cache_config": {"page_size": 2}},
    "chunks": {"exe_mode": "graph", "data_config": {"chunked_prefill_size": 5}},
}


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> MiniMaxM2ForCausalLM:
    """Changes the tensors of the checkpoint in place; the oracle that then reads it."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return MiniMaxM2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {name: value for name, value in (json.loads(path.read_text()) | changes).items() if value is not None}
    path.write_text(json.dumps(config))


def logits_of(folder: Path, **sections: Any) -> dict[str, np.ndarray]:
    case = tiny_case(folder.parent, folder, model_name="minimax_m2", **sections)
    return collect_logits(make_runner(case, folder.parent), PROMPTS, STEPS)


def assert_equal(arrays: dict[str, np.ndarray], oracle: MiniMaxM2ForCausalLM) -> None:
    """A packed prefill of three lengths, then decoding one by one, equals one full forward of each sequence."""
    for i, prompt in enumerate(PROMPTS):
        ids = arrays[f"ids_{i}"].tolist()
        assert ids[: len(prompt)] == prompt
        ours = np.concatenate([arrays[f"prefill_{i}"], arrays[f"decode_{i}"]])
        expected = oracle_logits(oracle, ids).numpy()
        assert expected.std() > 0.5  # the comparison has something to compare
        np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS)
def test_logits_equal_transformers(tmp_path: Path, config: str) -> None:
    oracle = save_tiny_m2(tmp_path / "model", **CONFIGS[config])
    assert_equal(logits_of(tmp_path / "model"), oracle)


@pytest.mark.parametrize("run", RUNS)
def test_every_way_to_run_equals_transformers(tmp_path: Path, run: str) -> None:
    oracle = save_tiny_m2(tmp_path / "model")
    assert_equal(logits_of(tmp_path / "model", **RUNS[run]), oracle)


def test_rope_keys_of_transformers_alone(tmp_path: Path) -> None:
    """Files saved by transformers 5 may lack `rotary_dim`."""
    oracle = save_tiny_m2(tmp_path / "model", False)
    edit_config(tmp_path / "model", rotary_dim=None)
    assert_equal(logits_of(tmp_path / "model"), oracle)


def test_without_a_selection_bias(tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if "e_score_correction_bias" in n]:
            del tensors[name]

    save_tiny_m2(tmp_path / "model")
    oracle = edit_tensors(tmp_path / "model", drop)
    with pytest.raises(UserError, match=r"3 tensors missing: .*e_score_correction_bias"):
        logits_of(tmp_path / "model")
    edit_config(tmp_path / "model", use_routing_bias=False)
    assert not any(buffer.any() for name, buffer in oracle.named_buffers() if "e_score_correction_bias" in name)
    assert_equal(logits_of(tmp_path / "model"), oracle)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_matrices_alone(tmp_path: Path, dtype: str) -> None:
    """The router, its bias and the norms stay as they are, so that a rounding changes no choice of experts. Kernels
    that leave activations as they are."""

    def rounded(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dim() == 2 and "gate" not in name:
                tensor.copy_(tensor.to(getattr(torch, dtype)))

    save_tiny_m2(tmp_path / "model")
    sections = {"model_config": {"dtype": dtype}, "cache_config": {"kv_dtype": "float32"}}
    arrays = logits_of(tmp_path / "model", **sections, instruction_set="generic")
    assert_equal(arrays, edit_tensors(tmp_path / "model", rounded))


def test_layers_that_predict_further_tokens_are_ignored(tmp_path: Path) -> None:
    """The config of every release tells of three, of which no release has weights; other names are refused."""
    oracle = save_tiny_m2(tmp_path / "model")
    layers, modules = TINY_M2["num_hidden_layers"], OFFICIAL_M2["num_mtp_modules"]
    edit_tensors(
        tmp_path / "model", lambda t: t.update({f"model.layers.{layers + modules - 1}.enorm.weight": torch.ones(4)})
    )
    assert_equal(logits_of(tmp_path / "model"), oracle)
    edit_tensors(
        tmp_path / "model", lambda t: t.update({f"model.layers.{layers + modules}.enorm.weight": torch.ones(4)})
    )
    with pytest.raises(UserError, match=r"1 tensors that the model does not know: model\.layers\.6\.enorm\.weight"):
        logits_of(tmp_path / "model")


def prefilled(folder: Path) -> list[np.ndarray]:
    runner = make_runner(tiny_case(folder.parent, folder, model_name="minimax_m2"), folder.parent)
    return [logits.numpy() for logits in prefill_logits(runner, PROMPTS)]


def largest(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_known_mistake_changes_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    """By far more than the tests of equality allow, so that these would fail."""
    save_tiny_m2(tmp_path / "model")
    right = prefilled(tmp_path / "model")
    MISTAKES[mistake](monkeypatch)
    assert largest(prefilled(tmp_path / "model"), right) > 0.1


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
    assert largest(prefilled(tmp_path / "model"), right) < 1e-4
    gate_in_bfloat16(monkeypatch)
    assert largest(prefilled(tmp_path / "model"), right) > 0.1

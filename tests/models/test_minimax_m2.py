"""MiniMax-M2 alone has two generations of keys in config.json, a selection bias that may be absent, and experts whose
scores nearly tie (`tests/families` lists the scenarios that it shares with other families)."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MiniMaxM2ForCausalLM

from tests.models.minimax_m2_mistakes import gate_in_bfloat16
from tests.tiny import make_runner, oracle_logits, save_tiny_m2, tiny_case
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.commands.inspect_checkpoint import model_type
from umbra.commands.logits import collect_logits, prefill_logits
from umbra.models.minimax_m2.config import MiniMaxM2Config
from umbra.models.registry import family_of, read_config

PROMPTS = [[5, 17, 3, 88, 21, 9, 40], [7], list(range(130, 153))]
STEPS = 5


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
    edit_tensors(tmp_path / "model", lambda t: t.update({"model.layers.5.enorm.weight": torch.ones(4)}))
    assert_equal(logits_of(tmp_path / "model"), oracle)
    edit_tensors(tmp_path / "model", lambda t: t.update({"model.layers.6.enorm.weight": torch.ones(4)}))
    with pytest.raises(UserError, match=r"1 tensors that the model does not know: model\.layers\.6\.enorm\.weight"):
        logits_of(tmp_path / "model")


def prefilled(folder: Path) -> list[np.ndarray]:
    runner = make_runner(tiny_case(folder.parent, folder, model_name="minimax_m2"), folder.parent)
    return [logits.numpy() for logits in prefill_logits(runner, PROMPTS)]


def largest(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


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


OFFICIAL: dict[str, Any] = json.loads((ROOT / "checkpoints/MiniMax-M2.5/config.json").read_text())
# Dead keys of the first upload.
FIRST_FILE: dict[str, Any] = dict(mlp_intermediate_size=8192, shared_moe_mode="sigmoid", output_router_logits=False)
FIRST_FILE |= dict.fromkeys((f"layernorm_{name}_beta" for name in ("full_attention", "linear_attention", "mlp")), 1.0)
FIRST_FILE |= dict(attention_dropout=0.0, router_jitter_noise=0.0, router_aux_loss_coef=0.001, initializer_range=0.02)
FIRST_FILE |= dict.fromkeys(("sliding_window", "rope_scaling", "bos_token_id", "eos_token_id"))
TYPE = {"model_type": "minimax_m2"}
NESTED = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}


def parse(folder: Path, config: dict[str, Any]) -> MiniMaxM2Config:
    (folder / "config.json").write_text(json.dumps(config))
    parsed = read_config(folder, "minimax_m2")
    assert isinstance(parsed, MiniMaxM2Config)
    return parsed


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in OFFICIAL.items() if key not in keys}


@pytest.mark.parametrize(
    "config",
    [
        OFFICIAL | FIRST_FILE,
        TYPE | {"rotary_dim": 64},  # absent keys have the official values
        dict.fromkeys(OFFICIAL) | TYPE | {"rotary_dim": 64},  # and so have those that are null
        OFFICIAL | {"model_type": "minimax"},
        OFFICIAL | {"bos_token_id": 1, "eos_token_id": 2},  # written by old remote code
        OFFICIAL | {"rope_scaling": {"type": "default"}},
        without("rotary_dim") | {"partial_rotary_factor": 0.5},
        without("rotary_dim", "rope_theta") | {"rope_parameters": NESTED},
        without("rotary_dim") | {"rope_parameters": {"rope_type": "default"}, "partial_rotary_factor": 0.5},
        without("num_local_experts") | {"num_experts": 256},
    ],
)
def test_official_values_in_every_spelling(tmp_path: Path, config: dict[str, Any]) -> None:
    assert parse(tmp_path, config) == parse(tmp_path, OFFICIAL)
    assert model_type(tmp_path) == "minimax_m2"


def test_without_rotary_keys_all_columns_rotate(tmp_path: Path) -> None:
    assert parse(tmp_path, without("rotary_dim")).rope.dim == 128


@pytest.mark.parametrize("config", [{}, {"architectures": ["MiniMaxM2ForCausalLM"]}, {"model_type": "MiniMax_M2"}])
def test_the_family_is_named_by_model_type(config: dict[str, Any]) -> None:
    assert family_of(config) is None


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ((1, 1, 1, 1, 1), ""),
        ((48, 48, 1, 64, 128), ""),
        ((32, 32, 1, 32, 32), "attn_tp_size: 32 does not divide num_attention_heads: 48"),
        ((12, 12, 1, 4, 4), "attn_tp_size: 12 and num_key_value_heads: 8: one must divide the other"),
        ((8, 5, 1, 8, 8), "moe_tp_size: 5 does not divide intermediate_size: 1536"),
        ((8, 8, 1, 256, 8), "embed_tp_size: 256 does not divide vocab_size: 200064"),
    ],
)
def test_splits(tmp_path: Path, sizes: tuple[int, int, int, int, int], complaint: str) -> None:
    with pytest.raises(UserError) if complaint else nullcontext() as raised:
        parse(tmp_path, OFFICIAL).check_parallel(*sizes)
    assert not raised or str(raised.value) == f"parallel_config: {complaint}"

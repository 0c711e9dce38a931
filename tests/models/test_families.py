"""Families made of the shared layers alone, compared with transformers: the same logits for all configuration options;
what known mistakes would do to them; and what is refused (of splits: tests/executor/test_parallel.py)."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.family_mistakes import MISTAKES, Mistake
from tests.models.hybrid_mistakes import HYBRID_MISTAKES
from tests.models.latent_mistakes import LATENT_MISTAKES
from tests.quantised import is_quantised, quantise_tiny
from tests.tiny import EXPANDED, TINY_OF, make_runner, oracle_logits, rounding_bound, save_tiny_of, tiny_case
from tests.variants import covering, thorough_after
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.commands.inspect_checkpoint import inspect_checkpoint
from umbra.commands.logits import collect_logits
from umbra.executor.config.load import load_model_config
from umbra.models.build import Build, Formats
from umbra.models.layers.base import layers_of
from umbra.models.registry import family_in, model_class, read_config
from umbra.models.rope import RopeConfig, YarnConfig
from umbra.ops import load_ops
from umbra.ops.formats import FORMATS
from umbra.ops.parallel.groups import Parallel

OSS_YARN = YarnConfig(32.0, 4096, 32.0, 1.0, attention_factor=0.1 * math.log(32) + 1, truncate=False)
LITE_YARN = YarnConfig(40.0, 4096, 32.0, 1.0, attention_factor=1.0, truncate=True, mscale_all_dim=0.707)
V3_YARN = YarnConfig(40.0, 4096, 32.0, 1.0, attention_factor=1.0, truncate=True, mscale_all_dim=1.0)
K2_YARN = YarnConfig(32.0, 4096, 1.0, 1.0, attention_factor=1.0, truncate=True, mscale_all_dim=1.0)
PROMPTS = [[5, 17, 3, 88, 21, 9, 40], [7], list(range(30, 53))]
CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2_moe": {
        "tiny": {},
        "renormalised": {"norm_topk_prob": True},
        "dense_first": {"mlp_only_layers": [0], "qkv_bias": False, "tie_word_embeddings": True},
        "every_second": {"decoder_sparse_step": 2, "num_key_value_heads": 8},
        "sizes_that_no_vector_divides": {
            "hidden_size": 52,
            "head_dim": 20,
            "num_experts": 13,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 36,
            "vocab_size": 199,
            "initializer_range": 0.2,
        },
    },
    "qwen3_next": {
        "tiny": {},
        "three_values_for_a_key": {
            "linear_num_value_heads": 6,
            "linear_value_head_dim": 32,
            "num_key_value_heads": 1,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": False,
        },
    },
    "qwen3_5_moe": {
        "tiny": {"linear_num_value_heads": 6, "linear_key_head_dim": 32},
        "full_first": {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
    },
    "glm4_moe": {
        "tiny": {},
        "as_air": {"use_qk_norm": False, "routed_scaling_factor": 1.0, "n_shared_experts": 1},
        "not_renormalised": {"norm_topk_prob": False, "attention_bias": False, "first_k_dense_replace": 0},
        "three_dense_layers": {"num_hidden_layers": 4, "first_k_dense_replace": 3, "tie_word_embeddings": True},
        "a_quarter_rotates": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}, "head_dim": 32},
    },
    "deepseek_v2": {
        "tiny": {},
        "as_lite": {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "initializer_range": 0.15},
        "expanded": {"initializer_range": 0.2} | EXPANDED,  # for 23 tokens, not for 7
        "no_yarn": {"rope_parameters": {"rope_theta": 1e4}, "v_head_dim": 40, "first_k_dense_replace": 0},
    },
    "deepseek_v3": {
        "tiny": {},
        "as_moonlight": {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {"rope_theta": 5e4},
            "initializer_range": 0.2,
        },
        "not_renormalised": {"norm_topk_prob": False, "num_attention_heads": 6, "num_key_value_heads": 6},
    },
    "glm4_moe_lite": {
        "tiny": {},
        "dense_second": {"mlp_layer_types": ["sparse", "dense"], "v_head_dim": 40, "qk_nope_head_dim": 40},
    },
    "gpt_oss": {
        "tiny": {},
        "a_window_of_5": {"sliding_window": 5, "num_key_value_heads": 8, "initializer_range": 0.2},
        "full_first": {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
    },
}
RUNS: dict[str, dict[str, Any]] = {
    "graph": {"exe_mode": "graph"},
    "graph_in_chunks": {"exe_mode": "graph", "data_config": {"chunked_prefill_size": 5}},
    "pages_of_2": {"cache_config": {"page_size": 2}},
}
WAYS: list[tuple[str, str, dict[str, Any]]] = [
    (family, config, {}) for family, configs in CONFIGS.items() for config in configs
]
OTHER_RUNS = covering(list(CONFIGS), ["tiny"], list(RUNS.values()))


def logits_of(folder: Path, family: str, steps: int = 5, **sections: Any) -> dict[str, np.ndarray]:
    case = tiny_case(folder.parent, folder, model_name=family, **sections)
    return collect_logits(make_runner(case, folder.parent), PROMPTS, steps)


def largest_error(arrays: dict[str, np.ndarray], oracle: PreTrainedModel) -> float:
    """Returns the largest difference between a packed prefill of three lengths with decoding behind it, and one full
    forward of each sequence."""
    errors = []
    for i, prompt in enumerate(PROMPTS):
        ids = arrays[f"ids_{i}"].tolist()
        assert ids[: len(prompt)] == prompt
        expected = oracle_logits(oracle, ids).numpy()
        assert expected.std() > 0.5  # the comparison has something to compare
        errors.append(np.abs(np.concatenate([arrays[f"prefill_{i}"], arrays[f"decode_{i}"]]) - expected).max())
    return float(max(errors))


@pytest.mark.parametrize(("family", "config", "sections"), [*WAYS, *OTHER_RUNS])
def test_logits_equal_transformers(tmp_path: Path, family: str, config: str, sections: dict[str, Any]) -> None:
    oracle = save_tiny_of(tmp_path / "model", family, **CONFIGS[family][config])
    arrays = logits_of(tmp_path / "model", family, **sections)
    assert largest_error(arrays, oracle) < rounding_bound(oracle, PROMPTS)


@pytest.mark.parametrize("family", TINY_OF)
@pytest.mark.parametrize(("method", "most"), [("q8", 0.1), ("q4", 0.4)])
def test_quantised_logits_stay_close(tmp_path: Path, family: str, method: str, most: float) -> None:
    """Also those of the shared expert; gates and routers stay floats."""
    widths = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32)
    oracle = save_tiny_of(tmp_path / "model", family, **widths, initializer_range=0.1)
    sections = {"quantization": {"method": method, "group_size": 32, "keep_packed": False}}
    arrays = logits_of(tmp_path / "model", family, steps=0, **sections)
    expected = np.concatenate([oracle_logits(oracle, prompt).numpy() for prompt in PROMPTS])
    found = np.concatenate([arrays[f"prefill_{i}"] for i in range(len(PROMPTS))])
    assert np.abs(found - expected).mean() < most * np.abs(expected).mean()


@pytest.mark.parametrize("format", ["fp8", "awq", "gptq"])
def test_heads_matrices_are_dequantised(tmp_path: Path, format: str) -> None:
    """Also where blocks of a scale have rows of several heads, as of GLM-4.7-Flash, the last are smaller, and rows are
    kept in another order. AutoAWQ leaves one module of DeepSeek's in floats."""
    widths = dict(hidden_size=256, intermediate_size=160, moe_intermediate_size=128, kv_lora_rank=64, v_head_dim=32)
    save_tiny_of(tmp_path / "model", "deepseek_v3", **widths, qk_nope_head_dim=40, initializer_range=0.1)
    left, path = "kv_a_proj_with_mqa" if format == "awq" else "none", tmp_path / "quantised"
    more: dict[str, Any] = {"modules_to_not_convert": ["mlp.gate", left]} if format == "awq" else {}
    chosen = lambda name: is_quantised(name) and left not in name  # noqa: E731
    floats = quantise_tiny(tmp_path / "model", path, format, quantised=chosen, **more)
    theirs = logits_of(floats, "deepseek_v3", 0)
    for method, most in (("none", 1e-5), ("auto", 0.1)):  # products with what is kept have activations of 8 bits
        ours = logits_of(path, "deepseek_v3", 0, quantization={"method": method, "keep_packed": False})
        for name, expected in theirs.items():
            assert np.abs(ours[name] - expected).sum() <= most * np.abs(expected).sum()


@pytest.mark.parametrize("official", ["Kimi-K2-Thinking", "Kimi-K2.5"])
def test_kimis_experts_are_kept_in_4_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str], official: str) -> None:
    """The official config with a small model's sizes; K2.5 also sees pictures."""
    widths = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, initializer_range=0.1)
    save_tiny_of(tmp_path / "model", "deepseek_v3", **widths, n_group=1, topk_group=1)
    path, experts = tmp_path / "kimi", lambda name: ".experts." in name
    floats = quantise_tiny(tmp_path / "model", path, "pack-quantized", 32, 4, True, quantised=experts)
    tensors = load_file(path / "model.safetensors")
    config, sizes = (json.loads((at / "config.json").read_text()) for at in (ROOT / "checkpoints" / official, floats))
    text = config.get("text_config", config)
    text |= {key: value for key, value in sizes.items() if key in text and key not in ("model_type", "architectures")}
    text["rope_scaling"] = sizes["rope_parameters"]
    if text is not config:
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        tensors |= {"vision_tower.patch_embed.proj.weight": torch.ones(3), "mm_projector.proj.0.weight": torch.ones(3)}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    theirs = logits_of(floats, "deepseek_v3", 0)
    ours = logits_of(path, "deepseek_v3", 0, quantization={"method": "none"})
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, atol=1e-4)
    inspect_checkpoint(path, None, [], None)
    said = capsys.readouterr().out
    assert "24 modules in pack-quantized" in said
    assert "warning" not in said


@pytest.mark.parametrize(
    ("folder", "family", "billions", "rope", "width"),
    [
        ("Qwen2-57B-A14B-Instruct", "qwen2_moe", 57.4, RopeConfig(1e6, 128, None), 128),
        ("GLM-4.5-Air", "glm4_moe", 106.9, RopeConfig(1e6, 64, None), 128),
        ("GLM-4.6", "glm4_moe", 352.8, RopeConfig(1e6, 64, None), 128),
        ("Qwen3-Next-80B-A3B-Instruct", "qwen3_next", 79.67, RopeConfig(1e7, 64, None), 256),
        ("Qwen3.6-35B-A3B", "qwen3_5_moe", 34.66, RopeConfig(1e7, 64, None), 256),
        ("Qwen3.5-397B-A17B", "qwen3_5_moe", 396.35, RopeConfig(1e7, 64, None), 256),
        ("DeepSeek-V2-Lite", "deepseek_v2", 15.7, RopeConfig(1e4, 64, LITE_YARN), 64),
        ("Moonlight-16B-A3B", "deepseek_v3", 15.96, RopeConfig(5e4, 64, None), 64),
        ("GLM-4.7-Flash", "glm4_moe_lite", 29.94, RopeConfig(1e6, 64, None), 64),
        ("DeepSeek-V2", "deepseek_v2", 235.7, RopeConfig(1e4, 64, LITE_YARN), 64),
        *(
            (name, "deepseek_v3", 671.0, RopeConfig(1e4, 64, V3_YARN), 64)
            for name in ("DeepSeek-V3", "DeepSeek-V3.1", "DeepSeek-R1")
        ),
        ("Kimi-K2-Instruct", "deepseek_v3", 1026.4, RopeConfig(5e4, 64, K2_YARN), 64),
        *(
            (name, "deepseek_v3", 1026.4, RopeConfig(5e4, 64, replace(K2_YARN, factor=64.0)), 64)
            for name in ("Kimi-K2-Instruct-0905", "Kimi-K2-Thinking", "Kimi-K2.5")
        ),
        ("gpt-oss-20b", "gpt_oss", 20.9, RopeConfig(150000, 64, OSS_YARN), 64),
        ("gpt-oss-120b", "gpt_oss", 116.8, RopeConfig(150000, 64, OSS_YARN), 64),
    ],
)
def test_official_configs_are_models_of_their_size(
    folder: str, family: str, billions: float, rope: RopeConfig, width: int
) -> None:
    where = ROOT / "checkpoints" / folder
    assert family_in(where) == family
    config: Any = read_config(where, family)
    assert (config.rope, config.head_dim) == (rope, width)
    plain = FORMATS["bfloat16"]
    formats, meta = Formats(plain, plain, plain), torch.device("meta")
    model = model_class(family)(config, Build(load_ops("reference"), Parallel(), formats, torch.bfloat16, meta, 8))
    assert sum(layer.elements for _, layer in layers_of(model)) == pytest.approx(billions * 1e9, abs=0.05e9)


@pytest.mark.parametrize(
    ("family", "config", "mistake"),
    [p for mistakes in (MISTAKES, HYBRID_MISTAKES, LATENT_MISTAKES) for p in thorough_after(2, mistakes)],
)
def test_a_known_mistake_changes_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, config: str, mistake: Mistake
) -> None:
    """By far more than the tests of equality allow, so that these would fail."""
    oracle = save_tiny_of(tmp_path / "model", family, **CONFIGS[family][config])
    mistake(monkeypatch)
    assert largest_error(logits_of(tmp_path / "model", family), oracle) > 0.03


@pytest.mark.parametrize("family", TINY_OF)
def test_every_tensor_is_used_and_there(tmp_path: Path, family: str) -> None:
    save_tiny_of(tmp_path / "model", family)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    last = next(name for name in tensors if "shared_expert" in name or name.endswith("experts.down_proj_bias"))
    for name in (last, "model.layers.1.self_attn.e_score_correction_bias", "model.layers.1.self_attn.o_proj.bias"):
        changed: dict[str, Tensor] = {n: t for n, t in tensors.items() if n != name}
        save_file(changed if name in tensors else tensors | {name: torch.ones(3)}, path)
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            logits_of(tmp_path / "model", family)


def test_biases_of_zeros_that_gptq_adds_change_nothing(tmp_path: Path) -> None:
    """As in the official GPTQ files of Qwen: of every quantised module, beside those of queries, keys and values."""
    save_tiny_of(tmp_path / "model", "qwen2_moe", hidden_size=64, moe_intermediate_size=32)
    floats, path = quantise_tiny(tmp_path / "model", tmp_path / "gptq", "gptq", 32, 4, True), tmp_path / "gptq"
    tensors = load_file(path / "model.safetensors")
    rows = {name.removesuffix("qweight"): t.shape[1] for name, t in tensors.items() if name.endswith("qweight")}
    tensors = {f"{module}bias": torch.zeros(count) for module, count in rows.items()} | tensors
    save_file(tensors, path / "model.safetensors")
    method = {"quantization": {"method": "none"}}
    theirs, ours = (logits_of(folder, "qwen2_moe", 0, **method) for folder in (floats, path))
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, atol=1e-4)
    for name, bias in (("experts.2.up_proj", torch.eye(1, 32)[0]), ("gate", torch.zeros(8))):
        save_file(tensors | {f"model.layers.1.mlp.{name}.bias": bias}, path / "model.safetensors")
        with pytest.raises(UserError, match=rf"1 tensors that the model does not know: .*\.{name}\.bias"):
            logits_of(path, "qwen2_moe")


def test_only_layers_that_predict_further_tokens_are_skipped(tmp_path: Path) -> None:
    oracle = save_tiny_of(tmp_path / "model", "glm4_moe")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path) | {
        f"model.layers.2.{name}": torch.ones(3) for name in ("eh_proj.weight", "mlp.gate.weight")
    }
    save_file(tensors, path)
    assert largest_error(logits_of(tmp_path / "model", "glm4_moe"), oracle) < 1e-4
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(3)}, path)
    with pytest.raises(UserError, match=r"model\.layers\.3\.eh_proj"):
        logits_of(tmp_path / "model", "glm4_moe")


@pytest.mark.parametrize(
    ("family", "change", "complaint"),
    [
        ("glm4_moe", {"n_group": 2}, "n_group: 2 is not implemented"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not implemented"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts: 0 must be"),
        ("glm4_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than n_routed_experts: 8"),
        ("deepseek_v3", {"n_group": 3}, "n_group: 3 does not divide n_routed_experts: 8"),
        ("deepseek_v3", {"topk_group": 1}, "topk_group: 1 groups have fewer than num_experts_per_tok: 3"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not implemented"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave: False is not implemented"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: True is not implemented"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types: .* for each of 2 layers"),
        ("qwen3_5_moe", {"output_gate_type": "sigmoid"}, "output_gate_type: 'sigmoid' is not implemented"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob: False is not implemented"),
        (
            "qwen3_5_moe",
            {"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": True},
            "tie_word_embeddings: True does not agree",
        ),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 8}, "layer_types: .* full_attention at least once"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_key_heads: 3 does not divide .*heads: 4"),
        ("qwen3_next", {"model_type": "qwen3_5"}, r"model_type: .* 'qwen3_5' \(dense Qwen3.5, another architecture\)"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window: True is not implemented"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, "layer_types: .* has sliding_attention"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: 0 must be"),
        ("qwen2_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than num_experts: 8"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, family: str, change: dict[str, Any], complaint: str
) -> None:
    save_tiny_of(tmp_path / "model", family)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=rf"config\.json: {complaint}"):
        load_model_config(tiny_case(tmp_path, tmp_path / "model", model_name=family))

"""MiniMax-M2's config.json: both generations of keys are read, and what the model does not do is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from umbra.base.errors import UserError
from umbra.commands.inspect_checkpoint import model_type
from umbra.models.minimax_m2.config import MiniMaxM2Config
from umbra.models.registry import family_of, read_config
from umbra.models.rope import RopeConfig

OFFICIAL: dict[str, Any] = {  # of M2.5
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
    "transformers_version": "4.46.1",
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn"},
}
FIRST_FILE: dict[str, Any] = {  # dead keys of the first upload
    "mlp_intermediate_size": 8192,
    "shared_moe_mode": "sigmoid",
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "sliding_window": None,
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "router_aux_loss_coef": 0.001,
    "rope_scaling": None,
    "output_router_logits": False,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPECTED = MiniMaxM2Config(
    vocab_size=200064,
    hidden_size=3072,
    num_hidden_layers=62,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(5e6, 64, None),
    max_position_embeddings=196608,
    num_local_experts=256,
    num_experts_per_tok=8,
    intermediate_size=1536,
    use_routing_bias=True,
    tie_word_embeddings=False,
    num_mtp_modules=3,
)
TYPE = {"model_type": "minimax_m2"}
NESTED = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}


def parse(folder: Path, config: dict[str, Any]) -> MiniMaxM2Config:
    (folder / "config.json").write_text(json.dumps(config))
    found = read_config(folder, "minimax_m2")
    assert isinstance(found, MiniMaxM2Config)
    return found


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in OFFICIAL.items() if key not in keys}


@pytest.mark.parametrize(
    "config",
    [
        OFFICIAL,
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
    assert parse(tmp_path, config) == EXPECTED
    assert model_type(tmp_path) == "minimax_m2"


def test_without_rotary_keys_all_columns_rotate(tmp_path: Path) -> None:
    assert parse(tmp_path, without("rotary_dim")).rope.dim == 128


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"attn_type_list": [1] * 61}, "attn_type_list: [1, 1, 1, 1, 1, 1, ...] must be 62 times 1, full attention"),
        ({"attn_type_list": [True] * 62}, "must be a list of non-negative integers"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type: 'per_head' is not implemented"),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not implemented"),
        ({"shared_intermediate_size": 1536}, "shared_intermediate_size: 1536 is not implemented"),
        ({"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta: 3.5 is not implemented"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not implemented, only default"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": NESTED}, "rope_parameters are both set"),
        ({"partial_rotary_factor": 1.0}, "rotary_dim: 64 does not agree with partial_rotary_factor: 1 of 128"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor: 2.0 of head_dim 128 must be a whole number"),
        ({"rotary_dim": 63}, "rotary_dim: 63 and head_dim: 128 must be even"),
        ({"rotary_dim": 0}, "rotary_dim: 0 must be an integer from 1 to 128"),
        ({"num_local_experts": 65536}, "num_local_experts: 65536 in each of 62 layers is more than 524288 together"),
        ({"intermediate_size": "1536"}, "intermediate_size: '1536' must be an integer"),
        ({"use_routing_bias": 1}, "use_routing_bias: 1 must be true or false"),
        ({"model_type": "minimax_m3_vl"}, "model_type: 'minimax_m3_vl' (MiniMax-M3, another architecture) is not"),
        ({"model_type": "minimax_text_01"}, "(MiniMax-01, another architecture) is not supported"),
        (
            {"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"]},
            "model_type: 'minimax' (MiniMax-01, another architecture) is not supported, only qwen3_moe, ",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(tmp_path, OFFICIAL | change)
    said = str(raised.value)
    assert said.startswith(f"{tmp_path / 'config.json'}: ")
    assert complaint in said
    assert said.isprintable()


@pytest.mark.parametrize("config", [{}, {"architectures": ["MiniMaxM2ForCausalLM"]}, {"model_type": "MiniMax_M2"}])
def test_the_family_is_named_by_model_type(config: dict[str, Any]) -> None:
    assert family_of(config) is None


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ((1, 1, 1, 1, 1), None),
        ((48, 48, 1, 64, 128), None),
        ((32, 32, 1, 32, 32), "attn_tp_size: 32 does not divide num_attention_heads: 48"),
        ((12, 12, 1, 4, 4), "attn_tp_size: 12 and num_key_value_heads: 8: one must divide the other"),
        ((8, 5, 1, 8, 8), "moe_tp_size: 5 does not divide intermediate_size: 1536"),
        ((8, 8, 1, 256, 8), "embed_tp_size: 256 does not divide vocab_size: 200064"),
    ],
)
def test_splits(sizes: tuple[int, int, int, int, int], complaint: str | None) -> None:
    if complaint is None:
        EXPECTED.check_parallel(*sizes)
    else:
        with pytest.raises(UserError) as raised:
            EXPECTED.check_parallel(*sizes)
        assert str(raised.value) == f"parallel_config: {complaint}"

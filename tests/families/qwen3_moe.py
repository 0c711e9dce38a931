"""Qwen3-MoE."""

import itertools
from typing import Any

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.families.row import SIZES, Row, Sizes
from umbra.models.rope import RopeConfig

LAYERS: dict[str, Sizes] = {
    "sparse": {},
    "dense_first": {"mlp_only_layers": [0]},
    "every_second": {"decoder_sparse_step": 2},
}
ROPES: dict[str, Sizes] = {
    "plain": {},
    "yarn": dict(factor=4.0, original_max_position_embeddings=16),
    "yarn_detailed": dict(factor=2.0, original_max_position_embeddings=24, beta_fast=16.0, beta_slow=2.0)
    | dict(attention_factor=1.3, truncate=False),
}


def grid() -> dict[str, Sizes]:
    """All configurations that attention, layers and rotation can have together."""
    variants: dict[str, Sizes] = {}
    for given, layers, rope in itertools.product(itertools.product((False, True), repeat=3), LAYERS, ROPES):
        flags = dict(zip(("attention_bias", "tie_word_embeddings", "norm_topk_prob"), given, strict=True))
        rotation = {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", **ROPES[rope]}}
        name = "-".join([*(key for key, value in flags.items() if value), layers, rope])
        variants[name] = {**flags, **LAYERS[layers], **(rotation if ROPES[rope] else {})}
    return variants


def publish(config: dict[str, Any]) -> None:
    """As transformers 4 wrote it."""
    config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")


ROW = Row(
    "qwen3_moe",
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SIZES,
    seed=7,
    nullable=("eos_token_id",),
    publish=publish,
    variants=grid() | {f"{heads}_kv_heads": {"num_key_value_heads": heads} for heads in (1, 4, 8)},
    refused=[
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling: rope type 'longrope' is not impl"),
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
    official=[
        ("Qwen3-30B-A3B", 30.5, RopeConfig(1e6, 128, None), 128),
        ("Qwen3-235B-A22B", 235.1, RopeConfig(1e6, 128, None), 128),
    ],
    last="model.layers.1.mlp.experts.7.up_proj.weight",
    splits={  # biases, a dense layer and a tied head come along; eight ranks pad 36 tokens with four
        "qwen3": (
            dict(attention_bias=True, mlp_only_layers=[1], tie_word_embeddings=True),
            "tp2 tp4_moe2 tp4_moe2_graph dp4_tp2_moe2 dp4 "
            "tp2_sp tp2_chunks1_sp tp4_moe2_sp tp8_sp dp4_sp tp4_chunks5_sp3",
        )
    },
    offload={},
    kept=[
        ("NVFP4 NVFP4 NVFP4 Q8_0", "nvfp4 nvfp4 nvfp4 q8"),
        ("Q4_0 Q4_0 Q8_0 Q8_0", "q4 q4 q8 q8"),
        ("Q4_K Q6_K Q4_K Q6_K", "q4_k q6_k q4_k q6_k"),
        ("MXFP4 Q5_K Q5_0 Q5_1", "mxfp4 q5_k q5_k q5_k"),
        ("IQ2_XXS IQ3_S IQ2_S IQ1_M", "iq2_xxs iq3_s iq2_s iq1_m"),
        ("IQ3_XXS IQ2_XS IQ1_S Q2_K", "iq3_xxs iq2_xs iq1_s q2_k"),
        ("Q3_K Q2_K TQ2_0 TQ1_0", "q3_k q2_k tq2_0 tq2_0"),
    ],
    ascend=dict(head_dim=128, moe_intermediate_size=64),
)

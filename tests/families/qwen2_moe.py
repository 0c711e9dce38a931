"""Qwen2-MoE: a shared expert behind a gate."""

from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from tests.families.row import SIZES, Row
from tests.families.splits import SHARED
from tests.models.family_mistakes import QWEN2_MOE
from umbra.models.rope import RopeConfig

ROW = Row(
    "qwen2_moe",
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    {**SIZES, "shared_expert_intermediate_size": 32, "norm_topk_prob": False},
    variants={
        "renormalised": {"norm_topk_prob": True},
        "dense_first": {"mlp_only_layers": [0], "qkv_bias": False, "tie_word_embeddings": True},
        "every_second": {"decoder_sparse_step": 2, "num_key_value_heads": 8},
        "sizes_that_no_vector_divides": dict(hidden_size=52, head_dim=20, num_experts=13, moe_intermediate_size=20)
        | dict(shared_expert_intermediate_size=36, vocab_size=199, initializer_range=0.2),
    },
    mistakes=QWEN2_MOE,
    refused=[
        ({"use_sliding_window": True}, "use_sliding_window: True is not implemented"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types: .* has sliding_attention"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: 0 must be"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than num_experts: 8"),
    ],
    official=[("Qwen2-57B-A14B-Instruct", 57.4, RopeConfig(1e6, 128, None), 128)],
    splits={"qwen2": ({}, SHARED)},
    gguf={"tie_word_embeddings": True},
    quantise={"num_key_value_heads": 8},
    ascend=dict(head_dim=128, moe_intermediate_size=64, shared_expert_intermediate_size=64),
)

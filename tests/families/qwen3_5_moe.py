"""Qwen3.5 and Qwen3.6: as Qwen3-Next with other tensors; official files also see pictures."""

from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from tests.families.qwen3_next import ASCEND, BOTH_KINDS, HEADS, HYBRID, SHARED_KEYS, WIDE, randomise
from tests.families.row import Row
from tests.models.hybrid_mistakes import BOTH
from umbra.models.rope import RopeConfig

ROW = Row(
    "qwen3_5_moe",
    Qwen3_5MoeTextConfig,
    Qwen3_5MoeForCausalLM,
    HYBRID,
    randomise=randomise,
    variants={
        "three_values_for_a_key": {"linear_num_value_heads": 6, "linear_key_head_dim": 32},
        "full_first": {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
    },
    mistakes={f"{name} three_values_for_a_key": mistake for name, mistake in BOTH.items()},
    refused=[
        ({"output_gate_type": "sigmoid"}, "output_gate_type: 'sigmoid' is not implemented"),
        ({"norm_topk_prob": False}, "norm_topk_prob: False is not implemented"),
        (
            {"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": True},
            "tie_word_embeddings: True does not agree",
        ),
    ],
    official=[
        ("Qwen3.6-35B-A3B", 34.66, RopeConfig(1e7, 64, None), 256),
        ("Qwen3.5-397B-A17B", 396.35, RopeConfig(1e7, 64, None), 256),
    ],
    splits={
        "qwen35": (
            HEADS | dict(linear_num_value_heads=8),
            "tp2_chunks5_sp dp2_ep_graph dp2_tp2_ep_chunks5 dp4_ep_copies3_graph dp2_tp4_moe2",
        )
    },
    gguf=SHARED_KEYS,
    gguf_wide=WIDE,
    kept=[("Q4_K Q6_K Q4_K Q6_K", "q4_k q6_k q4_k q6_k"), ("Q5_K Q5_K Q5_0 IQ4_XS", "q5_k q5_k q5_k iq4")],
    quantise=BOTH_KINDS | {"num_key_value_heads": 4},
    ascend=ASCEND | dict(shared_expert_intermediate_size=64),
)

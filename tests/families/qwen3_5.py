"""Dense Qwen3.5, 3.6 and 3.8: as Qwen3.5-MoE with an MLP in every layer; official files also see pictures."""

from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tests.families.qwen3_next import ASCEND, BOTH_KINDS, HEADS, HYBRID, SHARED_KEYS, WIDE, randomise
from tests.families.row import NO_EXPERTS, Row
from tests.models.hybrid_mistakes import DENSE
from umbra.models.rope import RopeConfig

ROW = Row(
    "qwen3_5",
    Qwen3_5TextConfig,
    Qwen3_5ForCausalLM,
    HYBRID | NO_EXPERTS | dict(shared_expert_intermediate_size=None),
    randomise=randomise,
    variants={
        "three_values_for_a_key": {"linear_num_value_heads": 6, "linear_key_head_dim": 32},
        "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1, "num_hidden_layers": 4},
    },
    mistakes={f"{name} three_values_for_a_key": mistake for name, mistake in DENSE.items()},
    refused=[
        ({"output_gate_type": "sigmoid"}, "output_gate_type: 'sigmoid' is not implemented"),
        (
            {"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": True},
            "tie_word_embeddings: True does not agree",
        ),
    ],
    official=[("Qwen3.8-27B", 26.9, RopeConfig(1e7, 64, None), 256)],
    last="layers.1.mlp.up_proj",
    splits={
        "qwen35_dense": (
            HEADS | dict(linear_num_value_heads=8),
            "tp2_chunks5_sp dp2_graph dp2_tp2_chunks7 tp4_graph_sp",
        )
    },
    gguf=SHARED_KEYS,
    gguf_wide=WIDE,
    kept=[("F32 F32 Q4_K Q6_K", "q4_k q6_k q4_k q6_k")],
    quantise=BOTH_KINDS | {"num_key_value_heads": 4},
    ascend=ASCEND | NO_EXPERTS,
    inner="intermediate_size",
)

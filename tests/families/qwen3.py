"""Dense Qwen3: norms of each head of queries and keys."""

from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.families.row import NO_EXPERTS, SIZES, Row
from tests.models.family_mistakes import norms_after_rotation
from umbra.models.rope import RopeConfig

DENSE: dict[str, Any] = {**SIZES, **NO_EXPERTS}
ASCEND: dict[str, Any] = dict(head_dim=128, intermediate_size=64)

ROW = Row(
    "qwen3",
    Qwen3Config,
    Qwen3ForCausalLM,
    DENSE,
    variants={
        "biased": {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 8},
        "windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    },
    mistakes={"norms_after_rotation": norms_after_rotation},
    refused=[
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not implemented"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters: rope type 'linear' is not"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types: .* must be 2 times full_attention"),
    ],
    official=[("Qwen3-8B", 8.19, RopeConfig(1e6, 128, None), 128)],
    last="layers.1.mlp.up_proj",
    splits={"qwen3_dense": ({"tie_word_embeddings": True, "intermediate_size": 96}, "tp2_sp dp2_tp2_chunks7 tp8")},
    kept=[("F32 F32 Q4_K Q6_K", "q4_k q6_k q4_k q6_k")],
    quantise={"num_key_value_heads": 8},
    ascend=ASCEND,
    inner="intermediate_size",
)

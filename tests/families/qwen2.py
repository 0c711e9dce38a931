"""Dense Qwen2: biases of queries, keys and values."""

from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.families.qwen3 import DENSE
from tests.families.row import Row

ROW = Row(
    "qwen2",
    Qwen2Config,
    Qwen2ForCausalLM,
    DENSE | {"head_dim": None},
    variants={"windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}},
    refused=[({"attention_bias": True}, "attention_bias: True is not implemented")],
    last="layers.1.mlp.up_proj",
    splits={
        "qwen2_windows": (
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            "tp2_graph dp2_chunks7",
        )
    },
    gguf={"tie_word_embeddings": True},
    quantise={"num_key_value_heads": 8, "head_dim": None},
    ascend=dict(hidden_size=256, intermediate_size=64),
    inner="intermediate_size",
)

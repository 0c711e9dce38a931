"""Ministral: windows and full attention in turn."""

from transformers import MinistralConfig, MinistralForCausalLM

from tests.families.qwen3 import ASCEND, DENSE
from tests.families.row import Row
from tests.models.dense_mistakes import MISTRAL

ROW = Row(
    "ministral",
    MinistralConfig,
    MinistralForCausalLM,
    DENSE | {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    variants={"all": {"layer_types": None, "num_hidden_layers": 3}},
    mistakes=MISTRAL,
    refused=[({"layer_types": ["sliding_attention"]}, "layer_types: .* must be 2 times full_attention or sliding_att")],
    last="layers.1.mlp.up_proj",
    splits={"ministral": ({}, "tp2_chunks7 dp2_graph")},
    quantise={"num_key_value_heads": 8},
    ascend=ASCEND,
    inner="intermediate_size",
)

"""Mistral: a window in every layer, or in none."""

from transformers import MistralConfig, MistralForCausalLM

from tests.families.qwen3 import ASCEND, DENSE
from tests.families.row import Row
from tests.models.dense_mistakes import MISTRAL

ROW = Row(
    "mistral",
    MistralConfig,
    MistralForCausalLM,
    DENSE | {"sliding_window": 5},
    nullable=("sliding_window",),
    variants={"as_published": {"sliding_window": None, "head_dim": 16}},
    mistakes=MISTRAL,
    last="layers.1.mlp.up_proj",
    splits={"mistral": ({"sliding_window": 5}, "tp2_graph dp2_chunks7")},
    quantise={"num_key_value_heads": 8},
    ascend=ASCEND,
    inner="intermediate_size",
)

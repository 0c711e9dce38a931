"""Ministral 3: YaRN, and queries that grow with their position."""

from transformers import Ministral3Config, Ministral3ForCausalLM

from tests.families.qwen3 import ASCEND, DENSE
from tests.families.row import Row
from tests.models.dense_mistakes import MINISTRAL3

# Prompts and answers cross YaRN's original length several times.
ROPE = dict(rope_type="yarn", rope_theta=1e4, factor=16.0, original_max_position_embeddings=4, beta_fast=8.0)
ROPE |= dict(beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4)

ROW = Row(
    "ministral3",
    Ministral3Config,
    Ministral3ForCausalLM,
    DENSE | {"rope_theta": None, "rope_parameters": ROPE, "head_dim": 16},
    variants={"tied": {"tie_word_embeddings": True, "num_key_value_heads": 8}},
    mistakes=MINISTRAL3,
    refused=[({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters: .* must be of type yarn, with llama_4_sca")],
    last="layers.1.mlp.up_proj",
    splits={"ministral3": ({}, "tp2_chunks7")},
    quantise={"rope_parameters": ROPE | {"original_max_position_embeddings": 64}},  # as long as its windows
    ascend=ASCEND,
    inner="intermediate_size",
)

"""Llama 2 and 3: Llama 3's rotary embedding, biases that some models have, heads of any width."""

from transformers import LlamaConfig, LlamaForCausalLM

from tests.families.qwen3 import ASCEND, DENSE
from tests.families.row import Row
from tests.models.dense_mistakes import LLAMA
from umbra.models.rope import Llama3Config, RopeConfig

ROPE = dict(rope_type="llama3", rope_theta=100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 = {"rope_theta": None, "rope_parameters": ROPE | dict(original_max_position_embeddings=16)}

ROW = Row(
    "llama",
    LlamaConfig,
    LlamaForCausalLM,
    DENSE | LLAMA3,
    variants={
        "biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "as_llama_2": {"rope_parameters": {"rope_theta": 1e4}, "num_key_value_heads": None, "head_dim": 16},
    },
    mistakes=LLAMA,
    refused=[({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters: rope type 'dynamic'")],
    official=[("Llama-3.1-8B-Instruct", 8.03, RopeConfig(5e5, 128, None, Llama3Config(8.0, 8192, 1.0, 4.0)), 128)],
    last="layers.1.mlp.up_proj",
    splits={"llama": ({"mlp_bias": True, "attention_bias": True}, "tp2_graph dp2_chunks5 tp4_graph_sp")},
    kept=[("F32 F32 Q4_0 Q8_0", "q4 q8 q4 q8")],
    quantise={"num_key_value_heads": 8},
    ascend=ASCEND,
    inner="intermediate_size",
)

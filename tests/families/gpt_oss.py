"""gpt-oss: sinks, windows, biases everywhere, a clipped gate."""

import math

from transformers import GptOssConfig, GptOssForCausalLM

from tests.families.row import SIZES, Row
from tests.models.family_mistakes import GPT_OSS
from umbra.models.rope import RopeConfig, YarnConfig

YARN = YarnConfig(32.0, 4096, 32.0, 1.0, attention_factor=0.1 * math.log(32) + 1, truncate=False)
ROPE = dict(rope_type="yarn", rope_theta=150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False)

ROW = Row(
    "gpt_oss",
    GptOssConfig,
    GptOssForCausalLM,
    # Prompts and answers cross windows and YaRN's original length; gates and ups exceed the limit.
    {**SIZES, **dict.fromkeys(("num_experts", "moe_intermediate_size", "norm_topk_prob", "rope_theta"))}
    | dict(num_local_experts=8, hidden_size=64, intermediate_size=96, num_hidden_layers=4, head_dim=32)
    | dict(initializer_range=0.2)  # more would amplify roundings tenfold
    | dict(sliding_window=8, swiglu_limit=2.0, rope_parameters={**ROPE, "original_max_position_embeddings": 16}),
    variants={
        "a_window_of_5": {"sliding_window": 5, "num_key_value_heads": 8, "initializer_range": 0.2},
        "full_first": {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
    },
    mistakes=GPT_OSS,
    official=[
        ("gpt-oss-20b", 20.9, RopeConfig(150000, 64, YARN), 64),
        ("gpt-oss-120b", 116.8, RopeConfig(150000, 64, YARN), 64),
    ],
    last="experts.down_proj_bias",
    # Biases once, sinks by heads; the bias after a row split and that of downs by one rank of several.
    splits={
        "oss": (
            dict(num_hidden_layers=2),
            "tp2 dp2_graph dp2_ep dp4_ep_copies3_graph tp4_moe2_graph_sp dp2_tp2_ep_chunks5 tp8 dp2_tp4_moe2_sp",
        )
    },
    offload=dict(num_hidden_layers=2, head_dim=8),
    gguf={"swiglu_limit": 7.0},
    gguf_wide={"swiglu_limit": 7.0},
    kept=[("Q4_1 MXFP4 Q8_0 Q5_K", "q4_k mxfp4 q8 q5_k"), ("NVFP4 Q8_0 NVFP4 F16", "nvfp4 q8 nvfp4 float32")],
    ascend=dict(head_dim=64, num_attention_heads=8, num_key_value_heads=2, intermediate_size=64),
    inner="intermediate_size",
)

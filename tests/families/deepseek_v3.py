"""DeepSeek-V3 and R1, Kimi-K2, Moonlight: attention over latents, experts in groups."""

from dataclasses import replace
from functools import partial
from typing import Any

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.families.row import SIZES, Row, spread
from tests.families.splits import SHARED
from tests.models.latent_mistakes import DEEPSEEK_V3
from umbra.models.rope import RopeConfig, YarnConfig

ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, mscale=0.707)
ROPE |= dict(mscale_all_dim=1.0, original_max_position_embeddings=16)
# All widths differ; prompts and answers cross YaRN's original length.
LATENT: dict[str, Any] = {**SIZES, **dict.fromkeys(("head_dim", "num_experts", "rope_theta")), "rope_parameters": ROPE}
LATENT |= dict(num_key_value_heads=8, n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, n_group=4)
LATENT |= dict(topk_group=2, routed_scaling_factor=2.5, q_lora_rank=32, kv_lora_rank=48, qk_nope_head_dim=24)
LATENT |= dict(qk_rope_head_dim=8, v_head_dim=16, rms_norm_eps=0.3)  # which is not that of norms of latents
EXPANDED = dict(qk_nope_head_dim=12, v_head_dim=4)  # so narrow that prompts of 18 tokens are expanded
GGUF_YARN = dict(rope_parameters=ROPE | dict(mscale=0.707, mscale_all_dim=0.707))  # of which GGUF files have one
GGUF_WIDE = GGUF_YARN | dict(kv_lora_rank=256, q_lora_rank=256, qk_nope_head_dim=64, v_head_dim=32, head_dim=None)
# The only widths of latents and rotated keys that Ascend takes.
ASCEND: dict[str, Any] = dict(num_key_value_heads=2, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
ASCEND |= dict(v_head_dim=128, moe_intermediate_size=64, vocab_size=96, first_k_dense_replace=0)
V3_YARN = YarnConfig(40.0, 4096, 32.0, 1.0, attention_factor=1.0, truncate=True, mscale_all_dim=1.0)
K2_YARN = YarnConfig(32.0, 4096, 1.0, 1.0, attention_factor=1.0, truncate=True, mscale_all_dim=1.0)
V3, K2 = ("DeepSeek-V3", "DeepSeek-V3.1", "DeepSeek-R1"), ("Kimi-K2-Instruct-0905", "Kimi-K2-Thinking", "Kimi-K2.5")

ROW = Row(
    "deepseek_v3",
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LATENT,
    randomise=partial(spread, scores=-5.0),  # a zero would be larger than a negative score
    variants={
        "as_moonlight": dict(q_lora_rank=None, n_group=1, topk_group=1, initializer_range=0.2)
        | {"rope_parameters": {"rope_theta": 5e4}},
        "not_renormalised": {"norm_topk_prob": False, "num_attention_heads": 6, "num_key_value_heads": 6},
    },
    mistakes=DEEPSEEK_V3,
    refused=[
        ({"n_group": 3}, "n_group: 3 does not divide n_routed_experts: 8"),
        ({"topk_group": 1}, "topk_group: 1 groups have fewer than num_experts_per_tok: 3"),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not implemented"),
        ({"rope_interleave": False}, "rope_interleave: False is not implemented"),
    ],
    official=[
        ("Moonlight-16B-A3B", 15.96, RopeConfig(5e4, 64, None), 64),
        *((name, 671.0, RopeConfig(1e4, 64, V3_YARN), 64) for name in V3),
        ("Kimi-K2-Instruct", 1026.4, RopeConfig(5e4, 64, K2_YARN), 64),
        *((name, 1026.4, RopeConfig(5e4, 64, replace(K2_YARN, factor=64.0)), 64) for name in K2),
    ],
    splits={"v3": (EXPANDED, f"{SHARED} tp8")},  # heads are divided, latents are not
    offload=dict(first_k_dense_replace=0),  # its shared expert is always resident
    gguf=GGUF_YARN,
    gguf_wide=GGUF_WIDE,
    kept=[("Q4_K Q6_K Q6_K Q8_0", "q4_k q6_k q6_k q8")],
    quantise={"num_key_value_heads": 8},
    ascend=ASCEND,
)

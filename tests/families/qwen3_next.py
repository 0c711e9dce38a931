"""Qwen3-Next: gated DeltaNet layers between layers that attend."""

from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

from tests.families.row import SIZES, Row
from tests.models.hybrid_mistakes import NEXT
from umbra.models.rope import RopeConfig

HYBRID: dict[str, Any] = {**SIZES, "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 8, "head_dim": 32} | dict(
    num_attention_heads=4, rope_theta=None, norm_topk_prob=None, moe_intermediate_size=32
)
HYBRID |= dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
HYBRID |= dict(shared_expert_intermediate_size=64)
# Mean and spread of tensors with these in their names. Decays are from about a half to 0.999, and layers change little
# of the residual, so that differences stay small.
RANDOM = {"linear_attn.norm": (1.0, 0.3), "norm": (0.0, 0.3), "dt_bias": (-2.0, 1.0), "A_log": (0.0, 1.0)}
RANDOM |= {"conv1d": (0.0, 0.5), "embed": (0.0, 1.0), "mlp.gate.": (0.0, 0.3), "in_proj_ba": (0.0, 0.3)}
RANDOM |= {"in_proj_b": (0.0, 0.3), "in_proj_a": (0.0, 0.3), "shared_expert_gate": (0.0, 0.3), "": (0.0, 0.08)}


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    width = config.linear_key_head_dim
    first = config.linear_num_key_heads * width
    for name, tensor in model.named_parameters():
        tensor.normal_(*next(numbers for part, numbers in RANDOM.items() if part in name))
        if "conv1d" in name:
            tensor[first : first + width] *= 1e-3  # keys of a head so small that eps counts in their norm


BOTH_KINDS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
HEADS = dict(num_hidden_layers=4, num_attention_heads=16, head_dim=16, linear_num_key_heads=4)
SHARED_KEYS = dict(linear_num_value_heads=6, linear_value_head_dim=32)  # three value heads share a key head
WIDE = dict(linear_key_head_dim=32, linear_value_head_dim=128, num_hidden_layers=4)
# Heads of 256, of which 64 columns rotate; a layer with states, then one that attends.
ASCEND = BOTH_KINDS | dict(head_dim=256, num_attention_heads=2, num_key_value_heads=1, vocab_size=96)
ASCEND |= dict(moe_intermediate_size=64, linear_key_head_dim=128, linear_value_head_dim=128)

ROW = Row(
    "qwen3_next",
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    HYBRID,
    randomise=randomise,
    variants={
        "three_values_for_a_key": dict(linear_num_value_heads=6, linear_value_head_dim=32, num_key_value_heads=1)
        | dict(shared_expert_intermediate_size=48, norm_topk_prob=False)
    },
    mistakes=NEXT,
    refused=[
        ({"layer_types": ["linear_attention"] * 8}, "layer_types: .* full_attention at least once"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads: 3 does not divide .*heads: 4"),
    ],
    official=[("Qwen3-Next-80B-A3B-Instruct", 79.67, RopeConfig(1e7, 64, None), 256)],
    # From eight ranks on, several have copies of each of four key heads.
    splits={"next": (HEADS | dict(linear_num_value_heads=16), "tp2 tp4_moe2_graph_sp tp8 tp16_graph")},
    gguf=SHARED_KEYS,
    gguf_wide=WIDE,
    kept=[("Q4_K Q4_K Q8_0 Q6_K", "q4_k q4_k q8 q6_k")],
    quantise=BOTH_KINDS | {"num_key_value_heads": 4},
    ascend=ASCEND | dict(shared_expert_intermediate_size=64),
)

"""Kimi-Linear: delta rules with decays of channels, attention over latents without rotation, a dense layer first."""

from typing import Any

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM, PreTrainedModel

from tests.families.row import SIZES, Row
from tests.models.kimi_linear_mistakes import MISTAKES
from umbra.models.rope import RopeConfig

KINDS = ["linear_attention", "full_attention", "linear_attention"]
TINY: dict[str, Any] = {**SIZES, "rope_theta": None, "head_dim": None, "num_hidden_layers": 3, "layer_types": KINDS}
TINY |= dict(num_key_value_heads=8, n_shared_experts=2, kv_lora_rank=48, qk_nope_head_dim=24, qk_rope_head_dim=8)
TINY |= dict(v_head_dim=16, linear_num_heads=8, linear_head_dim=32, pad_token_id=0, bos_token_id=1)
TINY |= dict(rms_norm_eps=0.3)  # which is not that of norms of latents
# Mean and spread of tensors with these in their names: decays are from about a half to 0.999.
RANDOM = {"dt_bias": (-2.0, 1.0), "A_log": (0.0, 1.0), "conv1d": (0.0, 0.5), "f_b_proj": (0.0, 0.1)}
# The only widths of latents and shared keys that Ascend takes.
TWO: dict[str, Any] = dict(num_hidden_layers=2, layer_types=KINDS[:2], head_dim=None)
ASCEND: dict[str, Any] = TWO | dict(linear_num_heads=2, linear_head_dim=128)
ASCEND |= dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_key_value_heads=2)
ASCEND |= dict(moe_intermediate_size=64, mlp_layer_types=["sparse"] * 2, rms_norm_eps=1e-5)
OWN = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
OWN |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if numbers := next((numbers for part, numbers in RANDOM.items() if part in name), None):
            tensor.normal_(*numbers)
        elif "norm" in name or "e_score" in name:
            tensor.add_(torch.randn_like(tensor) * 0.2 - 5.0 * ("e_score" in name))


def publish(config: dict[str, Any]) -> None:
    """As the makers' files have it: with lists of layers, whose numbers begin at one."""
    kinds, dense = config.pop("layer_types"), config.pop("mlp_layer_types").count("dense")
    numbers = {kind: [i for i, own in enumerate(kinds, 1) if own == kind] for kind in KINDS[:2]}
    config["linear_attn_config"] = {name: config.pop(own) for name, own in OWN.items()}
    config["linear_attn_config"] |= {"kda_layers": numbers[KINDS[0]], "full_attn_layers": numbers[KINDS[1]]}
    config |= {"first_k_dense_replace": dense, "mla_use_nope": True, "moe_router_activation_func": "sigmoid"}


def as_published(name: str) -> str:
    """The name of a tensor in the makers' files: dense layers have no experts."""
    apart = any(part in name for part in ("experts", "block_sparse_moe.gate."))
    return name if apart else name.replace("block_sparse_moe", "mlp")


ROW = Row(
    "kimi_linear",
    KimiLinearConfig,
    KimiLinearForCausalLM,
    TINY,
    randomise=randomise,
    publish=publish,
    rename=as_published,
    variants={
        "expanded": dict(qk_nope_head_dim=12, v_head_dim=4, q_lora_rank=32),
        "sparse": dict(mlp_layer_types=["sparse"] * 3, norm_topk_prob=False, linear_num_heads=3, linear_head_dim=48),
    },
    mistakes=MISTAKES,
    refused=[
        ({"mla_use_nope": False}, "mla_use_nope: False is not implemented"),
        ({"num_expert_group": 2}, "num_expert_group: 2 is not implemented"),
        ({"linear_attn_config": None}, "linear_attn_config: None must be a mapping"),
        (
            {"linear_attn_config": {"kda_layers": [0, 2], "full_attn_layers": [1]}},
            r"linear_attn_config: full_attn_layers: \[1\] and kda_layers must have each layer from 1 to 3 once",
        ),
        ({"layer_types": KINDS[:2]}, "layer_types: .* must be 3 times"),
        ({"model_type": "kimi_k3"}, r"model_type: .*'kimi_k3' \(Kimi-K3, another architecture\)"),
    ],
    official=[("Kimi-Linear-48B-A3B-Instruct", 49.12, RopeConfig(10000.0, 0, None), 64)],
    last="self_attn.o_norm",
    splits={"kimi_linear": ({}, "tp2 dp2_ep_graph tp4_moe2_graph_sp tp8")},  # latents are not divided
    gguf_wide=TWO | dict(kv_lora_rank=256, qk_nope_head_dim=64, v_head_dim=32, linear_head_dim=256),
    kept=[("Q4_K Q8_0 Q6_K Q4_0", "q4_k q8 q6_k q4")],
    ascend=ASCEND,
)

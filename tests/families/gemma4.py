"""Gemma 4: windows and wider heads in turn, a dense MLP beside the mixture, four norms, a factor of each layer."""

from typing import Any

import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedModel

from tests.families.row import SIZES, Row
from tests.models.gemma4_mistakes import GEMMA4
from umbra.models.rope import RopeConfig

KINDS = ["sliding_attention", "full_attention"]
OTHERS = ("norm_topk_prob", "rope_theta", "num_experts_per_tok")  # keys of other families
DENSE: dict[str, Any] = dict(enable_moe_block=False, num_experts=None, top_k_experts=None, moe_intermediate_size=None)
SHARED: dict[str, Any] = (
    DENSE
    | dict(num_hidden_layers=6, layer_types=3 * KINDS, num_kv_shared_layers=3, use_double_wide_mlp=True)
    | dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=SIZES["vocab_size"], attention_k_eq_v=False)
)


def randomise(model: PreTrainedModel) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name or (name.endswith(("scale", "layer_scalar")) and "embed_scale" not in name):
            tensor.add_(torch.randn_like(tensor) * 0.2)
        elif "router.proj" in name:
            tensor.mul_(6)  # the root of the hidden size divides its rows


def publish(config: dict[str, Any]) -> None:
    """As the official files have it: of a model that also sees pictures."""
    text = dict(config)
    config.clear()
    full = text.pop("per_layer_config").get(str(text["layer_types"].index("full_attention")), text)
    text["global_head_dim"] = full.get("head_dim", text["head_dim"])
    text["num_global_key_value_heads"] = full.get("num_key_value_heads")
    config |= {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"]}
    config |= {"tie_word_embeddings": text["tie_word_embeddings"], "text_config": text, "vision_config": {}}


ROW = Row(
    "gemma4",
    Gemma4TextConfig,
    Gemma4ForCausalLM,
    {**SIZES, **dict.fromkeys(OTHERS)}
    | dict(num_hidden_layers=2, layer_types=KINDS, sliding_window=8, num_key_value_heads=4, global_head_dim=16)
    | dict(num_global_key_value_heads=2, attention_k_eq_v=True, hidden_size_per_layer_input=0, enable_moe_block=True)
    | dict(top_k_experts=3, final_logit_softcapping=4.0, tie_word_embeddings=True),
    randomise=randomise,
    publish=publish,
    nullable=("num_experts", "top_k_experts", "moe_intermediate_size", "final_logit_softcapping"),
    variants={
        "dense": DENSE
        | dict(sliding_window=5, num_global_key_value_heads=1, layer_types=2 * KINDS, num_hidden_layers=4),
        "keys_and_values": dict(attention_k_eq_v=False, num_global_key_value_heads=None, final_logit_softcapping=None)
        | dict(layer_types=[*2 * KINDS, KINDS[0], KINDS[0], KINDS[1]], num_hidden_layers=7, global_head_dim=8)
        | dict(tie_word_embeddings=False, initializer_range=0.2),
        "shared": SHARED,
    },
    mistakes=GEMMA4,
    refused=[
        (
            {"text_config": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 25}},
            "text_config: num_kv_shared_layers: 25 leaves no layer of some kind before them",
        ),
        ({"text_config": {"vocab_size_per_layer_input": 5}}, "text_config: vocab_size_per_layer_input: 5 must be 2"),
        (
            {"text_config": {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "all"}},
            "text_config: use_bidirectional_attention: 'all' is not implemented",
        ),
        (
            {"text_config": {"hidden_size_per_layer_input": 0, "per_layer_config": {"0": {"head_dim": 8}}}},
            "text_config: per_layer_config: .* must say the same of every layer of full_attention",
        ),
    ],
    official=[
        ("gemma-4-26B-A4B-it", 26.0, RopeConfig(1e4, 256, None), 256),
        ("gemma-4-31B-it", 32.1, RopeConfig(1e4, 256, None), 256),
    ],
    last="layers.1.router.per_expert_scale",
    gguf_wide=dict(global_head_dim=32),
    kept=[("Q4_0 Q4_0 Q4_0 Q4_0", "q4 q4 q4 q4"), ("Q4_K Q8_0 Q6_K Q6_K", "q4_k q8 q6_k q6_k")],
    ascend=dict(head_dim=64, global_head_dim=128, num_attention_heads=8, num_key_value_heads=2)
    | dict(num_global_key_value_heads=1),
    splits={
        "gemma4": ({}, "tp2 dp2_ep_graph tp4_moe2_graph_sp dp2_tp2_chunks5_sp tp8_ep"),
        "gemma4_shared": (SHARED, "tp2_graph tp4_graph_sp dp2_tp2_chunks5_sp"),
    },
    offload=dict(num_key_value_heads=2, num_global_key_value_heads=1, head_dim=12, global_head_dim=24),
)

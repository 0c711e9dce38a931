"""Qwen3.5 and Qwen3.6: as Qwen3-Next with other tensors; official files also see pictures."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
)

from tests.families.qwen3_next import ASCEND, BOTH_KINDS, HEADS, HYBRID, SHARED_KEYS, WIDE, randomise
from tests.families.row import Row
from tests.models.hybrid_mistakes import BOTH
from umbra.models.rope import RopeConfig

ROW = Row(
    "qwen3_5_moe",
    Qwen3_5MoeTextConfig,
    Qwen3_5MoeForCausalLM,
    HYBRID,
    randomise=randomise,
    variants={
        "three_values_for_a_key": {"linear_num_value_heads": 6, "linear_key_head_dim": 32},
        "full_first": {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
    },
    mistakes={f"{name} three_values_for_a_key": mistake for name, mistake in BOTH.items()},
    refused=[
        ({"output_gate_type": "sigmoid"}, "output_gate_type: 'sigmoid' is not implemented"),
        ({"norm_topk_prob": False}, "norm_topk_prob: False is not implemented"),
        (
            {"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": True},
            "tie_word_embeddings: True does not agree",
        ),
    ],
    official=[
        ("Qwen3.6-35B-A3B", 34.66, RopeConfig(1e7, 64, None), 256),
        ("Qwen3.5-397B-A17B", 396.35, RopeConfig(1e7, 64, None), 256),
    ],
    splits={
        "qwen35": (
            HEADS | dict(linear_num_value_heads=8),
            "tp2_chunks5_sp dp2_ep_graph dp2_tp2_ep_chunks5 dp4_ep_copies3_graph dp2_tp4_moe2",
        )
    },
    gguf=SHARED_KEYS,
    gguf_wide=WIDE,
    kept=[("Q4_K Q6_K Q4_K Q6_K", "q4_k q6_k q4_k q6_k"), ("Q5_K Q5_K Q5_0 IQ4_XS", "q5_k q5_k q5_k iq4")],
    quantise=BOTH_KINDS | {"num_key_value_heads": 4},
    ascend=ASCEND | dict(shared_expert_intermediate_size=64),
)


def save_pictured(folder: Path, fused: bool = True, /, **options: Any) -> PreTrainedModel:
    """Saves a model that sees pictures as `ROW.save` does others. `fused`: as in official files in floats, tensors have
    all experts of a layer."""
    torch.manual_seed(ROW.seed)
    text = {name: value for name, value in (HYBRID | options).items() if value is not None}
    sight = dict(depth=1, hidden_size=8, num_heads=2, intermediate_size=8, out_hidden_size=text["hidden_size"])
    model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=sight)).eval()
    randomise(model)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | {"mtp.norm.weight": torch.ones(3)}
    if fused:
        own = {name: t.data.contiguous() for name, t in model.named_parameters() if ".mlp.experts." in name}
        tensors = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name} | own
    save_file(tensors, folder / "model.safetensors")
    return model

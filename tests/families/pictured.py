"""Models of Qwen3.5's families that also see pictures, as official files have them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from tests.families import ROWS

KINDS: dict[str, tuple[Any, Any]] = {
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}


def save_pictured(folder: Path, family: str, fused: bool = True, /, **options: Any) -> PreTrainedModel:
    """Saves a model that sees pictures as `Row.save` does others. `fused`: as in official files in floats, tensors have
    all experts of a layer."""
    row, (config, kind) = ROWS[family], KINDS[family]
    torch.manual_seed(row.seed)
    text = {name: value for name, value in {**row.sizes, **options}.items() if value is not None}
    sight = dict(depth=1, hidden_size=8, num_heads=2, intermediate_size=8, out_hidden_size=text["hidden_size"])
    model: PreTrainedModel = kind(config(text_config=text, vision_config=sight)).eval()
    row.randomise(model)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | {"mtp.norm.weight": torch.ones(3)}
    if fused:
        own = {name: t.data.contiguous() for name, t in model.named_parameters() if ".mlp.experts." in name}
        tensors = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name} | own
    save_file(tensors, folder / "model.safetensors")
    return model

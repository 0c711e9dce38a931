"""Tiny random Qwen3-MoE checkpoints written by transformers, and cases that run them."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from executor.config.case import Case
from executor.config.env import RankEnv
from executor.config.load import load_case
from executor.job.runner import ModelRunner
from executor.job.runner import make_runner as new_runner

TINY = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=16,
    max_position_embeddings=256,
    rope_theta=10000.0,
    norm_topk_prob=True,
    eos_token_id=0,
    initializer_range=0.3,  # larger than usual: routing and attention are far from uniform
)
ONE_RANK = RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1, error_file="")


def save_tiny(folder: Path, hub_names: bool = True, **options: Any) -> Qwen3MoeForCausalLM:
    """A random model saved to `folder` in float32; returned in evaluation mode as the oracle."""
    torch.manual_seed(7)
    settings = TINY | options
    if yarn := settings.pop("yarn", None):
        settings["rope_parameters"] = {"rope_theta": settings.pop("rope_theta"), "rope_type": "yarn", **yarn}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # transformers starts them at one and zero
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=options.get("max_shard_size", "5GB"))
    if hub_names:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        config["torch_dtype"] = config.pop("dtype")
        path.write_text(json.dumps(config))
    return model


def write_case(path: Path, model: Path, **sections: Any) -> Path:
    """A case file for the checkpoint in `model`; `sections` are laid over the defaults, section by section."""
    case: dict[str, Any] = {
        "model_path": str(model),
        "model_config": {"dtype": "float32"},
        "data_config": {"prompts": ["x"], "input_max_len": 48, "max_new_tokens": 8, "batch_size": 4},
        "cache_config": {"page_size": 4},
        "quantization": {"keep_packed": False},
    }
    for name, value in sections.items():
        case[name] = case.get(name, {}) | value if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(case))
    return path


def tiny_case(folder: Path, model: Path, **sections: Any) -> Case:
    return load_case(str(write_case(folder / "tiny.yaml", model, **sections)))


def make_runner(case: Case, results: Path) -> ModelRunner:
    runner = new_runner(case, results, ONE_RANK)
    runner.setup()
    return runner


@torch.no_grad()
def oracle_logits(model: Qwen3MoeForCausalLM, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].float()

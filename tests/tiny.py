"""Tiny random checkpoints of each family, written by transformers, and cases that run them."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from umbra.executor.config.case import Case
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case
from umbra.executor.model_runner import ModelRunner, PlatformMaker
from umbra.executor.model_runner import make_runner as new_runner

TINY: dict[str, Any] = dict(
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
TINY_M2: dict[str, Any] = dict(  # twelve heads of 32 are not the hidden size; half of a head rotates
    vocab_size=320,
    hidden_size=192,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=32,
    rotary_dim=16,
    rope_theta=5e6,
    num_local_experts=16,
    num_experts_per_tok=4,
    max_position_embeddings=256,
    initializer_range=0.08,
)
TINY_AS_M2: dict[str, Any] = dict(  # a MiniMax-M2 of the sizes in TINY
    vocab_size=96,
    hidden_size=32,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=8,
    rotary_dim=4,
    num_local_experts=8,
    num_experts_per_tok=3,
    initializer_range=0.3,
)
HYBRID: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=64,
    num_hidden_layers=8,
    num_attention_heads=4,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=64,
    rope_theta=None,
    norm_topk_prob=None,
)
# Mean and spread of tensors with these in their names. Decays are from about a half to 0.999, and layers change little
# of the residual, so that differences stay small.
HYBRID_RANDOM = {
    "linear_attn.norm": (1.0, 0.3),
    "norm": (0.0, 0.3),
    "dt_bias": (-2.0, 1.0),
    "A_log": (0.0, 1.0),
    "conv1d": (0.0, 0.5),
    "embed": (0.0, 1.0),
    "mlp.gate.": (0.0, 0.3),
    "in_proj_ba": (0.0, 0.3),
    "in_proj_b": (0.0, 0.3),
    "in_proj_a": (0.0, 0.3),
    "shared_expert_gate": (0.0, 0.3),
    "": (0.0, 0.08),
}
LATENT: dict[str, Any] = dict(  # all widths differ; prompts and answers cross YaRN's original length
    num_key_value_heads=8,
    head_dim=None,
    num_experts=None,
    n_routed_experts=8,
    n_shared_experts=2,
    first_k_dense_replace=1,
    q_lora_rank=32,
    kv_lora_rank=48,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    rms_norm_eps=0.3,  # not that of norms of latents
    rope_theta=None,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=8.0,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=0.707,
        mscale_all_dim=1.0,
        original_max_position_embeddings=16,
    ),
)
EXPANDED = dict(qk_nope_head_dim=12, v_head_dim=4)  # so narrow that prompts of 18 tokens are expanded
TINY_OF: dict[str, tuple[Any, Any, dict[str, Any]]] = {  # config, model, and what differs from TINY
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, dict(shared_expert_intermediate_size=32, norm_topk_prob=False)),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, HYBRID),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, HYBRID),
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        dict(
            num_experts=None,
            n_routed_experts=8,
            n_shared_experts=2,
            routed_scaling_factor=2.5,
            use_qk_norm=True,
            attention_bias=True,
            first_k_dense_replace=1,
        ),
    ),
    "deepseek_v2": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        LATENT | dict(norm_topk_prob=False, topk_method="group_limited_greedy"),
    ),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT),
    "glm4_moe_lite": (
        Glm4MoeLiteConfig,
        Glm4MoeLiteForCausalLM,
        LATENT | dict(first_k_dense_replace=None, n_group=1, topk_group=1, rope_parameters=dict(rope_theta=1e4)),
    ),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        dict(  # prompts and answers cross windows and YaRN's original length; gates and ups exceed the limit
            num_experts=None,
            num_local_experts=8,
            moe_intermediate_size=None,
            norm_topk_prob=None,
            rope_theta=None,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            initializer_range=0.2,  # more would amplify roundings tenfold
            head_dim=32,
            sliding_window=8,
            swiglu_limit=2.0,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=150000.0,
                factor=8.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=16,
            ),
        ),
    ),
}
OFFICIAL_M2 = {  # keys of the official config.json that transformers does not use
    "attn_type_list": [1, 1, 1],
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
    "use_mtp": True,
    "num_mtp_modules": 3,
    "mtp_transformer_layers": 1,
}
ONE_RANK = RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1, error_file="")


def save_tiny(folder: Path, hub_names: bool = True, /, **options: Any) -> Qwen3MoeForCausalLM:
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


def save_tiny_m2(folder: Path, official: bool = True, /, **options: Any) -> MiniMaxM2ForCausalLM:
    """A random MiniMax-M2 saved to `folder` in float32, with the keys of official files or those of transformers 5;
    returned in evaluation mode as the oracle. Everything that transformers starts at zero or one is random."""
    torch.manual_seed(11)
    settings = TINY_M2 | options
    model = MiniMaxM2ForCausalLM(MiniMaxM2Config(**settings)).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name:
                tensor.add_(torch.randn_like(tensor) * 0.3)
            elif "e_score_correction_bias" in name:
                tensor.copy_(5 + torch.randn_like(tensor) * 0.1)  # bfloat16 has steps of 0.03 here
            elif "gate.weight" in name:
                tensor.mul_(4)  # scores apart, so that rounding does not change the choice
            elif "q_proj" in name:  # each head has a scale of its own
                heads = tensor.view(settings["num_attention_heads"], -1)
                heads.mul_(torch.linspace(0.3, 3, len(heads))[:, None])
    model.save_pretrained(folder)
    if official:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | OFFICIAL_M2
        config["attn_type_list"] = [1] * settings["num_hidden_layers"]
        del config["rope_parameters"]
        for name in ("rope_theta", "rotary_dim"):
            config[name] = settings[name]
        for name in ("eos_token_id", "bos_token_id", "partial_rotary_factor", "dtype"):
            config.pop(name, None)
        path.write_text(json.dumps(config))
    return model


def save_tiny_of(folder: Path, family: str, **options: Any) -> PreTrainedModel:
    """A random model of a family in TINY_OF saved to `folder` in float32; returned in evaluation mode as the oracle.
    Everything that transformers starts at zero or one is random."""
    torch.manual_seed(5)
    config, kind, settings = TINY_OF[family]
    given = (TINY | settings | options).items()
    sizes = {name: value for name, value in given if value is not None or name == "q_lora_rank"}  # which may be none
    model: PreTrainedModel = kind(config(**sizes)).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if settings is not HYBRID and ("norm" in name or "bias" in name or "sinks" in name):
                tensor.add_(torch.randn_like(tensor) * 0.2)
            if "e_score" in name:
                # bfloat16 has steps of 0.03 here; a zero would be larger than a negative score
                tensor.add_(-5 if "kv_lora_rank" in settings else 5)
    if settings is HYBRID:
        randomise_hybrid(model)
    model.save_pretrained(folder)
    return model


def save_pictured(folder: Path, fused: bool = True, /, **options: Any) -> PreTrainedModel:
    """As `save_tiny_of`, of a Qwen3.5 that sees pictures. `fused`: as in official files in floats, tensors have all
    experts of a layer."""
    torch.manual_seed(5)
    text = {name: value for name, value in (TINY | HYBRID | options).items() if value is not None}
    sight = dict(depth=1, hidden_size=8, num_heads=2, intermediate_size=8, out_hidden_size=text["hidden_size"])
    model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=sight)).eval()
    randomise_hybrid(model)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | {"mtp.norm.weight": torch.ones(3)}
    if fused:
        own = {name: t.data.contiguous() for name, t in model.named_parameters() if ".mlp.experts." in name}
        tensors = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name} | own
    save_file(tensors, folder / "model.safetensors")
    return model


@torch.no_grad()
def randomise_hybrid(model: PreTrainedModel) -> None:
    width = model.config.get_text_config().linear_key_head_dim
    first = model.config.get_text_config().linear_num_key_heads * width
    for name, tensor in model.named_parameters():
        tensor.normal_(*next(numbers for part, numbers in HYBRID_RANDOM.items() if part in name))
        if "conv1d" in name:
            tensor[first : first + width] *= 1e-3  # keys of a head so small that eps counts in their norm


def write_case(path: Path, model: Path, **sections: Any) -> Path:
    """A case file for the checkpoint in `model`; `sections` are laid over the defaults, section by section."""
    case: dict[str, Any] = {
        "model_path": str(model),
        "model_config": {"dtype": "float32"},
        "data_config": {"prompts": ["x"], "input_max_len": 48, "max_new_tokens": 8, "batch_size": 4},
        "cache_config": {"page_size": 4},
        "quantization": {"keep_packed": False},
        "threads": 1,  # tests run on all cores
    }
    for name, value in sections.items():
        case[name] = case.get(name, {}) | value if isinstance(value, dict) else value
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(yaml.safe_dump(case))
    new.replace(path)  # ranks write and read the same file at the same time
    return path


def tiny_case(folder: Path, model: Path, **sections: Any) -> Case:
    return load_case(str(write_case(folder / "tiny.yaml", model, **sections)))


def make_runner(case: Case, results: Path, platform: PlatformMaker | None = None) -> ModelRunner:
    runner = new_runner(case, results, ONE_RANK)
    runner.setup(platform)
    return runner


@torch.no_grad()
def oracle_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].float()


@torch.no_grad()
def rounding_bound(oracle: PreTrainedModel, prompts: list[list[int]]) -> float:
    """Returns how far rounding to float32 may move a logit of `oracle`, which depends on how much the model amplifies.

    A float32 sum of k products, in whatever order an instruction set takes it, is the exact sum of products that are
    each changed by some sqrt(k / 2) units of roundoff. No sum of a tiny model has more than 256 products, so the bound
    is the most that logits move when every weight changes by 16 units, up or down by chance."""
    chance, changed = torch.Generator().manual_seed(0), copy.deepcopy(oracle)
    for weight in changed.parameters():
        weight.mul_(1 + 2**-20 * (2 * torch.randint(2, weight.shape, generator=chance) - 1))
    bound = max(float((oracle_logits(changed, ids) - oracle_logits(oracle, ids)).abs().max()) for ids in prompts)
    assert 0 < bound < 1e-3  # known mistakes move logits 30 times as far
    return bound

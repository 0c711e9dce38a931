"""The model families by `model_type`, and which of them a config.json belongs to. Their modules are imported on demand:
reading a config needs no torch."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbra.base.errors import UserError, listed, short
from umbra.base.files import read_json
from umbra.models.config import ModelConfig
from umbra.models.hf_config import read_hf_config

if TYPE_CHECKING:
    from umbra.models.build import Build
    from umbra.models.causal_lm import CausalLM


@dataclass(frozen=True)
class Family:
    """The names of a family's classes, each as `module:name`."""

    config: str  # a models.config.ModelConfig
    model: str  # a models.causal_lm.CausalLM; its name is also that in a config.json's `architectures`
    old_types: tuple[str, ...] = ()  # `model_type` in early checkpoints, if `architectures` names the model
    pictured: tuple[str, ...] = ()  # `model_type` of models that also see pictures
    # Parts of tensors' names that some files have, each with the model's.
    aliases: Mapping[str, str] = field(default_factory=dict)


FAMILIES = {
    "qwen3_moe": Family(
        "umbra.models.qwen3_moe.config:Qwen3MoeConfig", "umbra.models.qwen3_moe.model:Qwen3MoeForCausalLM"
    ),
    "qwen2_moe": Family(
        "umbra.models.qwen2_moe.config:Qwen2MoeConfig", "umbra.models.qwen2_moe.model:Qwen2MoeForCausalLM"
    ),
    "glm4_moe": Family("umbra.models.glm4_moe.config:Glm4MoeConfig", "umbra.models.glm4_moe.model:Glm4MoeForCausalLM"),
    "gpt_oss": Family("umbra.models.gpt_oss.config:GptOssConfig", "umbra.models.gpt_oss.model:GptOssForCausalLM"),
    "qwen3_next": Family(
        "umbra.models.qwen3_next.config:Qwen3NextConfig", "umbra.models.qwen3_next.model:Qwen3NextForCausalLM"
    ),
    "qwen3_5_moe": Family(
        "umbra.models.qwen3_5_moe.config:Qwen3_5MoeConfig",
        "umbra.models.qwen3_5_moe.model:Qwen3_5MoeForCausalLM",
        ("qwen3_5_moe_text",),
        aliases={"model.language_model": "model"},
    ),
    "deepseek_v2": Family(
        "umbra.models.deepseek.config:DeepseekV2Config", "umbra.models.deepseek.model:DeepseekV2ForCausalLM"
    ),
    "deepseek_v3": Family(
        "umbra.models.deepseek.config:DeepseekV3Config",
        "umbra.models.deepseek.model:DeepseekV3ForCausalLM",
        ("kimi_k2",),
        pictured=("kimi_k25",),
        aliases={"language_model.model": "model", "language_model.lm_head": "lm_head"},
    ),
    "glm4_moe_lite": Family(
        "umbra.models.deepseek.config:Glm4MoeLiteConfig", "umbra.models.deepseek.model:Glm4MoeLiteForCausalLM"
    ),
    "minimax_m2": Family(
        "umbra.models.minimax_m2.config:MiniMaxM2Config",
        "umbra.models.minimax_m2.model:MiniMaxM2ForCausalLM",
        ("minimax",),
        aliases={"mlp": "block_sparse_moe"},
    ),
}
# Models that are easily taken for one of a family above, by their `model_type`.
OTHERS = {
    "minimax": "MiniMax-01",
    "minimax_text_01": "MiniMax-01",
    "minimax_m1": "MiniMax-M1",
    "minimax_m3": "MiniMax-M3",
    "minimax_m3_vl": "MiniMax-M3",
    "qwen3_5": "dense Qwen3.5",
    "qwen3_5_text": "dense Qwen3.5",
    "qwen4_exp": "Qwen4",
}


def family_of(config: Mapping[str, Any]) -> str | None:
    """The family that the contents of a config.json belong to; None: it is not supported."""
    kind, architectures = config.get("model_type"), config.get("architectures")
    for name, family in FAMILIES.items():
        known = kind == name or kind in family.pictured
        if known or (kind in family.old_types and architectures == [family.model.partition(":")[2]]):
            return name
    return None


def family_in(folder: Path) -> str:
    """The family of the checkpoint in `folder`; raises UserError if that is not supported."""
    config = config_in(folder)
    if (family := family_of(config)) is None:
        raise UserError(f"{folder / 'config.json'}: {_refusal(config)}")
    return family


def config_in(folder: Path) -> dict[str, Any]:
    """The config.json in `folder`; raises UserError if that is no checkpoint."""
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise UserError(
                f"{folder}: holds a LoRA adapter, not a model: merge it into its base model (PEFT's "
                "merge_and_unload), and give the folder of the result"
            )
        if files := sorted(path.name for path in folder.glob("*.gguf")):
            raise UserError(f"{folder}: give one of its GGUF files by its path: {listed(files)}")
        raise UserError(f"{path} does not exist: give the folder of a checkpoint, which also has its *.safetensors")
    return read_json(path)


def aliases_of(config: Mapping[str, Any]) -> Mapping[str, str]:
    """The aliases of the family that the contents of a config.json belong to."""
    family = family_of(config)
    return FAMILIES[family].aliases if family else {}


def read_config(folder: Path, model_type: str) -> ModelConfig:
    """The config of the checkpoint in `folder`, which must belong to the family `model_type`."""
    hf = read_hf_config(folder)
    if (family := family_of(hf.data)) != model_type:
        note = "" if family else f": {_refusal(hf.data)}"
        raise hf.error("model_type", f"does not match the case's model_name: {model_type!r}{note}")
    config: type[ModelConfig] = load(FAMILIES[model_type].config)
    return config.from_folder(folder)


def _refusal(config: Mapping[str, Any]) -> str:
    """Returns why the contents of a config.json belong to no family, for an error line."""
    kind = config.get("model_type")
    other = OTHERS.get(kind) if isinstance(kind, str) else None
    note = f" ({other}, another architecture)" if other else ""
    return f"model_type: {short(kind)}{note} is not supported, only {', '.join(FAMILIES)}"


def model_class(model_type: str) -> "Callable[[ModelConfig, Build], CausalLM]":
    """The class of the family's model; it takes the family's own config class."""
    model: Callable[[ModelConfig, Build], CausalLM] = load(FAMILIES[model_type].model)
    return model


def load(path: str) -> Any:
    """Imports the module in `module:name` and returns the object `name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)

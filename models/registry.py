"""The model families by name, and which of them a config.json belongs to. Their modules are imported on demand: reading
a config needs no torch."""

import functools
import importlib
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbra.base.errors import UserError, listed, short
from umbra.base.files import read_json
from umbra.models.config import ModelConfig
from umbra.models.family import Family, Shape
from umbra.models.gguf.architecture import Architecture
from umbra.models.hf_config import read_hf_config
from umbra.text.conventions import Conventions

if TYPE_CHECKING:
    from umbra.models.build import Build
    from umbra.models.causal_lm import CausalLM

FAMILIES = {  # the record of each family, as `module:name`
    "qwen3_moe": "umbra.models.qwen3_moe.family:QWEN3_MOE",
    "qwen2_moe": "umbra.models.qwen2_moe.family:QWEN2_MOE",
    "glm4_moe": "umbra.models.glm4_moe.family:GLM4_MOE",
    "hy_v3": "umbra.models.glm4_moe.family:HY_V3",
    "gpt_oss": "umbra.models.gpt_oss.family:GPT_OSS",
    "qwen3_next": "umbra.models.qwen3_next.family:QWEN3_NEXT",
    "qwen4_exp": "umbra.models.qwen4_exp.family:QWEN4_EXP",
    "qwen3_5_moe": "umbra.models.qwen3_5_moe.family:QWEN3_5_MOE",
    "qwen3": "umbra.models.dense.family:QWEN3",
    "qwen2": "umbra.models.dense.family:QWEN2",
    "llama": "umbra.models.dense.family:LLAMA",
    "mistral": "umbra.models.dense.family:MISTRAL",
    "ministral": "umbra.models.dense.family:MINISTRAL",
    "ministral3": "umbra.models.dense.family:MINISTRAL3",
    "qwen3_5": "umbra.models.qwen3_5.family:QWEN3_5",
    "deepseek_v2": "umbra.models.deepseek.family:DEEPSEEK_V2",
    "deepseek_v3": "umbra.models.deepseek.family:DEEPSEEK_V3",
    "glm4_moe_lite": "umbra.models.deepseek.family:GLM4_MOE_LITE",
    "kimi_linear": "umbra.models.kimi_linear.family:KIMI_LINEAR",
    "gemma4": "umbra.models.gemma4.family:GEMMA4",
    "minimax_m2": "umbra.models.minimax_m2.family:MINIMAX_M2",
}


def family(name: str) -> Family:
    """Returns the record of the family `name`."""
    record: Family = load(FAMILIES[name])
    return record


def families() -> list[Family]:
    """Returns the records of all families, in the registry's order."""
    return [family(name) for name in FAMILIES]


def architectures() -> dict[str, Architecture]:
    """Returns llama.cpp's architectures that a family has, by their names."""
    return {record.gguf.name: record.gguf for record in families() if record.gguf}


def shapes() -> dict[str, Shape]:
    """Returns the sizes of published models, by their names."""
    return {name: shape for record in families() for name, shape in record.shapes.items()}


def conventions() -> Conventions:
    """Returns what all records say of texts."""
    return functools.reduce(operator.or_, (record.text for record in families()), Conventions())


def family_of(config: Mapping[str, Any]) -> str | None:
    """Returns the name of the family that the contents of a config.json belong to; None: it is not supported."""
    kind, architectures = config.get("model_type"), config.get("architectures")
    for record in families():
        of_text = inner.get("model_type") if isinstance(inner := config.get("text_config"), dict) else None
        pictured = kind in record.pictured and of_text in (None, record.name, *record.old_types)
        if kind == record.name or pictured or (kind in record.old_types and architectures == [record.architecture]):
            return record.name
    return None


def family_in(folder: Path) -> str:
    """Returns the name of the family of the checkpoint in `folder`; raises UserError if that is not supported."""
    config = config_in(folder)
    if (name := family_of(config)) is None:
        raise UserError(f"{folder / 'config.json'}: {_refusal(config)}")
    return name


def config_in(folder: Path) -> dict[str, Any]:
    """Returns the contents of the config.json in `folder`; raises UserError if that is no checkpoint."""
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
    """Returns the aliases of the family that the contents of a config.json belong to."""
    name = family_of(config)
    return family(name).aliases if name else {}


def read_config(folder: Path, model_type: str) -> ModelConfig:
    """Returns the config of the checkpoint in `folder`, which must belong to the family `model_type`."""
    hf = read_hf_config(folder)
    if (name := family_of(hf.data)) != model_type:
        note = "" if name else f": {_refusal(hf.data)}"
        raise hf.error("model_type", f"does not match the case's model_name: {model_type!r}{note}")
    config: type[ModelConfig] = load(family(model_type).config)
    return config.from_folder(folder)


def _refusal(config: Mapping[str, Any]) -> str:
    """Returns why the contents of a config.json belong to no family, for an error line."""
    kind = config.get("model_type")
    other = next((record.others[kind] for record in families() if isinstance(kind, str) and kind in record.others), "")
    note = f" ({other}, another architecture)" if other else ""
    return f"model_type: {short(kind)}{note} is not supported, only {', '.join(FAMILIES)}"


def model_class(model_type: str) -> "Callable[[ModelConfig, Build], CausalLM]":
    """Returns the class of the family's model, which takes the family's own config class."""
    model: Callable[[ModelConfig, Build], CausalLM] = load(family(model_type).model)
    return model


def load(path: str) -> Any:
    """Imports the module in `module:name` and returns the object `name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)

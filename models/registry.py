"""The model families by `model_type`. Their modules are imported on demand: reading a config needs no torch."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.config import ModelConfig

if TYPE_CHECKING:
    from models.build import Build
    from models.causal_lm import CausalLM


@dataclass(frozen=True)
class Family:
    """The places of a family's classes, each as `module:name`."""

    config: str  # place of a models.config.ModelConfig
    model: str  # place of a models.causal_lm.CausalLM


FAMILIES = {
    "qwen3_moe": Family("models.qwen3_moe.config:Qwen3MoeConfig", "models.qwen3_moe.model:Qwen3MoeForCausalLM"),
}


def config_class(model_type: str) -> type[ModelConfig]:
    config: type[ModelConfig] = load(FAMILIES[model_type].config)
    return config


def model_class(model_type: str) -> "Callable[[ModelConfig, Build], CausalLM]":
    """The class of the family's model; it takes the family's own config class."""
    model: Callable[[ModelConfig, Build], CausalLM] = load(FAMILIES[model_type].model)
    return model


def load(place: str) -> Any:
    """Imports the module in `module:name` and returns the object `name`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)

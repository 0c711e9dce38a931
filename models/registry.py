"""The model families by `model_type`: a lazily importing registry; reading a model's config needs no torch."""

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """Both as module:name."""

    config: str
    model: str


FAMILIES = {
    "qwen3_moe": Family("models.qwen3_moe.config:Qwen3MoeConfig", "models.qwen3_moe.model:Qwen3MoeForCausalLM"),
}


def config_class(model_name: str) -> Any:
    return load(FAMILIES[model_name].config)


def model_class(model_name: str) -> Any:
    return load(FAMILIES[model_name].model)


def load(place: str) -> Any:
    """The object at `module:name`, imported only now."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)

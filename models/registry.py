"""The architectures by `model_type`: a lazily importing registry; reading a model's config needs no torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.qwen3_moe.config import Qwen3MoeConfig

MODELS = {"qwen3_moe": "models.qwen3_moe.config:Qwen3MoeConfig"}


def config_class(model_name: str) -> "type[Qwen3MoeConfig]":
    return load(MODELS[model_name])


def load(place: str) -> Any:
    """The object at `module:name`, imported only now."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)

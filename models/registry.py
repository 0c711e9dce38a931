"""The architectures by `model_type`: a lazily importing registry; reading a model's config needs no torch."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.qwen3_moe.config import Qwen3MoeConfig


@dataclass(frozen=True)
class ModelEntry:
    config: str  # module:class with from_hf(dict, where) and check_parallel(...)
    runner: str  # module:class, a ModelRunner


MODELS = {
    "qwen3_moe": ModelEntry("models.qwen3_moe.config:Qwen3MoeConfig", "executor.qwen3_moe_runner:Qwen3MoeRunner"),
}


def config_class(model_name: str) -> "type[Qwen3MoeConfig]":
    return load(MODELS[model_name].config)


def load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)

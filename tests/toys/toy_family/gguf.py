"""The toy family's GGUF files."""

from typing import Any

from tests.toys.toy_family.config import ToyMoeConfig
from umbra.models.gguf.architecture import SIGMOID, Architecture
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.names import ATTENTION, NORMS, Names

NAMES = {**NORMS, **ATTENTION, "ffn_gate_inp": "mixture.chooser"}


def read(keys: Keys) -> dict[str, Any]:
    return {"num_experts": keys.size("toy.experts"), "moe_intermediate_size": keys.expert_width()}


def write(config: ToyMoeConfig) -> dict[str, Any]:
    return {"toy.experts": config.num_experts, "expert_gating_func": SIGMOID}


TOY_MOE = Architecture("toy-moe", Names(NAMES, ("open", "wide", "close"), "mixture.experts"), (SIGMOID,), read, write)

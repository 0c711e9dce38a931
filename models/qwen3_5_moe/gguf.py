"""The GGUF files of Qwen3.5-MoE and Qwen3.6-MoE."""

from typing import Any

from umbra.models.gguf.architecture import SOFTMAX, Architecture
from umbra.models.gguf.names import Names
from umbra.models.hybrid_config import MTP, HybridConfig
from umbra.models.hybrid_gguf import TENSORS, read, write

NAMES = {**TENSORS, "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}


def with_sections(config: HybridConfig) -> dict[str, Any]:
    return {**write(config), "rope.dimension_sections": [11, 11, 10, 0]}


QWEN35MOE = Architecture(
    "qwen35moe",
    Names(NAMES, plus_one=True, mtp=MTP, tiled=True),
    gatings=(SOFTMAX,),
    read=read,
    write=with_sections,
    partial=True,
)

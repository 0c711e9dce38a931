"""gpt-oss's GGUF files."""

from typing import Any

from umbra.models.gguf.architecture import SOFTMAX_OF_CHOSEN, Architecture
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.names import ATTENTION, NORMS_NAMED_BY_PLACE, Names
from umbra.models.gpt_oss.config import GptOssConfig

NAMES = {**NORMS_NAMED_BY_PLACE, **ATTENTION, "attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router"}


def read(keys: Keys) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_local_experts": keys.size("expert_count"),
        "intermediate_size": keys.expert_width(),
        "sliding_window": keys.size("attention.sliding_window"),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
    }
    if scaling := keys.scaling():
        config["rope_scaling"] = scaling | {"truncate": False}
    return config


def write(config: GptOssConfig) -> dict[str, Any]:
    return {"attention.sliding_window": config.sliding_window}


GPT_OSS = Architecture(
    "gpt-oss",
    Names(NAMES, fused=True),
    gatings=(SOFTMAX_OF_CHOSEN,),
    read=read,
    write=write,
    assumed="windows in layers 0, 2, 4 ..., swiglu_alpha 1.702, swiglu_limit 7, YaRN without truncation",
)

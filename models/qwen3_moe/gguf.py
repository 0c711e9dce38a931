"""Qwen3-MoE's GGUF files."""

from typing import Any

from umbra.base.errors import UserError
from umbra.models.gguf.architecture import SOFTMAX, Architecture
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.names import ATTENTION, MLP, NORMS, Names
from umbra.models.qwen3_moe.config import Qwen3MoeConfig


def read(keys: Keys) -> dict[str, Any]:
    return {
        "num_experts": keys.size("expert_count"),
        "intermediate_size": keys.size("feed_forward_length", default=1),
        "moe_intermediate_size": keys.expert_width(),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
    }


def write(config: Qwen3MoeConfig) -> dict[str, Any]:
    if config.attention_bias or not config.norm_topk_prob:
        raise UserError("GGUF: biases and norm_topk_prob: false are not written")
    return {}


QWEN3MOE = Architecture(
    "qwen3moe",
    Names({**NORMS, **ATTENTION, **MLP, "ffn_gate_inp": "mlp.gate"}),
    gatings=(SOFTMAX,),
    read=read,
    write=write,
    assumed="norm_topk_prob true",
)

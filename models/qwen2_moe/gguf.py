"""The GGUF files of Qwen2-MoE and Qwen1.5-MoE."""

from typing import Any

from umbra.base.errors import UserError
from umbra.models.gguf.architecture import SOFTMAX, Architecture
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.layers import with_shared_width
from umbra.models.gguf.names import ATTENTION, MLP, NORMS, Names, shared_expert
from umbra.models.qwen2_moe.config import Qwen2MoeConfig

NAMES = {
    **NORMS,
    **ATTENTION,
    **MLP,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **shared_expert("mlp.shared_expert"),
}


def read(keys: Keys) -> dict[str, Any]:
    return {
        **with_shared_width(keys),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "qkv_bias": keys.has("blk.0.attn_q.bias"),
    }


def write(config: Qwen2MoeConfig) -> dict[str, Any]:
    if config.norm_topk_prob or not all(config.sparse_layers):
        raise UserError("GGUF: norm_topk_prob: true and dense layers are not written")
    return {"expert_shared_feed_forward_length": config.shared_width}


QWEN2MOE = Architecture("qwen2moe", Names(NAMES), (SOFTMAX,), read, write, assumed="norm_topk_prob false")

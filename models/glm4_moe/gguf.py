"""The GGUF files of GLM-4.5-Air, 4.5, 4.6 and 4.7."""

from typing import Any

from umbra.base.errors import UserError
from umbra.models.gguf.architecture import SIGMOID, Architecture
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.layers import shared_count, with_shared_count
from umbra.models.gguf.names import ATTENTION, MLP, NORMS_NAMED_BY_PLACE, SELECTION_BIAS, Names, shared_expert
from umbra.models.glm4_moe.config import MTP, Glm4MoeConfig

NAMES = {
    **NORMS_NAMED_BY_PLACE,
    **ATTENTION,
    **MLP,
    "ffn_gate_inp": "mlp.gate",
    **SELECTION_BIAS,
    **shared_expert("mlp.shared_experts"),
}


def read(keys: Keys) -> dict[str, Any]:
    return {
        **with_shared_count(keys, True),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
    }


def write(config: Glm4MoeConfig) -> dict[str, Any]:
    if config.use_qk_norm or not all(config.sparse_layers):
        raise UserError("GGUF: use_qk_norm and dense layers of glm4_moe are not written")
    return {"expert_gating_func": SIGMOID, **shared_count(config)}


GLM4MOE = Architecture(
    "glm4moe",
    Names(NAMES, mtp=MTP),
    gatings=(SIGMOID,),
    read=read,
    write=write,
    assumed="<|user|> and <|observation|> end an answer",
    partial=True,
    stops=("<|user|>", "<|observation|>"),
)

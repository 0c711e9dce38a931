"""The GGUF files of GLM-4.5-Air, 4.5, 4.6 and 4.7, and of Hy3."""

from typing import Any

from umbra.base.errors import UserError
from umbra.models.gguf.architecture import SIGMOID, Architecture
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.layers import shared_count, with_shared_count
from umbra.models.gguf.names import ATTENTION, MLP, NORMS, NORMS_NAMED_BY_PLACE, SELECTION_BIAS, Names, shared_expert
from umbra.models.glm4_moe.config import HY3_MTP, MTP, Glm4MoeConfig

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


def read_hy3(keys: Keys) -> dict[str, Any]:
    """Some files do not say how many layers are dense."""
    width, layers = keys.expert_width(), keys.predicting.start
    dense = next((i for i in range(layers) if keys.has(f"blk.{i}.ffn_gate_inp.weight")), layers)
    shared = keys.rows(f"blk.{dense}.ffn_gate_shexp.weight") or width
    return {
        "num_experts": keys.size("expert_count"),
        "num_shared_experts": shared // width,
        "intermediate_size": keys.size("feed_forward_length"),
        "moe_intermediate_size": width,
        "first_k_dense_replace": keys.size("leading_dense_block_count", default=dense, minimum=0),
        "router_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "route_norm": keys.flag("expert_weights_norm", True),
        "num_nextn_predict_layers": len(keys.predicting),
    }


def write_hy3(config: Glm4MoeConfig) -> dict[str, Any]:
    dense = config.sparse_layers.count(False)
    if any(config.sparse_layers[:dense]):
        raise UserError("GGUF: dense layers behind sparse ones are not written")
    shared = {"leading_dense_block_count": dense, "expert_shared_feed_forward_length": config.shared_width}
    return {"expert_gating_func": SIGMOID, **shared_count(config), **shared}


HY3_NAMES = {
    **NORMS_NAMED_BY_PLACE,
    **NORMS,  # in other files
    **ATTENTION,
    **MLP,
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b.bias": "mlp.expert_bias",
    **shared_expert("mlp.shared_mlp"),
}
HY3 = Architecture("hy_v3", Names(HY3_NAMES, mtp=HY3_MTP), (SIGMOID,), read_hy3, write_hy3)

"""GGUF files of decoders with gated DeltaNet layers and attention in turn."""

from collections.abc import Callable
from typing import Any

from umbra.base.errors import UserError
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.layers import with_delta_net, with_shared_width
from umbra.models.gguf.names import ATTENTION, DELTA_NET, NORMS_NAMED_BY_PLACE, shared_expert
from umbra.models.hybrid_config import HybridConfig, HybridMoeConfig

LAYERS = {**NORMS_NAMED_BY_PLACE, **ATTENTION, **DELTA_NET}
TENSORS = {
    **LAYERS,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **shared_expert("mlp.shared_expert"),
}
SMALL_PROJECTIONS = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}


def read_dense(keys: Keys) -> dict[str, Any]:
    return {
        "intermediate_size": keys.size("feed_forward_length"),
        "full_attention_interval": keys.size("full_attention_interval", default=4),
        "mtp_num_hidden_layers": len(keys.predicting),
        **with_delta_net(keys),
    }


def read(keys: Keys) -> dict[str, Any]:
    return {
        **with_shared_width(keys),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "full_attention_interval": keys.size("full_attention_interval", default=4),
        "mtp_num_hidden_layers": len(keys.predicting),
        **with_delta_net(keys),
    }


def write_dense(config: HybridConfig) -> dict[str, Any]:
    every = (*config.linear_layers, False).index(False) + 1
    if any(linear != bool((i + 1) % every) for i, linear in enumerate(config.linear_layers)):
        raise UserError("GGUF: layer_types that do not repeat are not written")
    return {
        "full_attention_interval": every,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }


def write(config: HybridMoeConfig) -> dict[str, Any]:
    if not config.norm_topk_prob:
        raise UserError("GGUF: norm_topk_prob: false is not written")
    return {**write_dense(config), "expert_shared_feed_forward_length": config.shared_width}


def with_sections(write: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Returns `write` with the axes of the rotary embedding, of which text has one."""
    return lambda config: {**write(config), "rope.dimension_sections": [11, 11, 10, 0]}

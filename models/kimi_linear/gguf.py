"""Kimi-Linear's GGUF files."""

from typing import Any

from umbra.base.errors import UserError
from umbra.models.gguf.architecture import SIGMOID, Architecture
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.layers import latents, shared_count, with_latents, with_shared_count
from umbra.models.gguf.names import (
    ATTENTION,
    CHANNEL_DELTA_NET,
    LATENT_ATTENTION,
    MLP,
    NORMS,
    SELECTION_BIAS,
    Names,
    shared_expert,
)
from umbra.models.kimi_linear.config import KimiLinearConfig

NAMES = {
    **NORMS,
    **ATTENTION,
    **LATENT_ATTENTION,
    **CHANNEL_DELTA_NET,
    **MLP,
    "ffn_gate_inp": "mlp.gate",
    **SELECTION_BIAS,
    **shared_expert("mlp.shared_experts"),
}


def read(keys: Keys) -> dict[str, Any]:
    """Layers without heads of keys and values have states."""
    name, layers = f"{keys.name}.attention.head_count_kv", keys.size("block_count")
    heads = keys.all.sizes(name)
    if len(heads) != layers:
        raise keys.all.error(name, f"must say a number for each of {layers} layers")
    numbers = range(1, layers + 1)
    return {
        **with_shared_count(keys, True),
        **with_latents(keys, any(keys.has(f"blk.{i}.attn_q_a.weight") for i in range(layers))),
        "linear_attn_config": {
            "kda_layers": [number for number in numbers if not heads[number - 1]],
            "full_attn_layers": [number for number in numbers if heads[number - 1]],
            "num_heads": keys.size("attention.head_count"),
            "head_dim": keys.size("kda.head_dim"),
            "short_conv_kernel_size": keys.size("ssm.conv_kernel"),
        },
    }


def write(config: KimiLinearConfig) -> dict[str, Any]:
    if config.linear_num_heads != config.num_attention_heads:
        raise UserError("GGUF: linear_num_heads that are not num_attention_heads are not written")
    return {
        "expert_gating_func": SIGMOID,
        **shared_count(config),
        "leading_dense_block_count": config.sparse_layers.index(True),
        "attention.head_count_kv": [0 if linear else 1 for linear in config.linear_layers],
        **latents(config),
        "rope.dimension_count": config.qk_rope_head_dim,  # columns that would rotate
        "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
    }


KIMI_LINEAR = Architecture(
    "kimi-linear",
    Names(NAMES, ("w1", "w3", "w2"), channels=True),
    gatings=(SIGMOID,),
    read=read,
    write=write,
    assumed="renormalised weights of experts",
    own_attention=True,
)

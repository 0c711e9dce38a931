"""The metadata of layers that several families have, by the keys of config.json and of GGUF files."""

from typing import Any

from umbra.models.gguf.keys import Keys


def with_shared_width(keys: Keys) -> dict[str, Any]:
    """Returns the keys of mixtures beside a shared expert of a width of its own."""
    shared = keys.rows("blk.0.ffn_gate_shexp.weight")
    return {
        "num_experts": keys.size("expert_count"),
        "moe_intermediate_size": keys.expert_width(),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", default=shared),
    }


def with_shared_count(keys: Keys, renormalised: bool) -> dict[str, Any]:
    """Returns the keys of mixtures beside a shared expert that is several of the others' width, behind dense layers.
    `renormalised`: the weights of experts are, if the file does not say it."""
    return {
        "n_routed_experts": keys.size("expert_count"),
        "n_shared_experts": keys.size("expert_shared_count"),
        "intermediate_size": keys.size("feed_forward_length"),
        "moe_intermediate_size": keys.expert_width(),
        "first_k_dense_replace": keys.size("leading_dense_block_count", default=0, minimum=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", renormalised),
        "num_nextn_predict_layers": len(keys.predicting),
    }


def shared_count(config: Any) -> dict[str, Any]:
    """Returns the metadata of such mixtures in every layer."""
    return {
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "leading_dense_block_count": 0,
    }


def with_latents(keys: Keys, compressed: bool) -> dict[str, Any]:
    """Returns the keys of attention over latents, which queries have too if they are `compressed`. Older files have the
    lengths of heads under the names of other architectures; later ones have those of latents there."""
    turning = keys.size("rope.dimension_count")
    key = keys.size("attention.key_length_mla", "attention.key_length", minimum=turning + 1)
    return {
        "q_lora_rank": keys.size("attention.q_lora_rank") if compressed else None,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": key - turning,
        "v_head_dim": keys.size("attention.value_length_mla", "attention.value_length"),
    }


def latents(config: Any) -> dict[str, Any]:
    """Returns the metadata of attention over latents."""
    return {
        "attention.kv_lora_rank": config.kv_lora_rank,
        **({"attention.q_lora_rank": config.q_lora_rank} if config.q_lora_rank else {}),
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
    }


def with_delta_net(keys: Keys) -> dict[str, int]:
    """Returns the keys of gated DeltaNet layers."""
    heads, key_heads = keys.size("ssm.time_step_rank"), keys.size("ssm.group_count")
    inner = keys.size("ssm.inner_size")
    if heads % key_heads or inner % heads:
        raise keys.all.error(
            f"{keys.name}.ssm.time_step_rank",
            f"must be a multiple of ssm.group_count: {key_heads}, and divide ssm.inner_size: {inner}",
        )
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
    }

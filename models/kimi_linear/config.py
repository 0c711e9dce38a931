"""Kimi-Linear's config.json, as published and as transformers writes it, as one checked dataclass."""

from dataclasses import dataclass
from pathlib import Path

from umbra.models.config import check_even_split
from umbra.models.hf_config import HfConfig, read_hf_config
from umbra.models.hybrid_config import linear_by_types
from umbra.models.latent_config import LatentDecoderConfig
from umbra.models.moe_config import check_routing, read_sizes, sparse_by_types
from umbra.models.rope import RopeConfig

SIZES = {
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 1,
    "num_experts": 256,
    "moe_intermediate_size": 1024,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
OWN = "linear_attn_config"  # of published files, for keys that transformers has beside the others


@dataclass(frozen=True)
class KimiLinearConfig(LatentDecoderConfig):
    """`qk_rope_head_dim` columns of keys are shared by all heads, and do not rotate."""

    linear_num_heads: int
    linear_head_dim: int
    linear_conv_kernel_dim: int
    linear_layers: tuple[bool, ...]  # for each layer whether it has a state in place of cached latents

    @classmethod
    def from_folder(cls, folder: Path) -> "KimiLinearConfig":
        hf = read_hf_config(folder)
        hf.refuse("hidden_act", "silu")
        hf.refuse("attention_bias", False)
        hf.refuse("mla_use_nope", True)
        hf.refuse("moe_router_activation_func", "sigmoid")
        hf.refuse("moe_layer_freq", 1)
        hf.refuse("num_nextn_predict_layers", 0)
        for groups in ("num_expert_group", "n_group"):
            hf.refuse(groups, 1)
        sizes = read_sizes(hf, SIZES, ("num_experts", "num_local_experts", "n_routed_experts"))
        layers, width = sizes["num_hidden_layers"], sizes["qk_rope_head_dim"]
        own = hf.inner(OWN) if hf.value(OWN) is not None else hf
        config = cls(
            **sizes | {"head_dim": width, "num_key_value_heads": 1},
            max_position_embeddings=hf.size("model_max_length", "max_position_embeddings", default=1 << 20),
            num_experts_per_tok=hf.size("num_experts_per_token", "num_experts_per_tok", default=8),
            n_shared_experts=hf.size("num_shared_experts", "n_shared_experts", default=1),
            q_lora_rank=hf.size("q_lora_rank") if hf.value("q_lora_rank") is not None else 0,
            rms_norm_eps=hf.number("rms_norm_eps", default=1e-5),
            rope=RopeConfig(10000.0, 0, None),
            norm_topk_prob=hf.flag("moe_renormalize", hf.flag("norm_topk_prob", True)),
            sparse_layers=sparse_by_types(hf, layers, 1),
            routed_scaling_factor=hf.number("routed_scaling_factor", default=2.446),
            n_group=1,
            topk_group=1,
            num_nextn_predict_layers=0,
            linear_num_heads=own.size("num_heads", "linear_num_heads", default=32),
            linear_head_dim=own.size("head_dim" if own is not hf else "linear_head_dim", default=128),
            linear_conv_kernel_dim=own.size("short_conv_kernel_size", "linear_conv_kernel_dim", default=4),
            linear_layers=read_kinds(hf, layers),
        )
        check_routing(hf, config, "num_experts")
        return config

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (None,) * self.linear_layers.count(False)

    def check_parallel(
        self, attn_tp_size: int, moe_tp_size: int, moe_ep_size: int, embed_tp_size: int, lmhead_tp_size: int
    ) -> None:
        super().check_parallel(attn_tp_size, moe_tp_size, moe_ep_size, embed_tp_size, lmhead_tp_size)
        check_even_split("attn_tp_size", attn_tp_size, "linear_num_heads", self.linear_num_heads)


def read_kinds(hf: HfConfig, layers: int) -> tuple[bool, ...]:
    """`KimiLinearConfig.linear_layers`, by the names of layers or by lists of their numbers, which begin at one."""
    if kinds := hf.names("layer_types"):
        return linear_by_types(hf, kinds, layers)
    own = hf.inner(OWN)
    linear, full = own.sizes("kda_layers"), own.sizes("full_attn_layers")
    if sorted(linear + full) != [*range(1, layers + 1)] or not full:
        raise own.error("full_attn_layers", f"and kda_layers must have each layer from 1 to {layers} once")
    return tuple(number in linear for number in range(1, layers + 1))

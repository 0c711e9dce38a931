"""The part of config.json that decoders with gated DeltaNet layers and attention in turn share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from umbra.models import dense_config
from umbra.models.config import LARGEST_DEPTH, check_even_split, check_kv_split
from umbra.models.dense_config import DenseConfig
from umbra.models.hf_config import HfConfig
from umbra.models.moe_config import MoeConfig, read_sizes
from umbra.models.mtp_names import MtpNames
from umbra.models.rope import read_rope, read_rotary_dim

FULL, LINEAR = "full_attention", "linear_attention"
GATES = "silu", "swish"  # two names of one function
MTP = MtpNames("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0", "norm", "shared_head")
DEFAULTS = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}  # defaults of mixtures
TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class HybridConfig(DenseConfig):
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    mtp_num_hidden_layers: int  # layers that predict further tokens
    linear_layers: tuple[bool, ...]  # for each layer whether it has a state in place of cached keys and values

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (None,) * self.linear_layers.count(False)

    def check_parallel(
        self, attn_tp_size: int, moe_tp_size: int, moe_ep_size: int, embed_tp_size: int, lmhead_tp_size: int
    ) -> None:
        super().check_parallel(attn_tp_size, moe_tp_size, moe_ep_size, embed_tp_size, lmhead_tp_size)
        check_even_split("attn_tp_size", attn_tp_size, "linear_num_value_heads", self.linear_num_value_heads)
        check_kv_split(attn_tp_size, self.linear_num_key_heads, "linear_num_key_heads")


@dataclass(frozen=True)
class HybridMoeConfig(HybridConfig, MoeConfig):
    shared_expert_intermediate_size: int

    @property
    def shared_width(self) -> int:
        return self.shared_expert_intermediate_size


def read_dense_hybrid(hf: HfConfig, defaults: Mapping[str, int]) -> dict[str, Any]:
    """All fields of `HybridConfig`. `defaults` are those that differ between families."""
    return _hybrid(hf, dense_config.read_sizes(hf, {**DEFAULTS, **defaults}))


def read_hybrid(
    hf: HfConfig,
    defaults: Mapping[str, int],
    attending: tuple[str, ...] = (FULL,),
    gates: tuple[str, ...] = GATES,
    rotary: float = 0.25,
) -> dict[str, Any]:
    """All fields of `HybridMoeConfig` but `norm_topk_prob`. `defaults` are those that differ between families;
    `attending` the names of layers that attend, `gates` the functions of linear attention's gate that the family has,
    and `rotary` the share of a head that rotates, if the config does not say it."""
    hf.refuse("decoder_sparse_step", 1)
    hf.refuse("mlp_only_layers", [])
    sizes = read_sizes(hf, {**DEFAULTS, **EXPERTS, **defaults}, ("num_experts", "num_local_experts"))
    if not sizes["num_experts"]:
        raise hf.error("num_experts", "must be at least 1")
    return _hybrid(hf, sizes, attending, gates, rotary) | {
        "intermediate_size": sizes["moe_intermediate_size"],  # no layer is dense
        "sparse_layers": (True,) * sizes["num_hidden_layers"],
    }


def linear_by_types(hf: HfConfig, kinds: Sequence[str], layers: int) -> tuple[bool, ...]:
    """Returns for each of `layers` layers whether it has a state in place of caches; `kinds` are the names of theirs in
    `layer_types`."""
    if len(kinds) != layers or set(kinds) - {FULL, LINEAR} or FULL not in kinds:
        raise hf.error("layer_types", f"must be {layers} times {FULL} or {LINEAR}, {FULL} at least once")
    return tuple(kind == LINEAR for kind in kinds)


def text_with_tied(whole: HfConfig) -> tuple[HfConfig, dict[str, bool]]:
    """Returns access to what reads text in a model that may also see pictures, and whether the output head is its
    embedding, which the whole model's config says."""
    hf, tied = whole.text, whole.flag(TIED, False)
    if tied != hf.flag(TIED, tied):
        raise whole.error(TIED, "does not agree with text_config's")
    return hf, {TIED: tied}


def _hybrid(
    hf: HfConfig,
    sizes: dict[str, Any],
    attending: tuple[str, ...] = (FULL,),
    gates: tuple[str, ...] = GATES,
    rotary: float = 0.25,
) -> dict[str, Any]:
    hf.refuse("hidden_act", "silu")
    hf.refuse("attention_bias", False)
    hf.refuse("attn_output_gate", True)
    hf.refuse("output_gate_type", *gates)
    layers, dim = sizes["num_hidden_layers"], sizes["head_dim"]
    every = hf.size("full_attention_interval", default=4)
    kinds = hf.names("layer_types") or tuple(LINEAR if (i + 1) % every else FULL for i in range(layers))
    kinds = tuple(FULL if kind in attending else kind for kind in kinds)
    linear = linear_by_types(hf, kinds, layers)
    heads = sizes["linear_num_value_heads"]
    if heads % sizes["linear_num_key_heads"]:
        raise hf.error("linear_num_key_heads", f"does not divide linear_num_value_heads: {heads}")
    return sizes | {
        "rms_norm_eps": hf.number("rms_norm_eps", default=1e-6),
        "rope": read_rope(hf, read_rotary_dim(hf, dim, default=rotary), sizes["max_position_embeddings"]),
        "mtp_num_hidden_layers": hf.size("mtp_num_hidden_layers", default=1, minimum=0, maximum=LARGEST_DEPTH),
        "linear_layers": linear,
    }

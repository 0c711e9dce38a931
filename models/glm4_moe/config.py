"""The config.json of GLM-4-MoE, that of GLM-4.5-Air, 4.5, 4.6 and 4.7, and of Hy3, as checked dataclasses."""

from dataclasses import dataclass
from pathlib import Path

from umbra.models.config import LARGEST_DEPTH
from umbra.models.hf_config import read_hf_config
from umbra.models.moe_config import MoeConfig, check_routing, read_sizes, sparse_by_types
from umbra.models.mtp_names import MtpNames
from umbra.models.rope import read_rope, read_rotary_dim

DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
}
HY3_DEFAULTS = {
    "vocab_size": 120832,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
}
EXPERTS = "n_routed_experts"
MTP = MtpNames("model.layers.{}", "enorm", "hnorm", "eh_proj", "", "shared_head.norm", "shared_head.head")
HY3_MTP = MtpNames("model.layers.{}", "enorm", "hnorm", "eh_proj", "", "final_layernorm")


@dataclass(frozen=True)
class Glm4MoeConfig(MoeConfig):
    n_shared_experts: int  # which are one expert of so many times the width
    attention_bias: bool  # of queries, keys and values alone
    use_qk_norm: bool
    routed_scaling_factor: float
    num_nextn_predict_layers: int

    @classmethod
    def from_folder(cls, folder: Path) -> "Glm4MoeConfig":
        hf = read_hf_config(folder)
        hf.refuse("hidden_act", "silu")
        hf.refuse("scoring_func", "sigmoid")  # official files do not have the key
        hf.refuse("n_group", 1)
        hf.refuse("topk_group", 1)
        sizes = read_sizes(hf, DEFAULTS, (EXPERTS, "num_local_experts", "num_experts"))
        layers, head_dim = sizes["num_hidden_layers"], sizes["head_dim"]
        dense = hf.size("first_k_dense_replace", default=1, minimum=0, maximum=LARGEST_DEPTH)
        rotary = read_rotary_dim(hf, head_dim, default=0.5)
        config = cls(
            **sizes,
            rms_norm_eps=hf.number("rms_norm_eps", default=1e-5),
            rope=read_rope(hf, rotary, sizes["max_position_embeddings"], kinds=("default",)),
            norm_topk_prob=hf.flag("norm_topk_prob", True),
            sparse_layers=tuple(layer >= dense for layer in range(layers)),
            attention_bias=hf.flag("attention_bias", False),
            use_qk_norm=hf.flag("use_qk_norm", False),
            routed_scaling_factor=hf.number("routed_scaling_factor", default=1.0),
            num_nextn_predict_layers=hf.size(
                "num_nextn_predict_layers", "num_mtp_layers", default=1, minimum=0, maximum=LARGEST_DEPTH
            ),
        )
        check_routing(hf, config, EXPERTS)
        return config

    @property
    def shared_width(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size


class HyV3Config(Glm4MoeConfig):
    """Heads rotate whole and have norms, and the weights of experts are always renormalised."""

    @classmethod
    def from_folder(cls, folder: Path) -> "HyV3Config":
        hf = read_hf_config(folder)
        hf.refuse("hidden_act", "silu")
        for key in ("attention_bias", "mlp_bias"):
            hf.refuse(key, False)
        for key in ("qk_norm", "route_norm", "moe_router_enable_expert_bias", "moe_router_use_sigmoid"):
            hf.refuse(key, True)
        sizes = read_sizes(hf, HY3_DEFAULTS, ("num_experts", "num_local_experts"))
        config = cls(
            **sizes,
            n_shared_experts=hf.size("num_shared_experts", default=1),
            rms_norm_eps=hf.number("rms_norm_eps", default=1e-5),
            rope=read_rope(hf, sizes["head_dim"], sizes["max_position_embeddings"], 11158840.0, kinds=("default",)),
            norm_topk_prob=True,
            sparse_layers=sparse_by_types(hf, sizes["num_hidden_layers"], dense=1),
            attention_bias=False,
            use_qk_norm=True,
            routed_scaling_factor=hf.number("router_scaling_factor", default=2.826),
            num_nextn_predict_layers=hf.size("num_nextn_predict_layers", default=1, minimum=0, maximum=LARGEST_DEPTH),
        )
        check_routing(hf, config, "num_experts")
        return config

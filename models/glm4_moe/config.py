"""GLM-4-MoE's config.json, that of GLM-4.5-Air, 4.5, 4.6 and 4.7, as one checked dataclass."""

from dataclasses import dataclass
from pathlib import Path

from umbra.models.config import LARGEST_DEPTH
from umbra.models.hf_config import read_hf_config
from umbra.models.moe_config import MoeConfig, check_routing, read_sizes
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
EXPERTS = "n_routed_experts"
MTP = MtpNames("model.layers.{}", "enorm", "hnorm", "eh_proj", "", "shared_head.norm", "shared_head.head")


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

"""Qwen2-MoE's config.json, also that of Qwen1.5-MoE, as one checked dataclass."""

from dataclasses import dataclass
from pathlib import Path

from umbra.models.hf_config import read_hf_config
from umbra.models.moe_config import MoeConfig, check_routing, read_sizes, sparse_by_step
from umbra.models.rope import read_rope

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}


@dataclass(frozen=True)
class Qwen2MoeConfig(MoeConfig):
    shared_expert_intermediate_size: int
    qkv_bias: bool

    @classmethod
    def from_folder(cls, folder: Path) -> "Qwen2MoeConfig":
        hf = read_hf_config(folder)
        hf.refuse("hidden_act", "silu")
        hf.refuse("use_sliding_window", False)
        if other := set(hf.names("layer_types")) - {"full_attention"}:
            raise hf.error("layer_types", f"has {min(other)}, which is not implemented")
        sizes = read_sizes(hf, DEFAULTS, ("num_experts", "num_local_experts"))
        config = cls(
            **sizes,
            rms_norm_eps=hf.number("rms_norm_eps", default=1e-6),
            rope=read_rope(hf, sizes["head_dim"], sizes["max_position_embeddings"]),
            norm_topk_prob=hf.flag("norm_topk_prob", False),
            sparse_layers=sparse_by_step(hf, sizes["num_hidden_layers"], sizes["num_experts"]),
            qkv_bias=hf.flag("qkv_bias", True),
        )
        check_routing(hf, config, "num_experts")
        return config

    @property
    def shared_width(self) -> int:
        return self.shared_expert_intermediate_size

"""Qwen3-MoE's config.json, as one checked dataclass."""

from dataclasses import dataclass
from pathlib import Path

from umbra.models.hf_config import read_hf_config
from umbra.models.moe_config import MoeConfig, check_routing, read_sizes, sparse_by_step
from umbra.models.rope import read_rope

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


@dataclass(frozen=True)
class Qwen3MoeConfig(MoeConfig):
    attention_bias: bool

    @classmethod
    def from_folder(cls, folder: Path) -> "Qwen3MoeConfig":
        hf = read_hf_config(folder)
        hf.refuse("hidden_act", "silu")
        hf.refuse("use_sliding_window", False)
        sizes = read_sizes(hf, DEFAULTS, ("num_experts", "num_local_experts"))
        config = cls(
            **sizes,
            rms_norm_eps=hf.number("rms_norm_eps", default=1e-6),
            rope=read_rope(hf, sizes["head_dim"], sizes["max_position_embeddings"]),
            norm_topk_prob=hf.flag("norm_topk_prob", False),
            sparse_layers=sparse_by_step(hf, sizes["num_hidden_layers"], sizes["num_experts"]),
            attention_bias=hf.flag("attention_bias", False),
        )
        check_routing(hf, config, "num_experts")
        return config

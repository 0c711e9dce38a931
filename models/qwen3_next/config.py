"""Qwen3-Next's config.json, also that of Qwen3-Coder-Next, as one checked dataclass."""

from dataclasses import dataclass
from pathlib import Path

from umbra.models.hf_config import read_hf_config
from umbra.models.hybrid_config import HybridMoeConfig, read_hybrid
from umbra.models.moe_config import check_routing

DEFAULTS = {"vocab_size": 151936, "num_hidden_layers": 48, "num_experts": 512, "num_experts_per_tok": 10}


@dataclass(frozen=True)
class Qwen3NextConfig(HybridMoeConfig):
    @classmethod
    def from_folder(cls, folder: Path) -> "Qwen3NextConfig":
        hf = read_hf_config(folder)
        config = cls(**read_hybrid(hf, DEFAULTS), norm_topk_prob=hf.flag("norm_topk_prob", True))
        check_routing(hf, config, "num_experts")
        return config

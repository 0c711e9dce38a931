"""The config.json of Qwen3.5-MoE and Qwen3.6-MoE, of models that read text or also see pictures, as one checked
dataclass."""

from dataclasses import dataclass
from pathlib import Path

from umbra.models.hf_config import read_hf_config
from umbra.models.hybrid_config import HybridMoeConfig, read_hybrid, text_with_tied
from umbra.models.moe_config import check_routing

DEFAULTS = {"vocab_size": 248320, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8}


@dataclass(frozen=True)
class Qwen3_5MoeConfig(HybridMoeConfig):
    @classmethod
    def from_folder(cls, folder: Path) -> "Qwen3_5MoeConfig":
        hf, tied = text_with_tied(read_hf_config(folder))
        hf.refuse("norm_topk_prob", True)
        config = cls(**read_hybrid(hf, DEFAULTS) | tied, norm_topk_prob=True)
        check_routing(hf, config, "num_experts")
        return config

"""The config.json of Qwen3.5-MoE and Qwen3.6-MoE, of models that read text or also see pictures, as one checked
dataclass."""

from dataclasses import dataclass
from pathlib import Path

from umbra.models.hf_config import read_hf_config
from umbra.models.hybrid_config import HybridConfig, read_hybrid
from umbra.models.moe_config import check_routing

DEFAULTS = {"vocab_size": 248320, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8}
TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class Qwen3_5MoeConfig(HybridConfig):
    @classmethod
    def from_folder(cls, folder: Path) -> "Qwen3_5MoeConfig":
        whole = read_hf_config(folder)
        hf = whole.text
        if whole.flag(TIED, False) != hf.flag(TIED, whole.flag(TIED, False)):
            raise whole.error(TIED, "does not agree with text_config's")
        hf.refuse("norm_topk_prob", True)
        sizes = read_hybrid(hf, DEFAULTS) | {TIED: whole.flag(TIED, False)}
        config = cls(**sizes, norm_topk_prob=True)
        check_routing(hf, config, "num_experts")
        return config

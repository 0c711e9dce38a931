"""The config.json of dense Qwen3.5, 3.6 and 3.8, of models that read text or also see pictures, as one checked
dataclass."""

from dataclasses import dataclass
from pathlib import Path

from umbra.models.hf_config import read_hf_config
from umbra.models.hybrid_config import HybridConfig, read_dense_hybrid, text_with_tied

DEFAULTS = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class Qwen3_5Config(HybridConfig):
    @classmethod
    def from_folder(cls, folder: Path) -> "Qwen3_5Config":
        hf, tied = text_with_tied(read_hf_config(folder))
        return cls(**read_dense_hybrid(hf, DEFAULTS) | tied)

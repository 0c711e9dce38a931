"""The toy family's config.json."""

from dataclasses import dataclass
from pathlib import Path

from umbra.models.hf_config import read_hf_config
from umbra.models.moe_config import MoeConfig, check_routing, read_sizes
from umbra.models.rope import read_rope

DEFAULTS = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}


@dataclass(frozen=True)
class ToyMoeConfig(MoeConfig):
    @classmethod
    def from_folder(cls, folder: Path) -> "ToyMoeConfig":
        hf = read_hf_config(folder)
        hf.refuse("hidden_act", "silu")
        sizes = read_sizes(hf, DEFAULTS, ("num_experts",))
        config = cls(
            **sizes,
            rms_norm_eps=hf.number("rms_norm_eps", default=1e-6),
            rope=read_rope(hf, sizes["head_dim"], sizes["max_position_embeddings"]),
            norm_topk_prob=True,
            sparse_layers=(True,) * sizes["num_hidden_layers"],
        )
        check_routing(hf, config, "num_experts")
        return config

"""gpt-oss's config.json as one checked dataclass."""

from dataclasses import dataclass
from pathlib import Path

from umbra.models.hf_config import read_hf_config
from umbra.models.moe_config import MoeConfig, check_routing, read_sizes
from umbra.models.rope import read_rope

DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "head_dim": 64,
}
EXPERTS = "num_local_experts"
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class GptOssConfig(MoeConfig):
    sliding_window: int
    sliding_layers: tuple[bool, ...]  # for each layer whether a token sees a window
    swiglu_limit: float
    swiglu_alpha: float
    attention_bias: bool  # of all four projections

    @classmethod
    def from_folder(cls, folder: Path) -> "GptOssConfig":
        hf = read_hf_config(folder)
        hf.refuse("hidden_act", "silu")  # every file has it, although experts compute `Ops.moe`'s other kind
        sizes = read_sizes(hf, DEFAULTS, (EXPERTS, "num_experts"))
        layers = sizes["num_hidden_layers"]
        kinds = hf.names("layer_types") or tuple(FULL if layer % 2 else SLIDING for layer in range(layers))
        if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
            raise hf.error("layer_types", f"must be {layers} times {FULL} or {SLIDING}")
        config = cls(
            **sizes,
            moe_intermediate_size=sizes["intermediate_size"],
            rms_norm_eps=hf.number("rms_norm_eps", default=1e-5),
            rope=read_rope(hf, sizes["head_dim"], sizes["max_position_embeddings"], theta=150000.0),
            norm_topk_prob=True,  # the softmax is over the chosen experts
            sparse_layers=(True,) * layers,
            sliding_window=hf.size("sliding_window", default=128),
            sliding_layers=tuple(kind == SLIDING for kind in kinds),
            swiglu_limit=hf.number("swiglu_limit", default=7.0),
            swiglu_alpha=hf.number("swiglu_alpha", default=1.702),
            attention_bias=hf.flag("attention_bias", True),
        )
        check_routing(hf, config, EXPERTS)
        return config

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.sliding_window if sliding else None for sliding in self.sliding_layers)

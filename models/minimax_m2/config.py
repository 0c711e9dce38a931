"""MiniMax-M2's config.json, also that of M2.1, M2.5 and M2.7, as one checked dataclass.

Keys that have no effect in any of these models are read all the same, so that a value that would have one is refused.
"""

from dataclasses import dataclass
from pathlib import Path

from umbra.models.config import (
    LARGEST_DEPTH,
    Expansion,
    check_choice,
    check_even_split,
    check_experts,
    check_heads,
    check_kv_split,
)
from umbra.models.hf_config import read_hf_config
from umbra.models.rope import RopeConfig, read_rope, read_rotary_dim

FULL_ATTENTION = 1  # in `attn_type_list`; 0 is MiniMax-01's lightning attention


@dataclass(frozen=True)
class MiniMaxM2Config:
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    num_local_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert; there is no other MLP
    use_routing_bias: bool
    tie_word_embeddings: bool
    num_mtp_modules: int  # layers after the last one that predict further tokens; no checkpoint has their weights

    @classmethod
    def from_folder(cls, folder: Path) -> "MiniMaxM2Config":
        hf = read_hf_config(folder)
        hf.refuse("hidden_act", "silu")
        hf.refuse("use_qk_norm", True)
        hf.refuse("qk_norm_type", "per_layer")
        hf.refuse("scoring_func", "sigmoid")
        hf.refuse("shared_intermediate_size", 0)
        hf.refuse("sliding_window")
        hf.refuse("attention_bias", False)
        layers = hf.size("num_hidden_layers", default=62, maximum=LARGEST_DEPTH)
        kinds = hf.sizes("attn_type_list")
        if hf.value("attn_type_list") is not None and kinds != (FULL_ATTENTION,) * layers:
            raise hf.error("attn_type_list", f"must be {layers} times {FULL_ATTENTION}, full attention in every layer")
        for norm in ("full_attention", "linear_attention", "mlp"):  # residual factors of MiniMax-01
            hf.refuse(f"layernorm_{norm}_alpha", 1)
            hf.refuse(f"layernorm_{norm}_beta", 1)
        head_dim, positions = hf.size("head_dim", default=128), hf.size("max_position_embeddings", default=196608)
        config = cls(
            vocab_size=hf.size("vocab_size", default=200064),
            hidden_size=hf.size("hidden_size", default=3072),
            num_hidden_layers=layers,
            num_attention_heads=hf.size("num_attention_heads", default=48),
            num_key_value_heads=hf.size("num_key_value_heads", default=8),
            head_dim=head_dim,
            rms_norm_eps=hf.number("rms_norm_eps", default=1e-6),
            rope=read_rope(hf, read_rotary_dim(hf, head_dim), positions, theta=5e6, kinds=("default",)),
            max_position_embeddings=positions,
            num_local_experts=hf.size("num_local_experts", "num_experts", default=256, maximum=1 << 16),
            num_experts_per_tok=hf.size("num_experts_per_tok", default=8),
            intermediate_size=hf.size("intermediate_size", default=1536),
            use_routing_bias=hf.flag("use_routing_bias", True),
            tie_word_embeddings=hf.flag("tie_word_embeddings", False),
            num_mtp_modules=hf.size("num_mtp_modules", default=3, minimum=0, maximum=LARGEST_DEPTH),
        )
        check_heads(hf, config.num_attention_heads, config.num_key_value_heads)
        check_experts(hf, "num_local_experts", config.num_local_experts, layers)
        check_choice(hf, config.num_experts_per_tok, config.num_local_experts, "num_local_experts")
        return config

    @property
    def max_positions(self) -> int:
        return self.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """None: official files have no `eos_token_id`, and files that older tools saved have a wrong one."""
        return ()

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (None,) * self.num_hidden_layers

    @property
    def expansion(self) -> Expansion | None:
        return None

    @property
    def expert_count(self) -> int:
        return self.num_local_experts

    @property
    def experts_per_token(self) -> int:
        return self.num_experts_per_tok

    def check_parallel(
        self, attn_tp_size: int, moe_tp_size: int, moe_ep_size: int, embed_tp_size: int, lmhead_tp_size: int
    ) -> None:
        check_even_split("attn_tp_size", attn_tp_size, "num_attention_heads", self.num_attention_heads)
        check_even_split("embed_tp_size", embed_tp_size, "vocab_size", self.vocab_size)
        check_even_split("lmhead_tp_size", lmhead_tp_size, "vocab_size", self.vocab_size)
        check_even_split("moe_tp_size", moe_tp_size, "intermediate_size", self.intermediate_size)
        check_even_split("world_size / moe_tp_size", moe_ep_size, "num_local_experts", self.num_local_experts)
        check_kv_split(attn_tp_size, self.num_key_value_heads)

"""Qwen3-MoE's config.json, as one checked dataclass."""

from dataclasses import dataclass
from pathlib import Path

from models.config import LARGEST_DEPTH, check_even_split, check_experts, check_kv_split
from models.hf_config import read_hf_config
from models.rope import RopeConfig, read_rope


@dataclass(frozen=True)
class Qwen3MoeConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # intermediate size of dense layers
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    attention_bias: bool
    tie_word_embeddings: bool
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]  # for each layer whether it is a mixture of experts; else a dense MLP
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> "Qwen3MoeConfig":
        hf = read_hf_config(folder)
        hf.refuse("hidden_act", "silu")
        hf.refuse("use_sliding_window", False)
        layers = hf.size("num_hidden_layers", default=24, maximum=LARGEST_DEPTH)
        heads, hidden = hf.size("num_attention_heads", default=32), hf.size("hidden_size", default=2048)
        head_dim = hf.size("head_dim", default=max(hidden // heads, 1))
        max_positions = hf.size("max_position_embeddings", default=32768)
        dense, step = set(hf.sizes("mlp_only_layers")), hf.size("decoder_sparse_step", default=1)
        experts = hf.size("num_experts", "num_local_experts", default=128, minimum=0, maximum=1 << 16)
        config = cls(
            vocab_size=hf.size("vocab_size", default=151936),
            hidden_size=hidden,
            intermediate_size=hf.size("intermediate_size", default=6144),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=hf.size("num_key_value_heads", default=4),
            head_dim=head_dim,
            rms_norm_eps=hf.number("rms_norm_eps", default=1e-6),
            rope=read_rope(hf, head_dim, max_positions),
            max_position_embeddings=max_positions,
            attention_bias=hf.flag("attention_bias", False),
            tie_word_embeddings=hf.flag("tie_word_embeddings", False),
            num_experts=experts,
            num_experts_per_tok=hf.size("num_experts_per_tok", default=8),
            moe_intermediate_size=hf.size("moe_intermediate_size", default=768),
            norm_topk_prob=hf.flag("norm_topk_prob", False),
            sparse_layers=tuple(
                experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(layers)
            ),
            eos_token_ids=hf.one_or_more("eos_token_id"),
        )
        if config.num_attention_heads % config.num_key_value_heads:
            raise hf.error("num_key_value_heads", f"does not divide num_attention_heads: {heads}")
        check_experts(hf, "num_experts", experts, layers)
        if any(config.sparse_layers) and config.num_experts_per_tok > experts:
            raise hf.error("num_experts_per_tok", f"is more than num_experts: {experts}")
        return config

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that the position embedding is made for, which YaRN lengthens."""
        yarn = self.rope.yarn
        stretched = int(yarn.original_length * yarn.factor) if yarn else 0
        return max(self.max_position_embeddings, stretched)

    @property
    def expert_count(self) -> int:
        return self.num_experts if any(self.sparse_layers) else 0

    @property
    def experts_per_token(self) -> int:
        return self.num_experts_per_tok

    def check_parallel(
        self, attn_tp_size: int, moe_tp_size: int, moe_ep_size: int, embed_tp_size: int, lmhead_tp_size: int
    ) -> None:
        check_even_split("attn_tp_size", attn_tp_size, "num_attention_heads", self.num_attention_heads)
        check_even_split("embed_tp_size", embed_tp_size, "vocab_size", self.vocab_size)
        check_even_split("lmhead_tp_size", lmhead_tp_size, "vocab_size", self.vocab_size)
        if any(self.sparse_layers):
            check_even_split("moe_tp_size", moe_tp_size, "moe_intermediate_size", self.moe_intermediate_size)
            check_even_split("world_size / moe_tp_size", moe_ep_size, "num_experts", self.num_experts)
        if not all(self.sparse_layers):
            check_even_split("attn_tp_size", attn_tp_size, "intermediate_size of dense layers", self.intermediate_size)
        check_kv_split(attn_tp_size, self.num_key_value_heads)

"""The part of config.json that decoders with grouped-query attention and mixtures of experts share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from umbra.models.config import (
    LARGEST_DEPTH,
    Expansion,
    check_choice,
    check_even_split,
    check_experts,
    check_heads,
    check_kv_split,
    check_some_each,
)
from umbra.models.hf_config import HfConfig
from umbra.models.rope import RopeConfig


@dataclass(frozen=True)
class MoeConfig:
    """Layers are mixtures of experts or dense MLPs, as `sparse_layers` says. A family's config adds its own keys."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of dense layers
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]  # for each layer whether it is a mixture of experts; else a dense MLP
    eos_token_ids: tuple[int, ...]

    @property
    def shared_width(self) -> int:
        """Intermediate size of the expert that every token takes; 0: there is none."""
        return 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (None,) * self.num_hidden_layers

    @property
    def expansion(self) -> Expansion | None:
        return None

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
            check_some_each(attn_tp_size, "the width of the shared expert", self.shared_width or attn_tp_size)
        if not all(self.sparse_layers):
            check_some_each(attn_tp_size, "intermediate_size of dense layers", self.intermediate_size)
        check_kv_split(attn_tp_size, self.num_key_value_heads)


def check_routing(hf: HfConfig, config: MoeConfig, experts_key: str) -> None:
    """Raises UserError if a layer is to choose more experts than it has."""
    if any(config.sparse_layers):
        check_choice(hf, config.num_experts_per_tok, config.num_experts, experts_key)


def read_sizes(hf: HfConfig, defaults: Mapping[str, int], experts_keys: Sequence[str]) -> dict[str, Any]:
    """The fields of `MoeConfig` that every family reads in the same way. `defaults` are those of the keys;
    `experts_keys` are the names that the number of experts has."""
    sizes = {name: hf.size(name, default=default) for name, default in defaults.items() if name != "num_experts"}
    layers = hf.size("num_hidden_layers", default=defaults["num_hidden_layers"], maximum=LARGEST_DEPTH)
    experts = hf.size(*experts_keys, default=defaults["num_experts"], minimum=0, maximum=1 << 16)
    heads = sizes["num_attention_heads"]
    check_heads(hf, heads, sizes["num_key_value_heads"])
    check_experts(hf, experts_keys[0], experts, layers)
    return sizes | {
        "num_experts": experts,
        "head_dim": hf.size("head_dim", default=defaults.get("head_dim", max(sizes["hidden_size"] // heads, 1))),
        "tie_word_embeddings": hf.flag("tie_word_embeddings", False),
        "eos_token_ids": hf.one_or_more("eos_token_id"),
    }


def sparse_by_step(hf: HfConfig, layers: int, experts: int) -> tuple[bool, ...]:
    """`MoeConfig.sparse_layers` as `mlp_only_layers` and `decoder_sparse_step` say."""
    dense, step = set(hf.sizes("mlp_only_layers")), hf.size("decoder_sparse_step", default=1)
    return tuple(experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(layers))

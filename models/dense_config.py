"""The part of config.json that decoders with grouped-query attention share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from umbra.base.errors import UserError
from umbra.models.config import LARGEST_DEPTH, Expansion, check_even_split, check_heads, check_kv_split, check_some_each
from umbra.models.hf_config import HfConfig
from umbra.models.rope import RopeConfig


@dataclass(frozen=True)
class DenseConfig:
    """Every layer is a dense MLP, unless a subclass says otherwise. A family's config adds its own keys."""

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
    eos_token_ids: tuple[int, ...]

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
        return 0

    @property
    def experts_per_token(self) -> int:
        return 0

    @property
    def has_dense_layers(self) -> bool:
        return True

    def check_parallel(
        self, attn_tp_size: int, moe_tp_size: int, moe_ep_size: int, embed_tp_size: int, lmhead_tp_size: int
    ) -> None:
        check_even_split("attn_tp_size", attn_tp_size, "num_attention_heads", self.num_attention_heads)
        check_even_split("embed_tp_size", embed_tp_size, "vocab_size", self.vocab_size)
        check_even_split("lmhead_tp_size", lmhead_tp_size, "vocab_size", self.vocab_size)
        if not self.expert_count and moe_ep_size > 1:
            raise UserError(
                f"parallel_config: moe_tp_size: {moe_tp_size} divides experts, which the model does not have"
            )
        if self.has_dense_layers:
            check_some_each(attn_tp_size, "intermediate_size of dense layers", self.intermediate_size)
        check_kv_split(attn_tp_size, self.num_key_value_heads)


def read_sizes(hf: HfConfig, defaults: Mapping[str, int]) -> dict[str, Any]:
    """The fields of `DenseConfig` that every family reads in the same way, and further sizes of `defaults`, which are
    those of the keys."""
    sizes = {name: hf.size(name, default=default) for name, default in defaults.items()}
    heads = sizes["num_attention_heads"]
    check_heads(hf, heads, sizes["num_key_value_heads"])
    return sizes | {
        "num_hidden_layers": hf.size("num_hidden_layers", default=defaults["num_hidden_layers"], maximum=LARGEST_DEPTH),
        "head_dim": hf.size("head_dim", default=defaults.get("head_dim", max(sizes["hidden_size"] // heads, 1))),
        "tie_word_embeddings": hf.flag("tie_word_embeddings", False),
        "eos_token_ids": hf.one_or_more("eos_token_id"),
    }

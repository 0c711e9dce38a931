"""The part of a model's configuration that the executor reads, under names that all families share."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from umbra.base.errors import UserError
from umbra.models.hf_config import HfConfig

# Bounds of what an untrusted config can allocate: layers are built before weights are read.
LARGEST_DEPTH = 4096  # layers
MOST_EXPERTS = 1 << 19  # of all layers together


# So many cached tokens' keys and values take as long as laying out the heads' matrices for them (measured on the CPU:
# docs/performance.md).
LAID_OUT = 16


@dataclass(frozen=True)
class Expansion:
    """When the expanded form of attention over latents, which makes keys and values of each head once in a step, takes
    fewer multiply-adds than the absorbed one. Counts are a head's."""

    saved: int  # of each new token and one that it sees
    spent: int  # more of each cached token; new tokens of the absorbed form take as many

    def pays(self, cached: int, new: int) -> bool:
        """Returns whether the expanded form takes fewer multiply-adds for `new` tokens of a prompt behind `cached`
        ones."""
        return new * (2 * cached + new) * self.saved > 2 * (cached + LAID_OUT) * self.spent


class ModelConfig(Protocol):
    """A frozen dataclass that `from_folder` reads from a checkpoint's config.json."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Reads `folder`/config.json, whose family was checked. A value that is invalid or not implemented raises a
        UserError that names its key."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that the position embedding is made for."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Used if generation_config.json has none; empty: the tokenizer's are used then."""

    @property
    def expert_count(self) -> int:
        """Number of routed experts of each layer that has experts; 0 if no layer has."""

    @property
    def experts_per_token(self) -> int:
        """Number of experts that the router chooses for a token."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each attention layer the number of tokens, up to itself, that a token sees; None: all."""

    @property
    def expansion(self) -> Expansion | None:
        """When prompts take the expanded form of attention over latents; None: the model has none."""

    def check_parallel(
        self, attn_tp_size: int, moe_tp_size: int, moe_ep_size: int, embed_tp_size: int, lmhead_tp_size: int
    ) -> None:
        """Raises UserError if a size does not divide the dimension that is split by it."""


def with_layers(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """Returns `config` with the layers of these numbers alone."""
    changes: dict[str, Any] = {"num_hidden_layers": len(layers)}
    for name, value in vars(config).items():
        if isinstance(value, tuple) and name.endswith("_layers"):  # one value for each layer
            changes[name] = tuple(value[layer] for layer in layers)
    return dataclasses.replace(config, **changes)


def check_experts(config: HfConfig, key: str, experts: int, layers: int) -> None:
    """Raises UserError if `layers` layers of `experts` experts each, the value of `key`, are unreasonably many."""
    if experts * layers > MOST_EXPERTS:
        raise config.error(key, f"in each of {layers} layers is more than {MOST_EXPERTS} together")


def check_heads(config: HfConfig, heads: int, kv_heads: int) -> None:
    """Raises UserError unless each KV head serves as many query heads."""
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"does not divide num_attention_heads: {heads}")


def check_choice(config: HfConfig, chosen: int, experts: int, experts_key: str) -> None:
    """Raises UserError if the router is to choose more experts than a layer has."""
    if chosen > experts:
        raise config.error("num_experts_per_tok", f"is more than {experts_key}: {experts}")


def check_even_split(key: str, ranks: int, what: str, total: int) -> None:
    """Raises UserError unless `ranks`, the value of `key`, divides `total`."""
    if total % ranks:
        raise UserError(f"parallel_config: {key}: {ranks} does not divide {what}: {total}")


def check_some_each(attn_tp_size: int, what: str, total: int) -> None:
    """Raises UserError if a dimension that is split unevenly leaves nothing for a rank."""
    if total < attn_tp_size:
        raise UserError(f"parallel_config: attn_tp_size: {attn_tp_size} is more than {what}: {total}")


def check_kv_split(attn_tp_size: int, kv_heads: int, key: str = "num_key_value_heads") -> None:
    """Raises UserError unless each rank gets as many KV heads, or each KV head as many ranks, which hold copies. `key`
    is that of the number."""
    few, many = sorted((attn_tp_size, kv_heads))
    if many % few:
        raise UserError(
            f"parallel_config: attn_tp_size: {attn_tp_size} and {key}: {kv_heads}: one must divide the other"
        )

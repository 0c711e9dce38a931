"""The part of config.json that decoders with grouped-query attention and mixtures of experts share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from umbra.models import dense_config
from umbra.models.config import LARGEST_DEPTH, check_choice, check_even_split, check_experts, check_some_each
from umbra.models.dense_config import DenseConfig
from umbra.models.hf_config import HfConfig


@dataclass(frozen=True)
class MoeConfig(DenseConfig):
    """Layers are mixtures of experts or dense MLPs, as `sparse_layers` says. A family's config adds its own keys."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]  # for each layer whether it is a mixture of experts; else a dense MLP

    @property
    def shared_width(self) -> int:
        """Intermediate size of the expert that every token takes; 0: there is none."""
        return 0

    @property
    def expert_count(self) -> int:
        return self.num_experts if any(self.sparse_layers) else 0

    @property
    def experts_per_token(self) -> int:
        return self.num_experts_per_tok

    @property
    def has_dense_layers(self) -> bool:
        return not all(self.sparse_layers)

    def check_parallel(
        self, attn_tp_size: int, moe_tp_size: int, moe_ep_size: int, embed_tp_size: int, lmhead_tp_size: int
    ) -> None:
        super().check_parallel(attn_tp_size, moe_tp_size, moe_ep_size, embed_tp_size, lmhead_tp_size)
        if self.expert_count:
            check_even_split("moe_tp_size", moe_tp_size, "moe_intermediate_size", self.moe_intermediate_size)
            check_even_split("world_size / moe_tp_size", moe_ep_size, "num_experts", self.num_experts)
            check_some_each(attn_tp_size, "the width of the shared expert", self.shared_width or attn_tp_size)


def check_routing(hf: HfConfig, config: MoeConfig, experts_key: str) -> None:
    """Raises UserError if a layer is to choose more experts than it has."""
    if any(config.sparse_layers):
        check_choice(hf, config.num_experts_per_tok, config.num_experts, experts_key)


def read_sizes(hf: HfConfig, defaults: Mapping[str, int], experts_keys: Sequence[str]) -> dict[str, Any]:
    """The fields of `MoeConfig` that every family reads in the same way. `defaults` are those of the keys;
    `experts_keys` are the names that the number of experts has."""
    sizes = dense_config.read_sizes(hf, {name: size for name, size in defaults.items() if name != "num_experts"})
    experts = hf.size(*experts_keys, default=defaults["num_experts"], minimum=0, maximum=1 << 16)
    check_experts(hf, experts_keys[0], experts, sizes["num_hidden_layers"])
    return sizes | {"num_experts": experts}


def sparse_by_step(hf: HfConfig, layers: int, experts: int) -> tuple[bool, ...]:
    """`MoeConfig.sparse_layers` as `mlp_only_layers` and `decoder_sparse_step` say."""
    dense, step = set(hf.sizes("mlp_only_layers")), hf.size("decoder_sparse_step", default=1)
    return tuple(experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def sparse_by_types(hf: HfConfig, layers: int, dense: int) -> tuple[bool, ...]:
    """`MoeConfig.sparse_layers` as `mlp_layer_types` says or, without the key, with as many dense layers first as
    `first_k_dense_replace` says, by default `dense`."""
    first = hf.size("first_k_dense_replace", default=dense, minimum=0, maximum=LARGEST_DEPTH)
    kinds = hf.names("mlp_layer_types")
    if not kinds:
        return tuple(layer >= first for layer in range(layers))
    if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise hf.error("mlp_layer_types", f"must say dense or sparse for each of {layers} layers")
    return tuple(kind == "sparse" for kind in kinds)

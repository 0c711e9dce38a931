"""The config.json of Gemma 4, of models that read text or also see pictures and hear, as one checked dataclass.

Files of the maker name the sizes of layers that see all tokens `global_head_dim` and `num_global_key_value_heads`;
transformers writes them for each layer, as `per_layer_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbra.models import dense_config
from umbra.models.config import check_experts, check_heads, check_kv_split
from umbra.models.hf_config import HfConfig, read_hf_config
from umbra.models.moe_config import MoeConfig, check_routing
from umbra.models.rope import RopeConfig, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
THETAS = {FULL: 1e6, SLIDING: 1e4}
TURNING = 0.25  # share of the pairs of a head that turn in layers that see all tokens
UNIFIED = ("gemma4_unified", "gemma4_unified_text")  # types of models without inputs of each layer
INPUTS = "hidden_size_per_layer_input"
KV_HEADS = "num_global_key_value_heads"
DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}


@dataclass(frozen=True)
class AttentionSizes:
    """The attention of one kind of layers."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int | None  # tokens, up to itself, that a token sees; None: all
    keys_are_values: bool  # whether values are what keys are made of


@dataclass(frozen=True)
class Gemma4Config(MoeConfig):
    """The fields of `MoeConfig` are those of layers that see a window; `full` has those of the others."""

    sliding: AttentionSizes
    full: AttentionSizes
    full_layers: tuple[bool, ...]  # for each layer whether a token sees all tokens
    final_logit_softcapping: float | None
    shared_layers: int  # the last ones, that read the caches of the last layer of their kind before them
    wide: bool  # whether their MLPs are twice as wide
    layer_inputs: int  # columns of the input that each layer has of its own; 0: none

    @classmethod
    def from_folder(cls, folder: Path) -> "Gemma4Config":
        whole = read_hf_config(folder)
        hf = whole.text
        hf.refuse("hidden_activation", "gelu_pytorch_tanh")
        hf.refuse("attention_bias", False)
        hf.refuse("use_bidirectional_attention", "vision")  # which has no effect on text
        sizes = dense_config.read_sizes(hf, DEFAULTS)
        sizes["tie_word_embeddings"] = hf.flag("tie_word_embeddings", whole.flag("tie_word_embeddings", True))
        sparse = hf.flag("enable_moe_block", False)
        layers = sizes["num_hidden_layers"]
        kinds, shared = _kinds(hf, layers), hf.size("num_kv_shared_layers", default=0, minimum=0)
        if shared and not {*kinds[-shared:]} <= {*kinds[:-shared]}:
            raise hf.error("num_kv_shared_layers", "leaves no layer of some kind before them")
        inputs = hf.size(INPUTS, default=256 * (hf.value("model_type") not in UNIFIED), minimum=0)
        if inputs and hf.size("vocab_size_per_layer_input", default=DEFAULTS["vocab_size"]) != sizes["vocab_size"]:
            raise hf.error("vocab_size_per_layer_input", f"must be {sizes['vocab_size']}, as vocab_size")
        ropes = _ropes(hf, sizes, full_dim := _full_size(hf, "head_dim", kinds, default=512))
        kv_heads, same = sizes["num_key_value_heads"], hf.flag("attention_k_eq_v", False)
        full_kv = _full_size(hf, "num_key_value_heads", kinds, default=kv_heads)
        check_heads(hf, sizes["num_attention_heads"], full_kv)
        heads, window = sizes["num_attention_heads"], hf.size("sliding_window", default=512)
        config = cls(
            **sizes,
            rms_norm_eps=hf.number("rms_norm_eps", default=1e-6),
            rope=ropes[SLIDING],
            num_experts=hf.size("num_experts", maximum=1 << 16) if sparse else 0,
            num_experts_per_tok=hf.size("top_k_experts") if sparse else 0,
            moe_intermediate_size=hf.size("moe_intermediate_size") if sparse else 0,
            norm_topk_prob=True,
            sparse_layers=(sparse,) * layers,
            sliding=AttentionSizes(heads, kv_heads, sizes["head_dim"], ropes[SLIDING], window, False),
            full=AttentionSizes(heads, full_kv, full_dim, ropes[FULL], None, same),
            full_layers=tuple(kind == FULL for kind in kinds),
            final_logit_softcapping=(
                None
                if hf.value("final_logit_softcapping") is None
                else hf.number("final_logit_softcapping", default=30.0)
            ),
            shared_layers=shared,
            wide=hf.flag("use_double_wide_mlp", False),
            layer_inputs=inputs,
        )
        if shared and sparse:
            raise hf.error("num_kv_shared_layers", "is only implemented for models without experts")
        check_experts(hf, "num_experts", config.num_experts, layers)
        check_routing(hf, config, "num_experts")
        return config

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of the layers that have caches of their own."""
        own = self.full_layers[: len(self.full_layers) - self.shared_layers]
        return tuple(self.attention_of(full).window for full in own)

    @property
    def has_dense_layers(self) -> bool:
        return True  # beside the experts, in every layer

    def attention_of(self, full: bool) -> AttentionSizes:
        return self.full if full else self.sliding

    def check_parallel(
        self, attn_tp_size: int, moe_tp_size: int, moe_ep_size: int, embed_tp_size: int, lmhead_tp_size: int
    ) -> None:
        super().check_parallel(attn_tp_size, moe_tp_size, moe_ep_size, embed_tp_size, lmhead_tp_size)
        check_kv_split(attn_tp_size, self.full.kv_heads, KV_HEADS)


def _kinds(hf: HfConfig, layers: int) -> tuple[str, ...]:
    """The kind of each layer, of which the last always sees all tokens."""
    kinds = hf.names("layer_types") or tuple(SLIDING if (layer + 1) % 6 else FULL for layer in range(layers))
    if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
        raise hf.error("layer_types", f"must be {layers} times {FULL} or {SLIDING}")
    return *kinds[:-1], FULL


def _full_size(hf: HfConfig, name: str, kinds: tuple[str, ...], default: int) -> int:
    """The size `name` of the layers that see all tokens."""
    if hf.value("per_layer_config") is None:
        if name == "head_dim":
            return hf.size("global_head_dim", default=default)
        return hf.size(KV_HEADS, default=default) if hf.flag("attention_k_eq_v", False) else default
    own, usual = hf.inner("per_layer_config"), hf.size(name, default=DEFAULTS[name])
    full = [own.inner(str(layer)) for layer, kind in enumerate(kinds) if kind == FULL and str(layer) in own.data]
    sizes = {layer.size(name, default=usual) for layer in full} or {usual}
    if set(own.data) - {str(layer) for layer, kind in enumerate(kinds) if kind == FULL} or len(sizes) != 1:
        raise hf.error("per_layer_config", f"must say the same of every layer of {FULL}, and nothing of others")
    return sizes.pop()


def _ropes(hf: HfConfig, sizes: dict[str, Any], full_dim: int) -> dict[str, RopeConfig]:
    """The rotation of each kind of layers."""
    given: Mapping[str, Any] = hf.inner("rope_parameters").data if hf.value("rope_parameters") is not None else {}
    plain = {SLIDING: {}, FULL: {"rope_type": "proportional", "partial_rotary_factor": TURNING}}
    own = HfConfig({kind: given.get(kind, plain[kind]) for kind in plain}, f"{hf.where}: rope_parameters")
    ropes = {}
    for kind, dim in ((SLIDING, sizes["head_dim"]), (FULL, full_dim)):
        one = HfConfig({"rope_parameters": own.inner(kind).data}, f"{own.where}: {kind}")
        kinds = ("default", "proportional")
        ropes[kind] = read_rope(one, dim, sizes["max_position_embeddings"], THETAS[kind], kinds)
    return ropes

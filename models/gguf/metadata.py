"""The config that a GGUF file's metadata stands for: the contents of the config.json that its model had."""

from typing import Any

from umbra.models.gguf.architecture import Architecture
from umbra.models.gguf.container import Gguf
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.layers import with_delta_net
from umbra.models.gguf.names import Tiled
from umbra.models.hf_config import HfConfig
from umbra.models.registry import architectures, families


def config_of(gguf: Gguf) -> dict[str, Any]:
    """Returns the contents of config.json. Raises UserError for metadata that is wrong, or of an architecture that is
    not supported."""
    architecture, keys = architecture_of(gguf), Keys(gguf)
    keys.all.refuse("general.type", "model")
    keys.all.refuse(f"{keys.name}.expert_gating_func", 0, *architecture.gatings)
    if architecture.dense and not keys.size("expert_count", default=0, minimum=0):
        experts = {}
    elif architecture.gatings:
        experts = {"num_experts_per_tok": keys.size("expert_used_count")}
    else:
        keys.all.refuse(f"{keys.name}.expert_count", 0)
        experts = {}
    more = experts | architecture.read(keys)
    if not architecture.own_attention:
        for key in ("expert_group_count", "expert_group_used_count"):
            keys.all.refuse(f"{keys.name}.{key}", 0, 1)
        more |= _heads(keys, architecture.partial)
    return {
        "model_type": next(family.name for family in families() if family.gguf is architecture),
        "vocab_size": keys.rows("token_embd.weight"),
        "hidden_size": keys.size("embedding_length"),
        "num_hidden_layers": keys.predicting.start,
        "num_attention_heads": keys.size("attention.head_count"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.size("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": keys.scaling(),
        "tie_word_embeddings": not keys.has("output.weight"),
        **more,
    }


def _heads(keys: Keys, partial: bool) -> dict[str, Any]:
    """Returns the keys of attention with keys and values in heads, of which part rotates if that may be so."""
    heads, head_dim = keys.size("attention.head_count"), head_width(keys)
    keys.all.refuse(f"{keys.name}.attention.value_length", head_dim)
    rotating = keys.size("rope.dimension_count", default=head_dim)
    if rotating != head_dim and not partial:
        raise keys.all.error(f"{keys.name}.rope.dimension_count", f"is not the head's {head_dim}")
    share = {"partial_rotary_factor": rotating / head_dim} if partial else {}
    return {"num_key_value_heads": keys.kv_heads(heads), "head_dim": head_dim, **share}


def head_width(keys: Keys) -> int:
    """Returns the width of a head of queries and keys."""
    heads, hidden = keys.size("attention.head_count"), keys.size("embedding_length")
    return keys.size("attention.key_length", default=max(hidden // heads, 1))


def value_heads(gguf: Gguf) -> Tiled | None:
    """Returns the order of value heads in gated DeltaNet layers, behind the rows of queries and keys, if it is not that
    of their family."""
    if not architecture_of(gguf).names.tiled:
        return None
    key_heads, heads, key_width, width, _ = with_delta_net(Keys(gguf)).values()
    return Tiled(key_heads, heads, width, 2 * key_heads * key_width)


def architecture_of(gguf: Gguf) -> Architecture:
    known = architectures()
    name = HfConfig(gguf.metadata, str(gguf.paths[0])).one_of("general.architecture", allowed=tuple(known))
    return known[name]

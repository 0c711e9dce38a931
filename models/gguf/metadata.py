"""The config that a GGUF file's metadata stands for: the contents of the config.json that its model had."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from umbra.models.gguf.container import Gguf
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.names import OF_DEEPSEEK, OF_QWEN, Names, Tiled
from umbra.models.hf_config import HfConfig

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # expert_gating_func
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
# Groups of experts, and how many of them are chosen from, of DeepSeek-V2 and V3 by gating and number of experts: for
# files that do not say them.
OLD_GROUPS = {(SOFTMAX, 160): (8, 3), (SIGMOID, 256): (8, 4)}


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's. `more` are the keys of config.json that other architectures do not have or have otherwise."""

    families: tuple[str, ...]  # of which `more` says the `model_type`, unless there is one
    names: Names
    gatings: tuple[int, ...]  # those that are implemented
    more: Callable[[Keys], dict[str, Any]]
    assumed: str = ""  # what no file says, for a message
    partial: bool = False  # whether part of a head may rotate
    stops: tuple[str, ...] = ()  # tokens that end an answer, beside those that do in every model
    tiled: bool = False  # whether value heads of gated DeltaNet layers are in llama.cpp's order
    latent: bool = False  # whether attention is over latents


def config_of(gguf: Gguf) -> dict[str, Any]:
    """Raises UserError for metadata that is wrong, or of an architecture that is not supported."""
    found = architecture_of(gguf)
    keys = Keys(gguf, gguf.metadata["general.architecture"])
    keys.all.refuse("general.type", "model")
    keys.all.refuse(f"{keys.name}.expert_gating_func", 0, *found.gatings)
    more = found.more(keys)
    if not found.latent:
        for key in ("expert_group_count", "expert_group_used_count"):
            keys.all.refuse(f"{keys.name}.{key}", 0, 1)
        more |= _heads(keys, found.partial)
    return {
        "model_type": found.families[0],
        "vocab_size": keys.rows("token_embd.weight"),
        "hidden_size": keys.size("embedding_length"),
        "num_hidden_layers": predicting_layers(gguf).start,
        "num_attention_heads": keys.size("attention.head_count"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.size("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(keys),
        "tie_word_embeddings": not keys.has("output.weight"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        **more,
    }


def _heads(keys: Keys, partial: bool) -> dict[str, Any]:
    """The keys of attention with keys and values in heads, of which part rotates if that may be so."""
    heads, hidden = keys.size("attention.head_count"), keys.size("embedding_length")
    head_dim = keys.size("attention.key_length", default=max(hidden // heads, 1))
    keys.all.refuse(f"{keys.name}.attention.value_length", head_dim)
    rotating = keys.size("rope.dimension_count", default=head_dim)
    if rotating != head_dim and not partial:
        raise keys.all.error(f"{keys.name}.rope.dimension_count", f"is not the head's {head_dim}")
    share = {"partial_rotary_factor": rotating / head_dim} if partial else {}
    return {"num_key_value_heads": _kv_heads(keys, heads), "head_dim": head_dim, **share}


def value_heads(gguf: Gguf) -> Tiled | None:
    """Their order in gated DeltaNet layers, behind the rows of queries and keys, if it is not that of their family."""
    if not architecture_of(gguf).tiled:
        return None
    sizes = _delta_net(Keys(gguf, gguf.metadata["general.architecture"]))
    key_heads, heads, key_width, width, _ = sizes.values()
    return Tiled(key_heads, heads, width, 2 * key_heads * key_width)


def predicting_layers(gguf: Gguf) -> range:
    """The last layers, which predict further tokens."""
    keys = Keys(gguf, gguf.metadata["general.architecture"])
    layers = keys.size("block_count")
    return range(layers - keys.size("nextn_predict_layers", default=0, minimum=0), layers)


def architecture_of(gguf: Gguf) -> Architecture:
    name = HfConfig(gguf.metadata, str(gguf.paths[0])).one_of("general.architecture", allowed=tuple(ARCHITECTURES))
    return ARCHITECTURES[name]


def _kv_heads(keys: Keys, heads: int) -> int:
    name = f"{keys.name}.attention.head_count_kv"
    each = keys.all.one_or_more(name)
    if len(set(each)) > 1:
        raise keys.all.error(name, "must be the same in every layer")
    return each[0] if each else heads


def _scaling(keys: Keys) -> dict[str, Any] | None:
    kind = keys.all.value(f"{keys.name}.rope.scaling.type", default="none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind == "yarn":
        factor = keys.number("rope.scaling.factor")
        scaling["factor"] = factor
        scaling["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if keys.all.value(f"{keys.name}.rope.scaling.yarn_{key}") is not None:
                scaling[key] = keys.number(f"rope.scaling.yarn_{key}")
        times = keys.number("rope.scaling.attn_factor", keys.number("rope.scaling.yarn_attn_factor", 1.0))
        if times != 1:
            scaling["attention_factor"] = times * (0.1 * math.log(factor) + 1.0)
    return scaling


def _qwen3(keys: Keys) -> dict[str, Any]:
    return {
        "num_experts": keys.size("expert_count"),
        "intermediate_size": keys.size("feed_forward_length", default=1),
        "moe_intermediate_size": _expert_width(keys),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
    }


def _qwen2(keys: Keys) -> dict[str, Any]:
    return {
        **_with_shared(keys),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "qkv_bias": keys.has("blk.0.attn_q.bias"),
    }


def _with_shared(keys: Keys) -> dict[str, Any]:
    shared = keys.rows("blk.0.ffn_gate_shexp.weight")
    return {
        "num_experts": keys.size("expert_count"),
        "moe_intermediate_size": _expert_width(keys),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", default=shared),
    }


def _minimax(keys: Keys) -> dict[str, Any]:
    return {
        "num_local_experts": keys.size("expert_count"),
        "intermediate_size": _expert_width(keys),
        "use_routing_bias": keys.has("blk.0.exp_probs_b.bias"),
        "num_mtp_modules": 0,  # no layers of these are left among the weights
    }


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_local_experts": keys.size("expert_count"),
        "intermediate_size": _expert_width(keys),
        "sliding_window": keys.size("attention.sliding_window"),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
    }
    if scaling := _scaling(keys):
        config["rope_scaling"] = scaling | {"truncate": False}
    return config


def _ungated(keys: Keys, renormalised: bool) -> dict[str, Any]:
    """The keys of mixtures beside a shared expert, behind dense layers."""
    return {
        "n_routed_experts": keys.size("expert_count"),
        "n_shared_experts": keys.size("expert_shared_count"),
        "intermediate_size": keys.size("feed_forward_length"),
        "moe_intermediate_size": _expert_width(keys),
        "first_k_dense_replace": keys.size("leading_dense_block_count", default=0, minimum=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", renormalised),
        "num_nextn_predict_layers": len(predicting_layers(keys.gguf)),
    }


def _glm4(keys: Keys) -> dict[str, Any]:
    return {
        **_ungated(keys, True),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
    }


def _latent(keys: Keys) -> dict[str, Any]:
    """Older files have the lengths of heads under the names of other architectures; later ones have those of latents
    there."""
    keys.all.refuse(f"{keys.name}.attention.temperature_scale")  # Mistral's
    mixture = _ungated(keys, False)
    dense, experts = mixture["first_k_dense_replace"], mixture["n_routed_experts"]
    gating = keys.all.value(f"{keys.name}.expert_gating_func") or (
        SIGMOID if keys.has(f"blk.{dense}.exp_probs_b.bias") else SOFTMAX
    )
    groups, used = OLD_GROUPS.get((gating, experts), (1, 1))
    groups = max(keys.size("expert_group_count", default=groups, minimum=0), 1)
    if gating == SOFTMAX:
        family, method = "deepseek_v2", "group_limited_greedy" if groups > 1 else "greedy"
    else:
        glm = str(keys.all.value("tokenizer.ggml.pre")) in ("glm4", "chatglm-bpe")
        family, method = "glm4_moe_lite" if glm else "deepseek_v3", "noaux_tc"
    turning = keys.size("rope.dimension_count")
    key = keys.size("attention.key_length_mla", "attention.key_length", minimum=turning + 1)
    scaling = _scaling(keys)
    if scaling and keys.all.value(f"{keys.name}.{LOG_MULTIPLIER}"):
        mscale = round(10 * keys.number(LOG_MULTIPLIER), 6)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {
        **mixture,
        "model_type": family,
        "topk_method": method,
        "n_group": groups,
        "topk_group": max(keys.size("expert_group_used_count", default=used, minimum=0), 1),
        "rope_scaling": scaling,
        "q_lora_rank": keys.size("attention.q_lora_rank") if keys.has("blk.0.attn_q_a.weight") else None,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": key - turning,
        "v_head_dim": keys.size("attention.value_length_mla", "attention.value_length"),
    }


def _qwen3_next(keys: Keys) -> dict[str, Any]:
    return {
        **_with_shared(keys),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "full_attention_interval": keys.size("full_attention_interval", default=4),
        "mtp_num_hidden_layers": len(predicting_layers(keys.gguf)),
        **_delta_net(keys),
    }


def _delta_net(keys: Keys) -> dict[str, int]:
    heads, key_heads = keys.size("ssm.time_step_rank"), keys.size("ssm.group_count")
    inner = keys.size("ssm.inner_size")
    if heads % key_heads or inner % heads:
        raise keys.all.error(
            f"{keys.name}.ssm.time_step_rank",
            f"must be a multiple of ssm.group_count: {key_heads}, and divide ssm.inner_size: {inner}",
        )
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
    }


def _expert_width(keys: Keys) -> int:
    return keys.size("expert_feed_forward_length", default=keys.rows("blk.0.ffn_up_exps.weight"))


ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen3moe": Architecture(("qwen3_moe",), Names(), (SOFTMAX,), _qwen3, "norm_topk_prob true"),
    "qwen2moe": Architecture(("qwen2_moe",), Names(), (SOFTMAX,), _qwen2, "norm_topk_prob false"),
    "qwen3next": Architecture(
        ("qwen3_next",),
        Names(plus_one=True, predicting=OF_QWEN),
        (SOFTMAX,),
        _qwen3_next,
        "norm_topk_prob true",
        partial=True,
    ),
    "qwen35moe": Architecture(
        ("qwen3_5_moe",), Names(plus_one=True, predicting=OF_QWEN), (SOFTMAX,), _qwen3_next, partial=True, tiled=True
    ),
    "minimax-m2": Architecture(
        ("minimax_m2",),
        Names(
            "block_sparse_moe", experts=("w1", "w3", "w2"), selection_bias="block_sparse_moe.e_score_correction_bias"
        ),
        (SIGMOID,),
        _minimax,
        "renormalised weights of experts",
        partial=True,
    ),
    "gpt-oss": Architecture(
        ("gpt_oss",),
        Names(router="router", fused=True),
        (SOFTMAX_OF_CHOSEN,),
        _gpt_oss,
        "windows in layers 0, 2, 4 ..., swiglu_alpha 1.702, swiglu_limit 7, YaRN without truncation",
    ),
    "glm4moe": Architecture(
        ("glm4_moe",),
        Names(shared="shared_experts", predicting=OF_DEEPSEEK),
        (SIGMOID,),
        _glm4,
        "<|user|> and <|observation|> end an answer",
        partial=True,
        stops=("<|user|>", "<|observation|>"),
    ),
    "deepseek2": Architecture(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        Names(shared="shared_experts", predicting=OF_DEEPSEEK),
        (SOFTMAX, SIGMOID),
        _latent,
        "<|user|> and <|observation|> end an answer; experts, if 160 or 256, are in 8 groups",
        stops=("<|user|>", "<|observation|>"),
        latent=True,
    ),
}

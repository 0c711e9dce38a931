"""The GGUF files of Gemma 4."""

from typing import Any

from umbra.base.errors import UserError
from umbra.models.gemma4.config import FULL, SLIDING, Gemma4Config
from umbra.models.gguf.architecture import SOFTMAX, Architecture
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.names import ATTENTION, MLP, Names

STANDING = 1e29  # divisors of the frequencies of pairs that do not turn are larger
NAMES = {
    "attn_norm": "input_layernorm",
    **ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    **MLP,
    "post_ffw_norm": "post_feedforward_layernorm",
    "layer_output_scale.weight": "layer_scalar",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}


def read(keys: Keys) -> dict[str, Any]:
    layers, heads = keys.size("block_count"), keys.size("attention.head_count")
    sliding = keys.flags("attention.sliding_window_pattern")
    counts = keys.all.one_or_more(f"{keys.name}.attention.head_count_kv") or (heads,)
    counts = counts * layers if len(counts) == 1 else counts
    by_kind = {kind: {n for n, own in zip(counts, sliding, strict=False) if own == kind} for kind in (True, False)}
    if not len(counts) == len(sliding) == layers or any(len(numbers) != 1 for numbers in by_kind.values()):
        raise keys.all.error(f"{keys.name}.attention.head_count_kv", "must be one number for each kind of layers")
    (own,), (full,) = by_kind[True], by_kind[False]
    width = keys.size("attention.key_length")
    for kind, expected in (("", width), ("_swa", keys.size("attention.key_length_swa"))):
        keys.all.refuse(f"{keys.name}.attention.value_length{kind}", expected)
        keys.all.refuse(f"{keys.name}.rope.dimension_count{kind}", expected)
    divisors = keys.divisors()
    turning = sum(divisor < STANDING for divisor in divisors) if divisors else width // 8
    if any(divisor != 1 for divisor in divisors[:turning]):
        raise keys.all.error(f"{keys.name}.rope.freq_base", "the frequencies of pairs that turn are divided")
    alike = not keys.has(f"blk.{sliding.index(False)}.attn_v.weight")
    thetas = {FULL: keys.number("rope.freq_base"), SLIDING: keys.number("rope.freq_base_swa")}
    experts = keys.size("expert_count", default=0, minimum=0)
    shared = keys.size("attention.shared_kv_layers", default=0, minimum=0)
    widths = keys.all.one_or_more(f"{keys.name}.feed_forward_length")
    inner = widths[0] if widths else 0
    if {*widths[: len(widths) - shared]} - {inner} or {*widths[-shared:]} - {inner, 2 * inner} or not inner:
        raise keys.all.error(f"{keys.name}.feed_forward_length", "must be one number, or twice that in last layers")
    return {
        "num_key_value_heads": own,
        "head_dim": keys.size("attention.key_length_swa"),
        "global_head_dim": width,
        "num_global_key_value_heads": full if alike else None,
        "attention_k_eq_v": alike,
        "intermediate_size": inner,
        "use_double_wide_mlp": widths[-1] != inner,
        "enable_moe_block": experts > 0,
        "num_experts": experts or None,
        "top_k_experts": keys.size("expert_used_count") if experts else None,
        "moe_intermediate_size": keys.expert_width() if experts else None,
        "hidden_size_per_layer_input": keys.size("embedding_length_per_layer_input", default=0, minimum=0),
        "num_kv_shared_layers": shared,
        "vocab_size_per_layer_input": keys.rows("per_layer_token_embd.weight"),
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": [SLIDING if slides else FULL for slides in sliding],
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "rope_scaling": None,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": thetas[SLIDING]},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": thetas[FULL],
                "partial_rotary_factor": 2 * turning / width,
            },
        },
    }


def write(config: Gemma4Config) -> dict[str, Any]:
    raise UserError("GGUF: Gemma 4 is not written")


GEMMA4_GGUF = Architecture(
    "gemma4",
    Names(NAMES, experts_at="experts"),
    gatings=(SOFTMAX,),
    read=read,
    write=write,
    dense=True,
    own_attention=True,
)

"""What a step's tensors take, counted: which of them are alive at once in the model's code, at each moment that could
be the fullest. What the device's operators take for themselves is not known here.
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from executor.config.case import Case
from executor.parallel.groups import Parallel

if TYPE_CHECKING:
    from models.qwen3_moe.config import Qwen3MoeConfig

ID_BYTES = 4  # of an expert's id and of a row's place


@dataclass(frozen=True)
class Part:
    """`how`: where the bytes come from, in words."""

    name: str
    nbytes: int
    how: str = ""


def product(name: str, **factors: int) -> Part:
    """A part that is the product of what `factors` names."""
    how = " x ".join(f"{value:,} {factor.replace('_', ' ')}" for factor, value in factors.items())
    return Part(name, prod(factors.values()), how)


@dataclass(frozen=True)
class StepShape:
    """Sizes of one rank's step."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    head_split: int  # ranks that share the output head
    top_k: int
    inner: int  # an expert's intermediate size here; 0: no layer has experts
    dense_inner: int  # a dense layer's; 0: there is none
    groups: int  # data-parallel groups, whose tokens meet in the experts
    expert_rows: int  # tensors of a row for each token and expert that are alive while these are summed
    itemsize: int


def step_shape(case: Case, config: "Qwen3MoeConfig", parallel: Parallel, itemsize: int) -> StepShape:
    attn_tp = parallel.attn_tp.size
    return StepShape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads // attn_tp,
        kv_heads=max(config.num_key_value_heads // attn_tp, 1),
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        head_split=parallel.lmhead_tp.size,
        top_k=config.num_experts_per_tok,
        inner=config.moe_intermediate_size // parallel.moe_tp.size if any(config.sparse_layers) else 0,
        dense_inner=0 if all(config.sparse_layers) else config.intermediate_size // attn_tp,
        groups=parallel.attn_dp.size,
        expert_rows=3 if case.ascend_config.moe_routing == "tp" else 2,  # it reorders and weighs them apart
        itemsize=itemsize,
    )


Moments = dict[str, list[Part]]


def fullest(moments: Moments) -> tuple[str, list[Part]]:
    return max(moments.items(), key=lambda moment: sum(part.nbytes for part in moment[1]))


def of_model(shape: StepShape, tokens: int, sequences: int) -> Moments:
    return _attention(shape, tokens) | _experts(shape, tokens) | _dense(shape, tokens) | _head(shape, tokens, sequences)


def of_sampling(s: StepShape, sequences: int) -> Moments:
    """After the model: the logits, those of finished prompts, and these once more to choose from."""
    rows = dict(sequences=sequences, columns=s.vocabulary)
    return {
        "the choice of tokens": [product("logits", copies=2, **rows, B=s.itemsize), product("float32", **rows, B=4)]
    }


def _stream(s: StepShape, tokens: int) -> list[Part]:
    """What is alive throughout a layer."""
    return [
        # x and residual of the model's loop, and those of the layer
        product("hidden states, residuals", tensors=4, tokens=tokens, hidden=s.hidden, B=s.itemsize),
        product("cos, sin", tensors=2, tokens=tokens, head_dim=s.head_dim, B=s.itemsize),
    ]


def _attention(s: StepShape, tokens: int) -> Moments:
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    parts = [
        product("q, k, v", tokens=tokens, columns=q + 2 * kv, B=s.itemsize),
        product("q, k after norms", tokens=tokens, columns=q + kv, B=s.itemsize),
        product("attention's result", tokens=tokens, columns=q, B=s.itemsize),
        product("o_proj's result", tokens=tokens, hidden=s.hidden, B=s.itemsize),
    ]
    return {"attention's o_proj": _stream(s, tokens) + parts}


def _experts(s: StepShape, tokens: int) -> Moments:
    if not s.inner:
        return {}
    width, tokens_here = s.itemsize, tokens * s.groups
    common = _stream(s, tokens)
    if s.groups > 1:
        common.append(product("hidden states of all groups", tokens=tokens_here, hidden=s.hidden, B=width))
    common.append(product("weights, ids, places", tokens=tokens_here, experts=s.top_k, B=width + 2 * ID_BYTES))
    rows = dict(tokens=tokens_here, experts=s.top_k)
    routed = product("rows in expert order", **rows, hidden=s.hidden, B=width)
    gate_up = product("gate and up", **rows, columns=2 * s.inner, B=width)
    act = product("silu(gate) * up", **rows, columns=s.inner, B=width)
    down = product("down's result", **rows, hidden=s.hidden, B=width)
    summed = [
        product("rows of experts", tensors=s.expert_rows, **rows, hidden=s.hidden, B=width),
        product("their sums", tokens=tokens_here, hidden=s.hidden, B=width),
    ]
    return {
        "the experts' gate and up": [*common, routed, gate_up, act],
        "the experts' down": [*common, routed, act, down],
        "the sum over experts": [*common, *summed],
    }


def _dense(s: StepShape, tokens: int) -> Moments:
    if not s.dense_inner:
        return {}
    gate_up = product("gate and up", tokens=tokens, columns=2 * s.dense_inner, B=s.itemsize)
    act = product("silu(gate) * up", tokens=tokens, columns=s.dense_inner, B=s.itemsize)
    down = product("down's result", tokens=tokens, hidden=s.hidden, B=s.itemsize)
    return {
        "a dense layer's gate and up": [*_stream(s, tokens), gate_up, act],
        "a dense layer's down": [*_stream(s, tokens), act, down],
    }


def _head(s: StepShape, tokens: int, sequences: int) -> Moments:
    parts = [
        product("hidden states", tokens=tokens, hidden=s.hidden, B=s.itemsize),
        product("rows for the head", sequences=sequences, hidden=s.hidden, B=s.itemsize),
        product("logits here", sequences=sequences, columns=s.vocabulary // s.head_split, B=s.itemsize),
    ]
    if s.head_split > 1:  # as they come from the ranks, and in order
        parts.append(product("all logits", copies=2, sequences=sequences, columns=s.vocabulary, B=s.itemsize))
    return {"the head's logits": parts}

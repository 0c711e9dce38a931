"""One decoder layer of Qwen3-MoE in plain float32, in parts, so that a search can vary the weights of each part.

Shapes: B windows of L tokens, hidden size H. Tensor names are those of the checkpoint without `model.layers.N.`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.rotary import rotary_angles
from models.qwen3_moe.config import Qwen3MoeConfig
from ops.reference import rms_norm, rope, route_softmax

Weights = Callable[[str], Tensor]  # maps a tensor's name to its values in float32
QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


def mlps(config: Qwen3MoeConfig, sparse: bool) -> list[str]:
    """Name prefixes of the layer's gate, up and down projections: one, or one for each expert."""
    return [f"mlp.experts.{e}." for e in range(config.num_experts)] if sparse else ["mlp."]


def linear_shapes(config: Qwen3MoeConfig, sparse: bool) -> dict[str, tuple[int, int]]:
    """The shapes (out, in) of the layer's weights that are quantised."""
    hidden = config.hidden_size
    q_rows, kv_rows = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = dict(zip(QKV, ((q_rows, hidden), (kv_rows, hidden), (kv_rows, hidden)), strict=True))
    shapes["self_attn.o_proj.weight"] = (hidden, q_rows)
    inner = config.moe_intermediate_size if sparse else config.intermediate_size
    for place in mlps(config, sparse):
        shapes |= {f"{place}{which}_proj.weight": (inner, hidden) for which in ("gate", "up")}
        shapes[f"{place}down_proj.weight"] = (hidden, inner)
    return shapes


def float_shapes(config: Qwen3MoeConfig, sparse: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of the layer's tensors that are not quantised."""
    hidden, dim = (config.hidden_size,), (config.head_dim,)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": hidden,
        "post_attention_layernorm.weight": hidden,
        "self_attn.q_norm.weight": dim,
        "self_attn.k_norm.weight": dim,
    }
    if config.attention_bias:
        linears = linear_shapes(config, sparse)
        for name in (*QKV, "self_attn.o_proj.weight"):
            shapes[name.replace("weight", "bias")] = linears[name][:1]
    if sparse:
        shapes["mlp.gate.weight"] = (config.num_experts, config.hidden_size)
    return shapes


@dataclass(frozen=True)
class Routing:
    weights: Tensor  # (tokens, k)
    ids: Tensor  # (tokens, k)

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """The rows of the tokens that are routed to the expert, and its weight for each of them."""
        rows, columns = (self.ids == expert).nonzero(as_tuple=True)
        return rows, self.weights[rows, columns, None]


class LayerMath:
    def __init__(self, config: Qwen3MoeConfig, sparse: bool, length: int):
        self.config, self.sparse = config, sparse
        self.cos, self.sin = rotary_angles(config.rope, config.head_dim, length)  # (L, head_dim)

    def normed(self, w: Weights, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, w(f"{name}.weight"), self.config.rms_norm_eps)

    def linear(self, w: Weights, name: str, x: Tensor) -> Tensor:
        bias = w(f"{name}.bias") if self.config.attention_bias and name.startswith("self_attn.") else None
        return F.linear(x, w(f"{name}.weight"), bias)

    def heads(self, w: Weights, x: Tensor) -> Tensor:
        """The input of o_proj: x (B, L, H) -> (B, L, heads * head_dim)"""
        q, k, v = (
            self.linear(w, f"self_attn.{which}_proj", x).unflatten(-1, (-1, self.config.head_dim)) for which in "qkv"
        )
        q, k = self.normed(w, "self_attn.q_norm", q), self.normed(w, "self_attn.k_norm", k)
        q, k = rope(q, k, self.cos, self.sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, L, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    def attention(self, w: Weights, x: Tensor) -> Tensor:
        return self.linear(w, "self_attn.o_proj", self.heads(w, x))

    def route(self, w: Weights, x: Tensor) -> Routing:
        """x (tokens, H); a dense layer is treated as one expert that takes every token."""
        if not self.sparse:
            return Routing(x.new_ones(len(x), 1), torch.zeros(len(x), 1, dtype=torch.int64))
        logits = x @ w("mlp.gate.weight").T
        return Routing(*route_softmax(logits, self.config.num_experts_per_tok, self.config.norm_topk_prob))

    def experts(self, routing: Routing) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name prefix, rows, weights) of each expert that has tokens."""
        for expert, place in enumerate(mlps(self.config, self.sparse)):
            rows, share = routing.of(expert)
            if len(rows):
                yield place, rows, share

    def inner(self, w: Weights, place: str, x: Tensor) -> Tensor:
        """The input of an expert's down_proj."""
        return F.silu(x @ w(f"{place}gate_proj.weight").T) * (x @ w(f"{place}up_proj.weight").T)

    def mlp(self, w: Weights, x: Tensor, routing: Routing) -> Tensor:
        """x (tokens, H) -> (tokens, H)"""
        out = torch.zeros_like(x)
        for place, rows, share in self.experts(routing):
            y = self.inner(w, place, x[rows]) @ w(f"{place}down_proj.weight").T
            out.index_add_(0, rows, y * share)
        return out

    def forward(self, w: Weights, x: Tensor) -> Tensor:
        """x (B, L, H) -> (B, L, H), residual connections included."""
        x = x + self.attention(w, self.normed(w, "input_layernorm", x))
        normed = self.normed(w, "post_attention_layernorm", x).flatten(0, 1)
        return x + self.mlp(w, normed, self.route(w, normed)).view_as(x)

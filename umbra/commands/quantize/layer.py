"""One decoder layer in plain float32, in parts, so that a search can vary the weights of each part.

Shapes: B windows of L tokens, hidden size H. Tensor names are those of the checkpoint without `model.layers.N.`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from umbra.commands.quantize.workers import Each
from umbra.models.layers.attention import AttentionConfig
from umbra.models.layers.rotary import head_order, rotary_angles
from umbra.ops.reference import rms_norm, rope, sigmoid_mul

Weights = Callable[[str], Tensor]  # maps a tensor's name to its values in float32
QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
O_PROJ = "self_attn.o_proj.weight"


class LayerConfig(AttentionConfig, Protocol):
    """The part of a family's config that all families' layers read."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


C = TypeVar("C", bound=LayerConfig)


@dataclass(frozen=True)
class Routing:
    weights: Tensor  # (tokens, k)
    ids: Tensor  # (tokens, k)

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """The rows of the tokens that are routed to the expert, and its weight for each of them."""
        rows, columns = (self.ids == expert).nonzero(as_tuple=True)
        return rows, self.weights[rows, columns, None]


class LayerMath(ABC, Generic[C]):
    """A layer that holds the tensors `names`, for windows of `length` tokens. The families' classes say what differs
    between them."""

    matrices: ClassVar[tuple[str, str, str]]  # names of an expert's gate, up and down projections
    router: ClassVar[str]  # path of the router within a layer
    shared: ClassVar[str] = ""  # path of the expert that every token takes, which is numbered after the others
    shared_gate: ClassVar[str] = ""  # path of its gate
    small: ClassVar[tuple[str, ...]] = ()  # paths of other modules that stay in floats
    fp8_name: ClassVar[str]  # how the family's official FP8 configs call the type of the weights
    norm_base: ClassVar[float] = 0.0  # what the stored weights of norms lack

    @classmethod
    @abstractmethod
    def not_fp8(cls, config: C) -> list[str]:
        """`modules_to_not_convert` of the family's official FP8 configs."""

    @abstractmethod
    def choose(self, w: Weights, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The router's logits (tokens, experts) -> the weights and ids of the chosen experts, each (tokens, k)"""

    def __init__(self, config: C, names: Collection[str], length: int):
        self.config, self.names = config, names
        self.inputs: Collection[str] = QKV  # weights whose input is that of attention
        self.cos, self.sin = rotary_angles(config.rope, config.head_dim, length)  # (L, head_dim)
        self.order = head_order(config.rope, config.head_dim)
        self.gate, self.up, self.down = (f"{matrix}.weight" for matrix in self.matrices)
        # Name prefixes of the matrices above: one, or one for each expert.
        self.mlps = [name.removesuffix(self.down) for name in names if name.endswith(f".{self.down}")]

    def normed(self, w: Weights, name: str, x: Tensor) -> Tensor:
        """RMS norm over as many columns of `x` as the norm's weight has, if there is such a norm."""
        if f"{name}.weight" not in self.names:
            return x
        weight = w(f"{name}.weight") + self.norm_base
        return rms_norm(x.unflatten(-1, (-1, len(weight))), weight, self.config.rms_norm_eps).flatten(-2)

    def linear(self, w: Weights, name: str, x: Tensor) -> Tensor:
        bias = f"{name}.bias"
        return F.linear(x, w(f"{name}.weight"), w(bias) if bias in self.names else None)

    def heads(self, w: Weights, x: Tensor) -> Tensor:
        """The input of o_proj: x (B, L, H) -> (B, L, heads * head_dim)"""
        q, gate = self.queries(w, x)
        k, v = (self.linear(w, f"self_attn.{which}_proj", x) for which in "kv")
        q, k = self.normed(w, "self_attn.q_norm", q), self.normed(w, "self_attn.k_norm", k)
        q, k, v = (t.unflatten(-1, (-1, self.config.head_dim)) for t in (q, k, v))
        if self.order:
            q, k = q[..., self.order], k[..., self.order]
        q, k = rope(q, k, self.cos, self.sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, L, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = out.transpose(1, 2).flatten(2)
        return out if gate is None else sigmoid_mul(out, gate)

    def queries(self, w: Weights, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The queries (B, L, heads * head_dim) and, where there is one, as large a gate of the attention's result."""
        return self.linear(w, "self_attn.q_proj", x), None

    def within(self, w: Weights, x: Tensor) -> Iterator[tuple[Tensor, str, str]]:
        """(inputs, weight, norm) of each product within the attention of x (B, L, H) whose inputs a norm makes."""
        yield from ()

    def attentions(self, candidates: Iterable[Weights], x: Tensor, each: Each) -> Iterator[Tensor]:
        """The attention's output (B, L, H) for x (B, L, H) with each of the weights."""

        def attention(task: tuple[Weights, Tensor]) -> Tensor:
            w, window = task
            return self.linear(w, "self_attn.o_proj", self.heads(w, window))

        windows = x.split(1)
        outputs = each(attention, ((w, window) for w in each(self.held, candidates) for window in windows))
        for first in outputs:
            yield torch.cat([first, *islice(outputs, len(windows) - 1)])

    def held(self, w: Weights) -> Weights:
        """The attention's weights, read once for all windows."""
        return {name: w(name) for name in self.names if name.startswith("self_attn.")}.__getitem__

    def route(self, w: Weights, x: Tensor) -> Routing:
        """x (tokens, H); a dense layer is treated as one expert that takes every token."""
        router = f"{self.router}.weight"
        if router not in self.names:
            return Routing(x.new_ones(len(x), 1), torch.zeros(len(x), 1, dtype=torch.int64))
        weights, ids = self.choose(w, x @ w(router).T)
        if self.shared:
            last, gate = ids.new_full((len(x), 1), len(self.mlps) - 1), f"{self.shared_gate}.weight"
            whole = (x @ w(gate).T).sigmoid() if self.shared_gate else x.new_ones(len(x), 1)
            weights, ids = torch.cat([weights, whole], 1), torch.cat([ids, last], 1)
        return Routing(weights, ids)

    def experts(self, routing: Routing) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name prefix, rows, weights) of each expert that has tokens."""
        for expert, prefix in enumerate(self.mlps):
            rows, share = routing.of(expert)
            if len(rows):
                yield prefix, rows, share

    def inner(self, w: Weights, prefix: str, x: Tensor) -> Tensor:
        """The input of an expert's down projection."""
        return F.silu(x @ w(prefix + self.gate).T) * (x @ w(prefix + self.up).T)

    def mlps_of(self, candidates: Iterable[Weights], x: Tensor, routing: Routing, each: Each) -> Iterator[Tensor]:
        """The output (tokens, H) of the experts for x (tokens, H) with each of the weights."""

        def expert(task: tuple[Weights, str, Tensor, Tensor]) -> Tensor:
            w, prefix, rows, share = task
            return self.inner(w, prefix, x[rows]) @ w(prefix + self.down).T * share

        experts = list(self.experts(routing))
        outputs = each(expert, ((w, *each_expert) for w in candidates for each_expert in experts))
        for first in outputs:
            out = torch.zeros_like(x)
            for (_, rows, _), y in zip(experts, chain([first], outputs), strict=False):  # takes one for each expert
                out.index_add_(0, rows, y)
            yield out

    def forward(self, w: Weights, x: Tensor, each: Each = map) -> Tensor:
        """x (B, L, H) -> (B, L, H), residual connections included."""
        x = x + next(self.attentions([w], self.normed(w, "input_layernorm", x), each))
        normed = self.normed(w, "post_attention_layernorm", x).flatten(0, 1)
        return x + next(self.mlps_of([w], normed, self.route(w, normed), each)).view_as(x)

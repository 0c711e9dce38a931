"""Mistakes that implementations of Qwen2-MoE, GLM-4.5 and gpt-oss have made, as patches of Umbra."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from umbra.models.layers.attention import PagedAttention
from umbra.models.layers.experts import Experts
from umbra.models.layers.router import Router
from umbra.models.rope import YarnConfig
from umbra.ops import reference
from umbra.ops.cpu import ops as cpu

Mistake = Callable[[pytest.MonkeyPatch], None]


def without_experts_that_all_take(patch: pytest.MonkeyPatch) -> None:
    forward = Experts.forward
    patch.setattr(Experts, "forward", lambda self, x, routed, batch, *shared: forward(self, x, routed, batch))


def without_a_gate(patch: pytest.MonkeyPatch) -> None:
    forward = Experts.forward
    patch.setattr(
        Experts, "forward", lambda self, x, routed, batch, shared, *gate: forward(self, x, routed, batch, shared)
    )


def renormalised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cpu, "route_softmax", lambda logits, k, _: reference.route_softmax(logits, k, True))


def routing(route: Callable[[Tensor, Tensor, int, bool, float], tuple[Tensor, Tensor]]) -> Mistake:
    return lambda patch: patch.setattr(cpu, "route_sigmoid", lambda *args: route(*args[:5]))


def weights_with_bias(logits: Tensor, bias: Tensor, k: int, _: bool, scale: float) -> tuple[Tensor, Tensor]:
    weights, ids = (logits.sigmoid() + bias).topk(k)
    return scale * weights / weights.sum(-1, keepdim=True), ids


def norms_after_rotation(patch: pytest.MonkeyPatch) -> None:
    def normed(self: PagedAttention, qkv: Tensor, q_norm: Any, k_norm: Any, cos: Tensor, *rest: Any) -> Tensor:
        heads, dim, (sin, batch) = self.kv_heads, self.head_dim, rest
        q, k, v = qkv.unflatten(1, (-1, dim)).split([self.heads, heads, heads], 1)
        q, k = self.ops.rope(q, k, cos, sin)
        return self.forward(q_norm(q), k_norm(k), v, batch)

    patch.setattr(PagedAttention, "normed", normed)


def a_router_bias_that_only_chooses(patch: pytest.MonkeyPatch) -> None:
    def routed(logits: Tensor, k: int, _: bool) -> tuple[Tensor, Tensor]:
        ids = (logits + biases[-1]).topk(k).indices
        return logits.gather(1, ids).softmax(-1), ids

    def forward(self: Router, x: Tensor) -> Tensor:
        biases.append(self.score_bias)
        return self.ops.linear(x, self.weight, None)

    biases: list[Any] = []
    patch.setattr(Router, "forward", forward)
    patch.setattr(cpu, "route_softmax", routed)


def attending(change: Callable[..., tuple[Any, Any]]) -> Mistake:
    """`change` takes and returns the window, if there is one, and the sinks."""
    attention: Any = cpu.attention
    return lambda patch: patch.setattr(cpu, "attention", lambda *args: attention(*args[:5], *change(*args[5:])))


def gating(gated: Callable[..., Tensor]) -> Mistake:
    """`gated` takes gates, ups and their `ExpertKind`."""

    def mistake(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(cpu, "expert_matrices", reference.DenseExperts)
        patch.setattr(cpu, "moe", reference.moe)
        patch.setattr(reference, "gated", lambda x, kind: gated(*x.chunk(2, -1), kind))

    return mistake


def glu(gate: Tensor) -> Tensor:
    return gate * (1.702 * gate).sigmoid()


def halves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("umbra.models.layers.experts.every_other", lambda part: part.contiguous().chunk(2))


def yarn_with(**changes: Any) -> Mistake:
    return lambda patch: patch.setattr("umbra.models.rope.YarnConfig", lambda **read: YarnConfig(**(read | changes)))


def bias_in_bfloat16(x: Tensor, bias: Tensor, k: int, again: bool, scale: float) -> tuple[Tensor, Tensor]:
    return reference.route_sigmoid(x, bias.bfloat16(), k, again, scale)


def scaled_if_renormalised(x: Tensor, bias: Tensor, k: int, again: bool, scale: float) -> tuple[Tensor, Tensor]:
    return reference.route_sigmoid(x, bias, k, again, scale if again else 1.0)


def outputs_limited(gate: Tensor, up: Tensor, kind: Any) -> Tensor:
    return (up.clamp(-kind.limit, kind.limit) + 1) * glu(gate).clamp(max=kind.limit)


def ups_without_one(gate: Tensor, up: Tensor, kind: Any) -> Tensor:
    return up.clamp(-kind.limit, kind.limit) * glu(gate.clamp(max=kind.limit))


# By name and, where it is not "tiny", the variant of the family in which it shows.
GLM4_MOE: dict[str, Mistake] = {
    "without_shared_experts": without_experts_that_all_take,
    "weights_with_bias": routing(weights_with_bias),
    "no_bias": routing(lambda x, _, k, again, scale: reference.route_sigmoid(x, None, k, again, scale)),
    "not_scaled": routing(lambda x, bias, k, again, _: reference.route_sigmoid(x, bias, k, again)),
    "bias_in_bfloat16": routing(bias_in_bfloat16),
    "scaled_if_renormalised not_renormalised": routing(scaled_if_renormalised),
    "scaled as_air": routing(lambda x, bias, k, again, _: reference.route_sigmoid(x, bias, k, again, 2.5)),
    "softmax as_air": routing(lambda x, _, k, again, scale: reference.route_softmax(x, k, again)),
    "norms_after_rotation": norms_after_rotation,
}
HY_V3: dict[str, Mistake] = {name: GLM4_MOE[name] for name in ("no_bias", "weights_with_bias", "not_scaled")}
HY_V3 |= {"norms_after_rotation": norms_after_rotation, "without_shared_experts": without_experts_that_all_take}
QWEN2_MOE: dict[str, Mistake] = {
    "without_a_shared_expert": without_experts_that_all_take,
    "without_a_gate": without_a_gate,
    "renormalised": renormalised,
}
GPT_OSS: dict[str, Mistake] = {"a_wider_window": attending(lambda window, sinks: (window and window + 1, sinks))}
GPT_OSS |= {"no_window": attending(lambda window, sinks: (None, sinks))}
GPT_OSS |= {"sinks_scaled": attending(lambda window, sinks: (window, sinks * 32**-0.5))}
GPT_OSS |= {"yarn_truncated": yarn_with(truncate=True), "yarn_without_factor": yarn_with(factor=1.0)}
GPT_OSS |= {"yarn_without_attention_factor": yarn_with(attention_factor=1.0)}
GPT_OSS |= {"not_limited": gating(lambda gate, up, kind: (up + 1) * glu(gate))}
GPT_OSS |= {"outputs_limited": gating(outputs_limited), "ups_without_one": gating(ups_without_one), "halves": halves}
GPT_OSS |= {"a_router_bias_that_only_chooses": a_router_bias_that_only_chooses}

"""Ways to compute MiniMax-M2 wrongly, one of each kind: each patches the model or the CPU's ops."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import umbra.models.minimax_m2.model as model
from tests.models.family_mistakes import Mistake
from umbra.models.build import Build
from umbra.models.layers.experts import Experts
from umbra.models.layers.norm import SplitRMSNorm
from umbra.models.layers.router import Router
from umbra.models.rope import RopeConfig
from umbra.ops import reference
from umbra.ops.cpu import ops as cpu
from umbra.ops.formats import FORMATS

Routing = Callable[[Tensor, Tensor | None, int, bool], tuple[Tensor, Tensor]]


def norm_of_each_head(patch: pytest.MonkeyPatch) -> None:
    def forward(self: SplitRMSNorm, *parts: Tensor) -> list[Tensor]:
        heads = [x.unflatten(-1, (-1, len(self.sources[0].order or ()))) for x in parts]
        ones = torch.ones(heads[0].shape[-1])
        normed = [reference.rms_norm(x, ones, self.eps).flatten(1) for x in heads]
        return [x * weight for x, weight in zip(normed, self.weights, strict=True)]

    patch.setattr(SplitRMSNorm, "forward", forward)


def neighbours_are_pairs(patch: pytest.MonkeyPatch) -> None:
    def order(rope: RopeConfig, head_dim: int) -> tuple[int, ...]:
        middle = (rope.dim + head_dim) // 2
        return (*range(0, rope.dim, 2), *range(rope.dim, middle), *range(1, rope.dim, 2), *range(middle, head_dim))

    patch.setattr(model, "head_order", order)


def routing(route: Routing) -> Mistake:
    return lambda patch: patch.setattr(cpu, "route_sigmoid", route)


def weights_with_bias(logits: Tensor, bias: Tensor | None, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    assert bias is not None
    weights, ids = (logits.sigmoid() + bias).topk(top_k)
    return weights / weights.sum(-1, keepdim=True), ids


def gate_and_up_swapped(patch: pytest.MonkeyPatch) -> None:
    def experts(build: Build, count: int, hidden: int, inner: int, names: tuple[str, str, str]) -> Experts:
        return Experts(build, count, hidden, inner, ("w3", "w1", "w2"))

    patch.setattr(model, "Experts", experts)


def gate_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    def router(build: Build, hidden: int, experts: int, kind: object) -> Router:
        return Router(build, hidden, experts, FORMATS["bfloat16"])

    patch.setattr(model, "Router", router)


MISTAKES: dict[str, Mistake] = {
    "norm_of_each_head": norm_of_each_head,
    "neighbours_are_pairs": neighbours_are_pairs,
    "weights_with_bias": routing(weights_with_bias),
    "not_renormalised": routing(
        lambda logits, bias, top_k, renormalise: reference.route_sigmoid(logits, bias, top_k, False)
    ),
    "gate_and_up_swapped": gate_and_up_swapped,
}

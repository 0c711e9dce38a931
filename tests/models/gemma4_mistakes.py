"""Mistakes that implementations of Gemma 4 have made, as patches of Umbra."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.family_mistakes import Mistake, attending
from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.gemma4.model import Gemma4Attention, Gemma4DecoderLayer
from umbra.models.layers.attention import CacheReader, PagedAttention
from umbra.models.layers.base import Vector
from umbra.models.layers.norm import ScaledNorm, WeightlessNorm
from umbra.models.rope import RopeConfig
from umbra.ops import reference
from umbra.ops.cpu import ops as cpu


def op(name: str, change: Callable[..., Any]) -> Mistake:
    return lambda patch: patch.setattr(cpu, name, change)


def scaled_scores(patch: pytest.MonkeyPatch) -> None:
    attention: Any = cpu.attention

    def changed(q: Tensor, k: Tensor, v: Tensor, paged: Any, _: float, *rest: Any) -> Any:
        return attention(q, k, v, paged, q.shape[2] ** -0.5, *rest)

    patch.setattr(cpu, "attention", changed)


def without_factors(logits: Tensor, top_k: int, renormalise: bool, factors: Tensor) -> tuple[Tensor, Tensor]:
    return reference.route_softmax(logits, top_k, renormalise)


def read_as(layer: type, value: Callable[[Any], float]) -> Mistake:
    """The numbers of a layer are all `value`, whatever the checkpoint has."""

    def mistake(patch: pytest.MonkeyPatch) -> None:
        pieces: Any = layer.pieces  # type: ignore[attr-defined]

        def changed(self: Any, path: str) -> Any:
            tensor = self.weight if layer is ScaledNorm else self.values
            for piece in pieces(self, path):
                yield dataclasses.replace(piece, fill=lambda part: tensor.fill_(value(self)))

        patch.setattr(layer, "pieces", changed)

    return mistake


def denominator_of_what_turns(patch: pytest.MonkeyPatch) -> None:
    frequencies = RopeConfig.inverse_frequencies

    def changed(self: RopeConfig) -> list[float]:
        if self.turning is None:
            return frequencies(self)
        few = RopeConfig(self.theta, 2 * self.turning, None)
        return frequencies(few) + [0.0] * (self.dim // 2 - self.turning)

    patch.setattr(RopeConfig, "inverse_frequencies", changed)


def a_router_after_the_norm(patch: pytest.MonkeyPatch) -> None:
    init = Gemma4DecoderLayer.__init__

    def changed(self: Any, *args: Any) -> None:
        init(self, *args)
        route, norm = self.router.forward, self.pre_feedforward_layernorm_2
        self.router.forward = lambda x: route(norm(x))

    patch.setattr(Gemma4DecoderLayer, "__init__", changed)


def values_of_normed_keys(patch: pytest.MonkeyPatch) -> None:
    forward = Gemma4Attention.forward

    def changed(self: Any, *args: Any) -> Tensor:
        if self.keys_are_values:
            norm = self.v_norm
            patch.setattr(norm, "forward", lambda k: WeightlessNorm.forward(norm, self.k_norm(k)))
        return forward(self, *args)

    patch.setattr(Gemma4Attention, "forward", changed)


def keys_of_the_first_layer(patch: pytest.MonkeyPatch) -> None:
    """The keys read are those of the first layer with the same window, in place of the last one."""
    first: dict[int | None, PagedAttention] = {}
    init = PagedAttention.__init__

    def kept(self: PagedAttention, build: Build, *args: Any, **options: Any) -> None:
        init(self, build, *args, **options)
        if build.device.type != "meta":  # a sketch of the model is made before
            first.setdefault(self.window, self)

    def attend(self: CacheReader, q: Tensor, batch: Batch) -> Tensor:
        return first[self.sources[0].window].attend(q, batch)

    patch.setattr(PagedAttention, "__init__", kept)
    patch.setattr(CacheReader, "forward", attend)


def without_inputs(x: Tensor, up: Tensor | None = None) -> Tensor:
    return reference.gelu_mul(x, up if up is None else torch.zeros_like(x))


GEMMA4: dict[str, Mistake] = {
    "a_wider_window": attending(lambda window, sinks: (window and window + 1, sinks)),
    "a_narrower_window": attending(lambda window, sinks: (window and window - 1, sinks)),
    "scaled_scores": scaled_scores,
    "no_factors_of_experts": op("route_softmax", without_factors),
    "no_scale_of_the_router": read_as(ScaledNorm, lambda norm: norm.factor),
    "no_layer_scalar": read_as(Vector, lambda vector: 1.0),
    "no_softcap": op("softcap", lambda x, cap: x),
    "values_without_a_norm": lambda patch: patch.setattr(WeightlessNorm, "forward", lambda self, x: x.contiguous()),
    "values_of_normed_keys": values_of_normed_keys,
    "denominator_of_what_turns": denominator_of_what_turns,
    "a_router_after_the_norm": a_router_after_the_norm,
    "keys_of_the_first_layer shared": keys_of_the_first_layer,
    "no_inputs_of_layers shared": op("gelu_mul", without_inputs),
    "no_weight_of_projected_embeddings shared": read_as(ScaledNorm, lambda norm: norm.factor),
    "silu": op("gelu_mul", reference.silu_mul),
}

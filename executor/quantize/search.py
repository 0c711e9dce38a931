"""Activation-aware scales (AWQ, arXiv 2306.00978) for one decoder layer.

Before rounding, the input columns of a matrix are multiplied by s, and the layer that produces this input is divided by
s. The function stays the same, but columns with large inputs lose less to rounding. s = mean|x|^alpha; alpha is chosen
from a grid so that the output with rounded weights is nearest to the exact one. alpha 0 is plain rounding, so on the
calibration text the result is never worse than without scales.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.quantize.layer import QKV, LayerMath, Weights, mlps
from executor.quantize.pack import quantise

STEPS = 20  # alphas from 0 to 0.95
FLOOR = 0.01  # least input, relative to the average: columns that calibration hardly used keep some precision


@dataclass(frozen=True)
class Fold:
    """Multiply columns of some weights by `scale`, and divide the rows or the norm that produce their input by it."""

    scale: Tensor  # (in) float32
    multiplied: frozenset[str]
    divided: frozenset[str]


def best_scale(
    x: Tensor, names: frozenset[str], weights: Weights, part: Callable[[Weights], Tensor], group: int
) -> Tensor:
    """The scale (in) for the inputs x (tokens, in) of the matrices `names` that changes the output of `part` least."""
    exact, size = part(weights), x.abs().mean(0)
    size = size.clamp(min=float(size.mean()) * FLOOR)
    best, least = torch.ones_like(size), float("inf")
    for step in range(STEPS):
        scale = size ** (step / STEPS)
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = float((part(_rounded(weights, names, scale, group)) - exact).square().mean())
        if error < least:  # false where inputs that are all zero make the scale NaN
            best, least = scale, error
    return best


def _rounded(weights: Weights, names: frozenset[str], scale: Tensor, group: int) -> Weights:
    """Weights that are scaled, rounded and scaled back, so that they apply to the unscaled input."""

    def weight(name: str) -> Tensor:
        exact = weights(name)
        return quantise(exact * scale, group).floats() / scale if name in names else exact

    return weight


def search_layer(layer: LayerMath, weights: Weights, x: Tensor, group: int) -> Iterator[Fold]:
    """The folds of a layer whose input is x (B, L, H)."""
    config = layer.config
    normed, names = layer.normed(weights, "input_layernorm", x), frozenset(QKV)
    scale = best_scale(normed.flatten(0, 1), names, weights, lambda w: layer.attention(w, normed), group)
    yield Fold(scale, names, frozenset({"input_layernorm.weight"}))

    heads, names = layer.heads(weights, normed), frozenset({"self_attn.o_proj.weight"})
    if config.num_attention_heads == config.num_key_value_heads:  # otherwise several query heads share a row of v_proj
        scale = best_scale(
            heads.flatten(0, 1), names, weights, lambda w: layer.linear(w, "self_attn.o_proj", heads), group
        )
        yield Fold(scale, names, frozenset({"self_attn.v_proj.weight", "self_attn.v_proj.bias"}))
    x = x + layer.linear(weights, "self_attn.o_proj", heads)

    flat = layer.normed(weights, "post_attention_layernorm", x).flatten(0, 1)
    routing = layer.route(weights, flat)
    names = frozenset(f"{place}{which}_proj.weight" for place in mlps(config, layer.sparse) for which in ("gate", "up"))
    scale = best_scale(flat, names, weights, lambda w: layer.mlp(w, flat, routing), group)
    yield Fold(scale, names | {"mlp.gate.weight"}, frozenset({"post_attention_layernorm.weight"}))

    for place, rows, share in layer.experts(routing):
        inner = layer.inner(weights, place, flat[rows]) * share  # weighted as in the layer's output
        yield _fold_down(place, inner, weights, group)


def _fold_down(place: str, inner: Tensor, weights: Weights, group: int) -> Fold:
    name = f"{place}down_proj.weight"
    scale = best_scale(inner, frozenset({name}), weights, lambda w: inner @ w(name).T, group)
    return Fold(scale, frozenset({name}), frozenset({f"{place}up_proj.weight"}))


def fold(tensors: Mapping[str, Tensor], folds: list[Fold]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a layer by name, in float32, with the folds applied."""
    folds = [_as_stored(f, tensors) for f in folds]
    for name, tensor in tensors.items():
        wide = tensor.float()
        for f in folds:
            if name in f.multiplied:
                wide = wide * f.scale
            if name in f.divided:
                wide = wide / f.scale.view(-1, *[1] * (wide.dim() - 1))
        yield name, wide


def _as_stored(f: Fold, tensors: Mapping[str, Tensor]) -> Fold:
    """The fold with the scale that a norm really gets once it is rounded to its type: the product stays exact."""
    for name in f.divided:
        if name.endswith("norm.weight"):
            exact = tensors[name].float()
            stored = (exact / f.scale).to(tensors[name].dtype).float()
            return Fold(torch.where(stored == 0, f.scale, exact / stored), f.multiplied, f.divided)
    return f

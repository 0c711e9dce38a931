"""Activation-aware scales (AWQ, arXiv 2306.00978) for one decoder layer.

Before rounding, the input columns of a matrix are multiplied by s, and the layer that produces this input is divided by
s. The function stays the same, but columns with large inputs lose less to rounding. s = mean|x|^alpha; alpha is chosen
from a grid so that the output with rounded weights is nearest to the exact one. alpha 0 is plain rounding, so on the
calibration text the result is never worse than without scales.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from umbra.commands.quantize.awq import quantise
from umbra.commands.quantize.layer import O_PROJ, LayerMath, Weights
from umbra.commands.quantize.workers import Each

STEPS = 20  # alphas from 0 to 0.95
NORM = "norm.weight"  # end of the names of norms' weights
FLOOR = 0.01  # least input, relative to the average: columns that calibration hardly used keep some precision


@dataclass(frozen=True)
class Fold:
    """Multiply columns of some weights by `scale`, and divide the rows or the norm that produce their input by it."""

    scale: Tensor  # (in) float32
    multiplied: frozenset[str]
    divided: frozenset[str]
    norm_base: float  # what the stored weight of a norm lacks


Outputs = Callable[[Iterable[Weights]], Iterator[Tensor]]  # the output of a part of a layer with each of the weights


def best_scale(x: Tensor, names: frozenset[str], weights: Weights, outputs: Outputs, group: int) -> Tensor:
    """The scale (in) for the inputs x (tokens, in) of the matrices `names` that changes the output of a part least."""
    size = x.abs().mean(0)
    size = size.clamp(min=float(size.mean()) * FLOOR)
    powers = [size ** (step / STEPS) for step in range(STEPS)]
    scales = [power / (power.max() * power.min()).sqrt() for power in powers]
    results = outputs(chain([weights], (_rounded(weights, names, scale, group) for scale in scales)))
    exact = next(results)
    best, least = torch.ones_like(size), float("inf")
    for scale, output in zip(scales, results, strict=True):
        error = float((output - exact).square().mean())
        if error < least:  # false where inputs that are all zero make the scale NaN
            best, least = scale, error
    return best


def _rounded(weights: Weights, names: frozenset[str], scale: Tensor, group: int) -> Weights:
    """Weights that are scaled, rounded and scaled back, so that they apply to the unscaled input."""

    def weight(name: str) -> Tensor:
        exact = weights(name)
        return quantise(exact * scale, group).floats() / scale if name in names else exact

    return weight


def search_layer(
    layer: LayerMath[Any], weights: Weights, x: Tensor, group: int, rounded: Callable[[str], bool], each: Each = map
) -> Iterator[Fold]:
    """The folds of a layer whose input is x (B, L, H); `rounded` says of a weight whether it is quantised. Weights that
    are not quantised are multiplied as well if they have the same input as others."""
    config = layer.config

    def folds(x: Tensor, multiplied: Iterable[str], divided: Iterable[str], outputs: Outputs) -> Iterator[Fold]:
        """The fold for the inputs `x` (..., in) of `multiplied`, none if all of these stay in floats."""
        names = frozenset(multiplied).intersection(layer.names)  # a dense layer has no router
        if chosen := frozenset(filter(rounded, names)):
            yield Fold(
                best_scale(x.flatten(0, -2), chosen, weights, outputs, group),
                names,
                frozenset(divided),
                layer.norm_base,
            )

    normed = layer.normed(weights, "input_layernorm", x)
    yield from folds(normed, layer.inputs, ["input_layernorm.weight"], lambda ws: layer.attentions(ws, normed, each))

    for inner, name, norm in layer.within(weights, normed):
        yield from folds(inner, [name], [norm], partial(_products, inner, name))

    # Where a query head has a row of v_proj for itself.
    if config.num_attention_heads == config.num_key_value_heads and O_PROJ in layer.names:
        held = layer.held(weights)
        heads = torch.cat(list(each(lambda window: layer.heads(held, window), normed.split(1))))
        above = ["self_attn.v_proj.weight", "self_attn.v_proj.bias"]
        yield from folds(
            heads, [O_PROJ], above, lambda ws: each(lambda w: layer.linear(w, "self_attn.o_proj", heads), ws)
        )
    x = x + next(layer.attentions([weights], normed, each))

    flat = layer.normed(weights, "post_attention_layernorm", x).flatten(0, 1)
    routing = layer.route(weights, flat)
    inputs = [prefix + matrix for prefix in layer.mlps for matrix in (layer.gate, layer.up)]
    router = [f"{gate}.weight" for gate in (layer.router, layer.shared_gate)]
    yield from folds(
        flat, inputs + router, ["post_attention_layernorm.weight"], lambda ws: layer.mlps_of(ws, flat, routing, each)
    )

    def down(expert: tuple[str, Tensor, Tensor]) -> list[Fold]:
        prefix, rows, share = expert
        name = prefix + layer.down
        inner = layer.inner(weights, prefix, flat[rows]) * share  # weighted as in the layer's output
        # Products with a matrix keep their size if Q of inner = QR is left out: as many rows as columns are enough.
        least = torch.linalg.qr(inner, mode="r").R if len(inner) > inner.shape[1] else inner
        return list(folds(inner, [name], [prefix + layer.up], partial(_products, least, name)))

    yield from chain.from_iterable(each(down, layer.experts(routing)))


def _products(x: Tensor, name: str, candidates: Iterable[Weights]) -> Iterator[Tensor]:
    return (x @ w(name).T for w in candidates)


def fold(tensors: Mapping[str, Tensor], folds: list[Fold]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a layer by name, in float32, with the folds applied."""
    folds = [_as_stored(f, tensors) for f in folds]
    for name, tensor in tensors.items():
        wide = tensor.float()
        for f in folds:
            if name in f.multiplied:
                wide = wide * f.scale
            if name in f.divided:
                base = f.norm_base if name.endswith(NORM) else 0.0
                wide = (wide + base) / f.scale.view(-1, *[1] * (wide.dim() - 1)) - base
        yield name, wide


def _as_stored(f: Fold, tensors: Mapping[str, Tensor]) -> Fold:
    """The fold with the scale that a norm really gets once it is rounded to its type: the product stays exact."""
    for name in f.divided:
        if name.endswith(NORM):
            exact = tensors[name].float() + f.norm_base
            stored = (exact / f.scale - f.norm_base).to(tensors[name].dtype).float() + f.norm_base
            return replace(f, scale=torch.where(stored == 0, f.scale, exact / stored))
    return f

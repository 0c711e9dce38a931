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

import torch
from torch import Tensor, nn

from umbra.commands.quantize.awq import quantise
from umbra.commands.quantize.layer import CalibratedLayer, Product, Watched, Weights

STEPS = 20  # alphas from 0 to 0.95
O_PROJ = "self_attn.o_proj.weight"
VALUES = ("self_attn.v_proj.weight", "self_attn.v_proj.bias")
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
    layer: CalibratedLayer, weights: Weights, x: Tensor, group: int, rounded: Callable[[str], bool]
) -> Iterator[Fold]:
    """The folds of a layer whose input is x (B, L, H); `rounded` says of a weight whether it is quantised. Weights that
    are not quantised are multiplied as well if they have the same input as others. The layer has its exact weights
    afterwards."""
    base = layer.layer.input_layernorm.base

    def folds(x: Tensor, multiplied: Iterable[str], divided: Iterable[str], outputs: Outputs) -> Iterator[Fold]:
        """The fold for the inputs `x` (tokens, in) of `multiplied`, none if all of these stay in floats."""
        names = frozenset(multiplied)
        if chosen := frozenset(filter(rounded, names)):
            yield Fold(best_scale(x, chosen, weights, outputs, group), names, frozenset(divided), base)
            layer.fill(weights, names)

    def products(product: Product, divided: Iterable[str]) -> Iterator[Fold]:
        [name] = product.names
        return folds(product.x, [name], divided, partial(_products, product.x, name))

    def inputs(block: nn.Module, normed: Tensor, watched: Watched) -> Iterator[Fold]:
        """The fold of the block's own input, by the block's output; of others that a norm makes, by their product."""
        for product in watched.products:
            if product.norm == watched.norm:
                outputs = partial(layer.outputs, block, normed, product.names, watched.routing)
                yield from folds(product.x, product.names, [product.norm], outputs)
            elif product.norm:
                yield from products(product, [product.norm])

    layer.fill(weights)
    normed = layer.normed("input_layernorm", x)
    attention = layer.watch(layer.attention, normed, weights)
    yield from inputs(layer.attention, normed, attention)
    # Where a query head has a row of v_proj for itself.
    if layer.config.num_attention_heads == layer.config.num_key_value_heads:
        for product in attention.products:
            if product.names == (O_PROJ,):
                yield from products(product, VALUES)
    x = x + attention.out

    normed = layer.normed("post_attention_layernorm", x)
    mlp, flat = layer.watch(layer.mlp, normed, weights), normed.flatten(0, 1)
    yield from inputs(layer.mlp, normed, mlp)
    for product in mlp.products:
        if not product.norm:  # of the MLP of a dense layer, or a shared expert
            [name] = product.names
            inner = product.x if mlp.gate is None else product.x * mlp.gate.sigmoid()
            yield from down(folds, inner, name, name.replace("down_proj", "up_proj"))

    def expert(task: tuple[tuple[str, str, str], Tensor, Tensor]) -> list[Fold]:
        names, rows, share = task
        inner = layer.inner(weights, names, flat[rows]) * share  # weighted as in the layer's output
        return list(down(folds, inner, names[2], names[1]))

    if mlp.routing:
        yield from chain.from_iterable(layer.parallel_map(expert, layer.routed(mlp.routing)))


def down(folds: Callable[..., Iterator[Fold]], inner: Tensor, name: str, above: str) -> Iterator[Fold]:
    """The fold of a down projection with the inputs `inner`, of which `above` makes the rows."""
    # Products with a matrix keep their size if Q of inner = QR is left out: as many rows as columns are enough.
    least = torch.linalg.qr(inner, mode="r").R if len(inner) > inner.shape[1] else inner
    return folds(inner, [name], [above], partial(_products, least, name))


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

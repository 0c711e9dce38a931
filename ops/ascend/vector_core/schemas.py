"""Schemas and Meta functions of the vector-core ops, `torch.ops.umbra.*`. torch_npu is not needed.

T tokens (1 to 8), k experts for each token, E experts, group G of 32, 64 or 128 that divides K, K % 32 == 0, N % 8 ==
0. Activations, scales, zeros and experts' weights are all float16 or all bfloat16. Matrices have the layout of
weights.py: signed nibbles, eight outputs in an int32; a value is (nibble + zero) * scale, or nibble * scale without
zeros.

fused_moe_w4a16      x (T, H), w13 (E, H, 2 I / 8), w2 (E, I, H / 8), ids (T, k) int32, weights (T, k) -> (T, H)
                     the sum over k of weight * down(silu(gate) * up); gate: the first I columns of w13, up: the others
fused_moe_slots_w4a16  x (T, H), arena (bytes) uint8, places (E) int32, ids (T, k), weights (T, k) -> (T, H)
                     as fused_moe_w4a16, with experts in an arena (blocks.py): places holds an expert's first byte
                     / 512, or -1 if not resident; experts not resident, and ids below 0 or from E on, add nothing
gemv_w4a16           x (T, K), w (K, N / 8), scales, zeros (K / G, N) -> (T, N)

With half_sums, products and the sums of eight rows are float16 instead of float32: faster by CANN's tables, but less
exact if sums cancel each other (docs/vector_core.md, "Precision").
"""

import torch
from torch import Tensor

from ops.ascend.vector_core.blocks import WORD
from ops.format import GROUP_SIZES

MOST_TOKENS = 8
BLOCK = 32  # rows of weights that a kernel reads at once

LIBRARY = torch.library.Library("umbra", "DEF")  # the ops live as long as this does
for schema in (
    "fused_moe_w4a16(Tensor x, Tensor w13, Tensor s13, Tensor? z13, Tensor w2, Tensor s2, Tensor? z2, Tensor ids, "
    "Tensor weights, bool half_sums=False) -> Tensor",
    "fused_moe_slots_w4a16(Tensor x, Tensor arena, Tensor places, Tensor ids, Tensor weights, int inner, int group, "
    "int group2, bool zeros, bool half_sums=False) -> Tensor",
    "gemv_w4a16(Tensor x, Tensor w, Tensor scales, Tensor? zeros, bool half_sums=False) -> Tensor",
):
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


def fused_moe_w4a16(
    x: Tensor,
    w13: Tensor,
    s13: Tensor,
    z13: Tensor | None,
    w2: Tensor,
    s2: Tensor,
    z2: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    half_sums: bool = False,
) -> Tensor:
    _check_activations(x)
    columns = _check_weights(("w13", "s13", "z13"), w13, s13, z13, 1, x, x.shape[1])
    outputs = _check_weights(("w2", "s2", "z2"), w2, s2, z2, 1, x, columns // 2)
    if columns % 2 or outputs != x.shape[1] or w2.shape[0] != w13.shape[0]:
        raise RuntimeError(
            f"w2: {tuple(w2.shape)} beside w13 {tuple(w13.shape)}: must be (E, I, H / 8) where w13 is (E, H, 2 I / 8)"
        )
    _check("ids", ids, torch.int32, x.shape[0], None)
    _check("weights", weights, x.dtype, x.shape[0], ids.shape[1])
    return x.new_empty(x.shape)


def fused_moe_slots_w4a16(
    x: Tensor,
    arena: Tensor,
    places: Tensor,
    ids: Tensor,
    weights: Tensor,
    inner: int,
    group: int,
    group2: int,
    zeros: bool,
    half_sums: bool = False,
) -> Tensor:
    _check_activations(x)
    for name, given, dtype in (("arena", arena, torch.uint8), ("places", places, torch.int32)):
        if given.dtype != dtype or given.dim() != 1:
            raise RuntimeError(f"{name}: {tuple(given.shape)} {given.dtype}: must have one dimension, of {dtype}")
    if inner < BLOCK or inner % BLOCK:
        raise RuntimeError(f"inner: {inner}: must be a multiple of {BLOCK}")
    for name, size, rows in (("group", group, x.shape[1]), ("group2", group2, inner)):
        if size not in GROUP_SIZES or rows % size:
            raise RuntimeError(f"{name}: {size}: must be 32, 64 or 128, and divide {rows}")
    _check("ids", ids, torch.int32, x.shape[0], None)
    _check("weights", weights, x.dtype, x.shape[0], ids.shape[1])
    return x.new_empty(x.shape)


def gemv_w4a16(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor | None, half_sums: bool = False) -> Tensor:
    _check_activations(x)
    return x.new_empty(x.shape[0], _check_weights(("w", "scales", "zeros"), w, scales, zeros, 0, x, x.shape[1]))


for function in (fused_moe_w4a16, fused_moe_slots_w4a16, gemv_w4a16):
    LIBRARY.impl(function.__name__, function, "Meta")


def _check_activations(x: Tensor) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"x: {x.dtype}: must be float16 or bfloat16")
    if x.dim() != 2 or x.shape[0] > MOST_TOKENS:
        raise RuntimeError(f"x: {tuple(x.shape)}: must be (tokens, K) with {MOST_TOKENS} tokens at most")
    if x.shape[1] % BLOCK:
        raise RuntimeError(f"x: K of {x.shape[1]}: must be a multiple of {BLOCK}")


def _check_weights(
    names: tuple[str, str, str], w: Tensor, scales: Tensor, zeros: Tensor | None, lead: int, x: Tensor, inputs: int
) -> int:
    """Checks a matrix and returns its number of outputs. `lead` is the number of dimensions before (K, N)."""
    if w.dtype != torch.int32:
        raise TypeError(f"{names[0]}: {w.dtype}: must be int32, words of {WORD} nibbles")
    if w.dim() != lead + 2 or w.shape[-2] != inputs:
        shape = "(E, K, N / 8)" if lead else "(K, N / 8)"
        raise RuntimeError(f"{names[0]}: {tuple(w.shape)}: must be {shape} with K of {inputs}")
    outputs = w.shape[-1] * WORD
    if scales.dtype != x.dtype:
        raise TypeError(f"{names[1]}: {scales.dtype}: must be the type of x, {x.dtype}")
    shapes = [(*w.shape[:-2], inputs // group, outputs) for group in GROUP_SIZES if inputs % group == 0]
    if tuple(scales.shape) not in shapes:
        raise RuntimeError(f"{names[1]}: {tuple(scales.shape)}: must be one of {shapes}: groups of 32, 64 or 128")
    if zeros is not None and (zeros.dtype != scales.dtype or zeros.shape != scales.shape):
        raise RuntimeError(
            f"{names[2]}: {tuple(zeros.shape)} {zeros.dtype}: must be as {names[1]}, {tuple(scales.shape)} {x.dtype}"
        )
    return outputs


def _check(name: str, given: Tensor, dtype: torch.dtype, rows: int, columns: int | None) -> None:
    if given.dtype != dtype:
        raise TypeError(f"{name}: {given.dtype}: must be {dtype}")
    if given.dim() != 2 or given.shape[0] != rows or (columns is not None and given.shape[1] != columns):
        raise RuntimeError(f"{name}: {tuple(given.shape)}: must be ({rows}, {'k' if columns is None else columns})")

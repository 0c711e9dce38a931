"""The vector-core ops in torch, `torch.ops.umbra.*`: their schemas, as signatures.py describes them, and their Meta
functions, which check the arguments. torch_npu is not needed.

T tokens (1 to 8), k experts for each token, E experts, groups G and G2 of 32, 64 or 128 that divide K. K % 32 == 0, N %
8 == 0. Activations, scales, zeros and experts' weights are all float16 or all bfloat16. Matrices are in planes
(planes.py): w (planes, N, bytes) uint8, scales and zeros (sections, N, groups); a value is (nibble + zero) * scale, or
nibble * scale without zeros.

fused_moe_w4a16      x (T, H), w13 (E, planes, 2 I, bytes), w2 (E, planes, H, bytes), ids (T, k) int32, weights (T, k),
                     G of w13, G2 of w2 -> (T, H)
                     the sum over k of weight * down(silu(gate) * up); planes.py says where w13 has gate and up
fused_moe_scores_w4a16  as fused_moe_w4a16, with scores (T, all experts) float32 or as x in place of ids and weights:
                     top_k experts for each token, weighted by softmax or sigmoid of their scores, divided by the sum
                     of these. bias (all experts) float32 is added to sigmoids for the choice alone. w13 and w2 have the
                     experts from first_expert on; others add nothing. Of equal scores the one with the smaller id is
                     chosen; a row of scores with a NaN gives NaN
fused_moe_slots_w4a16  x (T, H), arena (bytes) uint8, places (E) int32, ids (T, k), weights (T, k) -> (T, H)
                     as fused_moe_w4a16, with experts in an arena (blocks.py): places holds an expert's first byte
                     / 512, below 0: not resident; experts not resident, and ids below 0 or from E on, add nothing
gemv_w4a16           x (T, K), w (planes, N, bytes), scales, zeros (sections, N, groups) -> (T, N)
unpack_w4a16         w (E, planes, N, bytes) -> (E, N, K) in the type of scales, K in the order of planes. `ordered`: w
                     is a w2; `pairs`: it is a w13, and all gates come before all ups
unpack_tiles_w4a16   the same into `bank` (E, N, K), which is in FRACTAL_NZ on the NPU; N % 16 == 0

Sums of eight products are float16, all others float32. With float_sums, all are: slower, and more exact if sums cancel
each other (docs/vector_core.md, "Precision").
"""

from collections.abc import Callable

import torch
from torch import Tensor

from umbra.ops.ascend.vector_core.planes import MOST_INNER, MOST_ROWS, PAIRS, Planes, planes_of
from umbra.ops.ascend.vector_core.signatures import CALLS, BlockSizes, ExpertChoice, InPlanes, TorchCall
from umbra.ops.formats import GROUP_SIZES

MOST_TOKENS = 8
MOST_SCORED, MOST_CHOSEN = 512, 8  # experts to choose from, and of each token, for fused_moe_scores_w4a16
BLOCK = 32  # K is a multiple of this
TILE = 16  # rows and columns of a tile of FRACTAL_NZ


def fused_moe_w4a16(x: Tensor, up: InPlanes, down: InPlanes, ids: Tensor, weights: Tensor) -> Tensor:
    _check_mixture(x, up, down)
    _check("ids", ids, torch.int32, x.shape[0], None)
    _check("weights", weights, x.dtype, x.shape[0], ids.shape[1])
    return x.new_empty(x.shape)


def fused_moe_scores_w4a16(
    x: Tensor, up: InPlanes, down: InPlanes, scores: Tensor, bias: Tensor | None, choice: ExpertChoice
) -> Tensor:
    _check_mixture(x, up, down)
    _check("scores", scores, torch.float32 if scores.dtype == torch.float32 else x.dtype, x.shape[0], None)
    (top_k, sigmoid, first_expert), scored, here = choice, scores.shape[1], up.words.shape[0]
    if scored > MOST_SCORED:
        raise RuntimeError(f"scores: {tuple(scores.shape)}: must be of {MOST_SCORED} experts at most")
    if not 1 <= top_k <= min(MOST_CHOSEN, scored):
        raise RuntimeError(f"top_k: {top_k}: must be 1 to {min(MOST_CHOSEN, scored)}")
    if not 0 <= first_expert <= scored - here:
        raise RuntimeError(f"first_expert: {first_expert}: this and the {here - 1} after it must be among the {scored}")
    if bias is not None and (not sigmoid or bias.dtype != torch.float32 or tuple(bias.shape) != (scored,)):
        raise RuntimeError(
            f"bias: {tuple(bias.shape)} {bias.dtype}: must be ({scored}) torch.float32, for sigmoids only"
        )
    return x.new_empty(x.shape)


def fused_moe_slots_w4a16(
    x: Tensor, arena: Tensor, places: Tensor, ids: Tensor, weights: Tensor, sizes: BlockSizes
) -> Tensor:
    _check_activations(x)
    for name, given, dtype in (("arena", arena, torch.uint8), ("places", places, torch.int32)):
        if given.dtype != dtype or given.dim() != 1:
            raise RuntimeError(f"{name}: {tuple(given.shape)} {given.dtype}: must have one dimension, of {dtype}")
    _check_inner(sizes.inner)
    _layout("group", sizes.group, x.shape[1], False)
    _layout("group2", sizes.group2, sizes.inner, True)
    _check("ids", ids, torch.int32, x.shape[0], None)
    _check("weights", weights, x.dtype, x.shape[0], ids.shape[1])
    return x.new_empty(x.shape)


def gemv_w4a16(x: Tensor, weight: InPlanes) -> Tensor:
    _check_activations(x)
    planes = _layout("group", weight.group, x.shape[1], False)
    return x.new_empty(x.shape[0], _check_weights(("w", "scales", "zeros"), weight, 0, x.dtype, planes))


def unpack_w4a16(weight: InPlanes, ordered: bool, pairs: bool) -> Tensor:
    w, scales = weight.words, weight.scales
    if w.dim() != 4:
        raise RuntimeError(f"w: {tuple(w.shape)}: must be (E, planes, N, bytes)")
    planes = _layout("group", weight.group, w.shape[1] * w.shape[3] * 2, ordered)
    columns = _check_weights(("w", "scales", "zeros"), weight, 1, scales.dtype, planes)
    if pairs and columns % (2 * PAIRS):
        raise RuntimeError(f"w: {tuple(w.shape)}: columns of gate and up must be a multiple of {2 * PAIRS}")
    return scales.new_empty(w.shape[0], columns, planes.rows)


def unpack_tiles_w4a16(weight: InPlanes, ordered: bool, pairs: bool, bank: Tensor) -> None:
    values = unpack_w4a16(weight, ordered, pairs)
    if (bank.shape, bank.dtype) != (values.shape, values.dtype) or values.shape[1] % TILE:
        raise RuntimeError(
            f"bank: {tuple(bank.shape)} {bank.dtype}: must be {tuple(values.shape)} {values.dtype}, "
            f"N a multiple of {TILE}"
        )


LIBRARY = torch.library.Library("umbra", "DEF")  # the ops live as long as this does


def _declare(call: TorchCall, checked: Callable[..., Tensor | None]) -> None:
    """Declares a torch op, of which `checked` is the Meta function."""
    LIBRARY.define(call.schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(call.name, lambda *given, **more: checked(**call.objects(*given, **more)), "Meta")


for function in (
    fused_moe_w4a16,
    fused_moe_scores_w4a16,
    fused_moe_slots_w4a16,
    gemv_w4a16,
    unpack_w4a16,
    unpack_tiles_w4a16,
):
    _declare(CALLS[function.__name__], function)


def _check_activations(x: Tensor) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"x: {x.dtype}: must be float16 or bfloat16")
    if x.dim() != 2 or x.shape[0] > MOST_TOKENS:
        raise RuntimeError(f"x: {tuple(x.shape)}: must be (tokens, K) with {MOST_TOKENS} tokens at most")
    if x.shape[1] % BLOCK:
        raise RuntimeError(f"x: K of {x.shape[1]}: must be a multiple of {BLOCK}")
    if x.shape[1] > MOST_ROWS:
        raise RuntimeError(f"x: K of {x.shape[1]}: must be {MOST_ROWS} at most")


def _check_mixture(x: Tensor, up: InPlanes, down: InPlanes) -> None:
    _check_activations(x)
    first = _layout("group", up.group, x.shape[1], False)
    columns = _check_weights(("w13", "s13", "z13"), up, 1, x.dtype, first)
    _check_inner(columns // 2)
    second = _layout("group2", down.group, columns // 2, True)
    outputs, w13, w2 = _check_weights(("w2", "s2", "z2"), down, 1, x.dtype, second), up.words, down.words
    if columns % 2 or outputs != x.shape[1] or w2.shape[0] != w13.shape[0]:
        raise RuntimeError(
            f"w2: {tuple(w2.shape)} with w13 {tuple(w13.shape)}: must have as many experts, and {x.shape[1]} columns"
        )


def _check_inner(inner: int) -> None:
    if inner < BLOCK or inner % BLOCK or inner > MOST_INNER:
        raise RuntimeError(f"inner: {inner}: must be a multiple of {BLOCK}, {MOST_INNER} at most")


def _layout(name: str, group: int, rows: int, ordered: bool) -> Planes:
    if group not in GROUP_SIZES or rows % group:
        raise RuntimeError(f"{name}: {group}: must be 32, 64 or 128, and divide {rows}")
    return planes_of(rows, group, ordered)


def _check_weights(names: tuple[str, str, str], weight: InPlanes, lead: int, dtype: torch.dtype, planes: Planes) -> int:
    """Checks a matrix and returns its number of columns. `lead` is the number of dimensions before the planes."""
    w, scales, zeros, _ = weight
    if w.dtype != torch.uint8:
        raise TypeError(f"{names[0]}: {w.dtype}: must be uint8, two nibbles in a byte")
    columns = w.shape[-2] if w.dim() > 1 else 0
    if w.dim() != lead + 3 or tuple(w.shape[lead:]) != planes.words_shape(columns) or columns % 8:
        count, _, size = planes.words_shape(0)
        shape = f"({'E, ' * lead}{count}, N, {size})"
        raise RuntimeError(f"{names[0]}: {tuple(w.shape)}: must be {shape} for K of {planes.rows}, N a multiple of 8")
    if scales.dtype != dtype or dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"{names[1]}: {scales.dtype}: must be the type of x, {dtype}")
    kept = (*w.shape[:lead], *planes.scales_shape(columns))
    if tuple(scales.shape) != kept:
        raise RuntimeError(f"{names[1]}: {tuple(scales.shape)}: must be {kept}: groups of {planes.group}")
    if zeros is not None and (zeros.dtype != scales.dtype or zeros.shape != scales.shape):
        raise RuntimeError(
            f"{names[2]}: {tuple(zeros.shape)} {zeros.dtype}: must be as {names[1]}, {tuple(scales.shape)} {dtype}"
        )
    return int(columns)


def _check(name: str, given: Tensor, dtype: torch.dtype, rows: int, columns: int | None) -> None:
    if given.dtype != dtype:
        raise TypeError(f"{name}: {given.dtype}: must be {dtype}")
    if given.dim() != 2 or given.shape[0] != rows or (columns is not None and given.shape[1] != columns):
        raise RuntimeError(f"{name}: {tuple(given.shape)}: must be ({rows}, {'k' if columns is None else columns})")

"""Calls of the vector-core operators with the weights of ops/ascend/weights.py."""

import torch
from torch import Tensor

from umbra.ops.ascend import weights as stored
from umbra.ops.ascend.vector_core import schemas  # noqa: F401 (declares the operators)
from umbra.ops.ascend.vector_core.blocks import BlockLayout
from umbra.ops.ascend.weights import AscendMatrix, Bank, Role, StoredMatrices


def unfit(weight: AscendMatrix | Bank) -> str:
    """The reason why the kernels cannot read these weights; empty if they can."""
    if isinstance(weight, AscendMatrix):
        return stored.unfit(weight.format, weight.columns)
    return stored.unfit(weight.w13.format, weight.w13.columns, weight.w2.columns, weight.kind)


def linear(x: Tensor, weight: AscendMatrix, bias: Tensor | None, float_sums: bool) -> Tensor:
    y = torch.ops.umbra.gemv_w4a16(x, weight.data, weight.scales, weight.offsets, weight.format.group, float_sums)
    return y if bias is None else y + bias


def moe(x: Tensor, weights: Tensor, ids: Tensor, experts: Bank, first_expert: int | None, float_sums: bool) -> Tensor:
    """Computes a mixture of experts in one launch. Experts on other ranks add nothing."""
    local = ids if first_expert is None else ids - first_expert
    return torch.ops.umbra.fused_moe_w4a16(x, *_planes(experts), local, weights, *_groups(experts), float_sums)


def moe_of_scores(
    x: Tensor,
    scores: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    experts: Bank,
    first_expert: int | None,
    float_sums: bool,
) -> Tensor:
    """Computes the same of the experts that `scores` choose."""
    choice = top_k, sigmoid, first_expert or 0
    return torch.ops.umbra.fused_moe_scores_w4a16(
        x, *_planes(experts), scores, bias, *choice, *_groups(experts), float_sums
    )


def moe_slots(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    arena: Tensor,
    places: Tensor,
    layout: BlockLayout,
    first_expert: int | None,
    float_sums: bool,
) -> Tensor:
    """Computes the same with experts in slots: arena (bytes) uint8, places (experts of this rank) int32. Experts that
    are not resident, and experts on other ranks, add nothing. This cannot be used in GE graphs, in which experts on the
    CPU are refused."""
    local = ids if first_expert is None else ids - first_expert
    sizes = layout.inner, layout.group, layout.group2, layout.zeros
    return torch.ops.umbra.fused_moe_slots_w4a16(x, arena, places, local, weights, *sizes, float_sums)


def unpacked(matrix: StoredMatrices) -> Tensor:
    """The values of a matrix in planes, (K, N), or of experts, (E, K, N): a view of rows of K. K is in the order of
    planes."""
    words, scales, zeros = matrix.data, matrix.scales, matrix.offsets
    alone = words.dim() == 3
    if alone:
        words, scales = words[None], None if scales is None else scales[None]
        zeros = None if zeros is None else zeros[None]
    values = torch.ops.umbra.unpack_w4a16(words, scales, zeros, *_layout(matrix))
    return (values[0] if alone else values).transpose(-2, -1)


def unpack_into(experts: StoredMatrices, bank: Tensor) -> None:
    """Writes the values of experts to `bank` (E, N, K), which is in FRACTAL_NZ."""
    torch.ops.umbra.unpack_tiles_w4a16(experts.data, experts.scales, experts.offsets, *_layout(experts), bank)


def _planes(experts: Bank) -> tuple[Tensor | None, ...]:
    w13, w2 = experts.w13, experts.w2
    return w13.data, w13.scales, w13.offsets, w2.data, w2.scales, w2.offsets


def _groups(experts: Bank) -> tuple[int, int]:
    return experts.w13.format.group, experts.w2.format.group


def _layout(matrix: StoredMatrices) -> tuple[int, bool, bool]:
    return matrix.format.group, matrix.role == Role.DOWN, matrix.role == Role.UP

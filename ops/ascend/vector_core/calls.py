"""Calls of the vector-core operators with the weights of ops/ascend/weights.py."""

import torch
from torch import Tensor

from ops.ascend.vector_core import schemas  # noqa: F401 (declares the operators)
from ops.ascend.vector_core.blocks import BlockLayout
from ops.ascend.weights import AscendMatrix, Bank, Stored
from ops.format import GROUP_SIZES


def unfit(weight: AscendMatrix | Bank) -> str:
    """The reason why the kernels cannot read these weights; empty if they can."""
    planes: list[Stored] = [weight] if isinstance(weight, AscendMatrix) else [weight.w13, weight.w2]
    if any(plane.scales is None for plane in planes):
        return "the weights do not have 4 bits"
    if any(plane.format.group not in GROUP_SIZES for plane in planes):
        return f"groups of {planes[0].format.group}, not of 32, 64 or 128"
    return ""


def linear(x: Tensor, weight: AscendMatrix, bias: Tensor | None, half_sums: bool) -> Tensor:
    y = torch.ops.umbra.gemv_w4a16(x, weight.data, weight.scales, weight.offsets, half_sums)
    return y if bias is None else y + bias


def moe(x: Tensor, weights: Tensor, ids: Tensor, experts: Bank, first_expert: int | None, half_sums: bool) -> Tensor:
    """Computes a mixture of experts in one launch. Experts on other ranks add nothing."""
    w13, w2 = experts.w13, experts.w2
    return torch.ops.umbra.fused_moe_w4a16(
        x, w13.data, w13.scales, w13.offsets, w2.data, w2.scales, w2.offsets,
        ids if first_expert is None else ids - first_expert, weights, half_sums,
    )  # fmt: skip


def moe_slots(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    arena: Tensor,
    places: Tensor,
    layout: BlockLayout,
    first_expert: int | None,
    half_sums: bool,
) -> Tensor:
    """Computes the same with experts in slots: arena (bytes) uint8, places (experts of this rank) int32. Experts that
    are not resident, and experts on other ranks, add nothing. This cannot be used in GE graphs, in which experts on the
    CPU are refused."""
    return torch.ops.umbra.fused_moe_slots_w4a16(
        x, arena, places, ids if first_expert is None else ids - first_expert, weights,
        layout.inner, layout.group, layout.group2, layout.zeros, half_sums,
    )  # fmt: skip

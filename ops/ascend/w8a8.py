"""Products of integers: weights of eight bits by rows that are rounded to eight bits, each with a scale of its own.

linear    dynamic_quant, or the norm before: add_rms_norm_dynamic_quant; quant_matmul
experts   grouped_matmul_swiglu_quant, grouped_matmul; or, where that does not take them, grouped_matmul to int32,
          dequant_swiglu_quant, grouped_matmul
"""

import torch
import torch_npu
from torch import Tensor

from umbra.ops.ascend.grouped import COUNTS, grouped_matmul
from umbra.ops.ascend.weights import AscendMatrix, Bank, StoredMatrices

BY_TOKEN = 1  # quant_mode: rows are rounded as they come, each to its own scale
MOST_FUSED = 10_240  # columns of gate and up together that npu_grouped_matmul_swiglu_quant_v2 takes
INT8, FLOAT32 = 1, 6  # types, by their numbers in torch


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (T, K) in int8, and the scale of each row (T) float32, its largest value / 127."""
    rows, scales = torch_npu.npu_dynamic_quant(input=x, smooth_scales=None, group_index=None, dst_type=torch.int8)
    return rows, scales


def linear(x: Tensor, weight: AscendMatrix, bias: Tensor | None) -> Tensor:
    if not len(x):  # a data-parallel group that has no prompt in this step
        return x.new_empty(0, weight.rows)
    return product(*rounded(x), x.dtype, weight, bias)


def product(rows: Tensor, scales: Tensor, dtype: torch.dtype, weight: AscendMatrix, bias: Tensor | None) -> Tensor:
    """Rows (T, K) int8 with their scales (T) by `weight`. -> (T, N) of `dtype`"""
    y: Tensor = torch_npu.npu_quant_matmul(
        x1=rows,
        x2=weight.data,
        scale=weight.scales,
        offset=None,
        pertoken_scale=scales,
        bias=bias,
        output_dtype=dtype,
        group_sizes=None,
    )
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of the sum as `rounded` returns it, and the sum."""
    rows, _, total, scales, _ = torch_npu.npu_add_rms_norm_dynamic_quant(
        x1=x,
        x2=residual,
        gamma=weight,
        smooth_scale1=None,
        smooth_scale2=None,
        beta=bias,
        epsilon=eps,
        output_mask=[True, False],
        y_dtype=None,
    )
    return rows, scales, total


def products(
    rows: Tensor, scales: Tensor, groups: Tensor, kind: int, experts: Bank, dtype: torch.dtype, fused: bool
) -> Tensor:
    """Computes the experts of rows (T K, H) int8 in expert order, with their scales (T K). -> (T K, H) of `dtype`
    `fused`: torch_npu has the op that does all up to the second product; its weights must be in tiles."""
    w13 = experts.w13
    fused = fused and not w13.gathered and w13.data.shape[-1] <= MOST_FUSED
    rows, scales = (_in_one if fused else _in_parts)(rows, scales, w13, groups, kind)
    w2 = experts.w2
    return grouped_matmul(rows, w2.data, groups, kind, scale=w2.scales, row_scales=scales, dtype=dtype)


def _in_one(rows: Tensor, scales: Tensor, w13: StoredMatrices, groups: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Returns the inputs of the second product (T K, I) int8, and their scales, by one operator."""
    hidden, own = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
        x=rows,
        weight=[w13.data],
        weight_scale=[w13.scales],
        x_scale=scales,
        group_list=groups,
        smooth_scale=None,
        weight_assist_matrix=None,
        bias=None,
        dequant_mode=0,
        dequant_dtype=FLOAT32,
        quant_mode=0,
        quant_dtype=INT8,
        group_list_type=kind,
        tuning_config=None,
        x_dtype=None,
        weight_dtype=None,
        weight_scale_dtype=None,
        x_scale_dtype=None,
    )
    return hidden, own


def _in_parts(rows: Tensor, scales: Tensor, w13: StoredMatrices, groups: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Returns the same as `_in_one`, by a product to int32 and an operator that activates and rounds its sums."""
    sums = grouped_matmul(rows, w13.data, groups, kind, dtype=torch.int32)
    hidden, own = torch_npu.npu_dequant_swiglu_quant(
        x=sums,
        weight_scale=w13.scales,
        activation_scale=scales,
        bias=None,
        quant_scale=None,
        quant_offset=None,
        group_index=groups if kind == COUNTS else groups.diff(prepend=groups.new_zeros(1)),
        activate_left=True,
        quant_mode=BY_TOKEN,
        swiglu_mode=0,
        clamp_limit=7.0,
        glu_alpha=1.702,
        glu_bias=1.0,
    )
    return hidden, own

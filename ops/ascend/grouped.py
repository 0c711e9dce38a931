"""The grouped product of a mixture of experts: rows in expert order, each by the matrix of its expert."""

import torch
import torch_npu
from torch import Tensor

ENDS, COUNTS = 0, 1  # group_list_type: where each expert's rows end, or how many they are


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    groups: Tensor,
    kind: int,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    row_scales: Tensor | None = None,
    antiquant: tuple[Tensor | None, Tensor | None] = (None, None),
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiplies x (T K, H) by weight (E, H, N), with `groups` (E) int64 of `kind`. `antiquant` has the scales and
    offsets of 4-bit weights. -> (T K, N) of `dtype`, or of x's type"""
    antiquant_scale, antiquant_offset = antiquant
    y: Tensor = torch_npu.npu_grouped_matmul(
        x=[x],
        weight=[weight],
        bias=_listed(bias),
        scale=_listed(scale),
        offset=None,
        antiquant_scale=_listed(antiquant_scale),
        antiquant_offset=_listed(antiquant_offset),
        per_token_scale=_listed(row_scales),
        group_list=groups,
        activation_input=None,
        activation_quant_scale=None,
        activation_quant_offset=None,
        split_item=3,
        group_type=0,
        group_list_type=kind,
        act_type=0,
        tuning_config=None,
        output_dtype=dtype,
    )[0]
    return y


def _listed(given: Tensor | None) -> list[Tensor] | None:
    return None if given is None else [given]

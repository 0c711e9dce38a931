"""A mixture of experts on Ascend: rows in expert order, two grouped products, SwiGLU between, weighted sums.

Three ways to sort the rows by expert and back, with the same result:

tp         sort and index with plain ops (the reference's `moe_infer_tp`)
fusion_v1  init_routing, compute_expert_tokens, finalize_routing
fusion_v2  init_routing_v2, which counts as well, and finalize_routing

T tokens, K experts for each token, E experts on this rank. The grouped product needs every row in some group and no id
below zero, so experts of other ranks become expert 0 with weight 0 (`resident`): their rows are computed, but
multiplied by 0.
"""

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from umbra.ops.ascend import w8a8
from umbra.ops.ascend.cann import Abilities
from umbra.ops.ascend.grouped import COUNTS, ENDS, grouped_matmul
from umbra.ops.ascend.vector_core.calls import unpacked
from umbra.ops.ascend.w8a8 import BY_TOKEN
from umbra.ops.ascend.weights import Bank, StoredMatrices
from umbra.ops.interface import ExpertKind

AS_THEY_ARE = -1  # quant_mode
BY_COLUMN, BY_ROW = 0, 2  # drop_pad_mode of finalize_routing: row k T + t, or t K + k, is token t's k-th expert


def check_ids(ids: Tensor) -> None:
    if ids.dtype != torch.int32:
        raise TypeError(f"expert ids: {ids.dtype}: the routing ops take int32")


def resident(weights: Tensor, ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Weights and ids relative to `first`; ids outside first .. first + count become expert 0 with weight 0."""
    local = ids - first
    here = (local >= 0) & (local < count)
    return torch.where(here, weights, 0), torch.where(here, local, 0)


def swiglu(x: Tensor) -> Tensor:
    if x.shape[-1] % 2:
        raise TypeError(f"npu_swiglu: {x.shape[-1]} columns have no halves")
    return torch_npu.npu_swiglu(input=x, dim=-1)


def gelu_mul(x: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = x.chunk(2, -1) if up is None else (x, up)
    return F.gelu(gate, approximate="tanh") * up


def activated(x: Tensor, kind: ExpertKind, clipped: bool) -> Tensor:
    """x (T, 2 N) holds gate and up side by side: what `kind` makes of them, (T, N). `clipped`: torch_npu has an op."""
    if kind.gelu:
        return gelu_mul(x)
    if not kind.limit:
        return swiglu(x)
    if clipped:
        return torch_npu.npu_clipped_swiglu(
            x=x, group_index=None, dim=-1, alpha=kind.alpha, limit=kind.limit, bias=1.0, interleaved=False
        )
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    return (up + 1) * (gate * (kind.alpha * gate).sigmoid())


def infer_tp(x: Tensor, weights: Tensor, ids: Tensor, experts: Bank, can: Abilities) -> Tensor:
    top_k, flat = ids.shape[1], ids.flatten()
    order = flat.argsort(stable=True)  # (T K): element i is the row t K + k that comes i-th
    numbers = torch.arange(experts.count, dtype=ids.dtype, device=ids.device)
    counts = (flat == numbers[:, None]).sum(1)  # (E) int64
    rows = products(x[order // top_k], None, counts, COUNTS, experts, can, x.dtype)
    back = order.argsort()  # (T K): the position of row t K + k
    return sum_by_index(rows, weights, back, ids)


def infer_fusion_v1(x: Tensor, weights: Tensor, ids: Tensor, experts: Bank, can: Abilities) -> Tensor:
    tokens, top_k = ids.shape
    row_index = torch.arange(tokens * top_k, dtype=torch.int32, device=ids.device).view(top_k, tokens).T.contiguous()
    rows, back, sorted_ids = torch_npu.npu_moe_init_routing(x=x, row_idx=row_index, expert_idx=ids, active_num=tokens)
    ends = torch_npu.npu_moe_compute_expert_tokens(sorted_expert_for_source_row=sorted_ids, num_expert=experts.count)
    sums = products(rows, None, ends.to(torch.int64), ENDS, experts, can, x.dtype)
    return weighted_sum(sums, weights.to(x.dtype), back, ids, BY_COLUMN)


def infer_fusion_v2(x: Tensor, weights: Tensor, ids: Tensor, experts: Bank, can: Abilities) -> Tensor:
    tokens, top_k = ids.shape
    mode = BY_TOKEN if in_int8(experts) else AS_THEY_ARE
    rows, back, counts, scales = torch_npu.npu_moe_init_routing_v2(
        x=x,
        expert_idx=ids,
        scale=None,
        offset=None,
        active_num=tokens * top_k,
        expert_capacity=0,
        expert_num=experts.count,
        drop_pad_mode=0,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=mode,
        active_expert_range=[0, experts.count],
        row_idx_type=0,
    )
    counts = counts.to(torch.int64)  # some releases of torch_npu give int32 for 128 experts of 2048 columns
    sums = products(rows, scales, counts, COUNTS, experts, can, x.dtype)
    return sum_by_row(sums, weights, back, ids)


def sum_by_index(rows: Tensor, weights: Tensor, back: Tensor, ids: Tensor) -> Tensor:
    return (rows[back].view(*ids.shape, -1) * weights[..., None].to(rows.dtype)).sum(1)


def sum_by_column(rows: Tensor, weights: Tensor, back: Tensor, ids: Tensor) -> Tensor:
    by_column = back.view(ids.shape).T.flatten()
    return weighted_sum(rows, weights.to(rows.dtype), by_column, ids, BY_COLUMN)


def sum_by_row(rows: Tensor, weights: Tensor, back: Tensor, ids: Tensor) -> Tensor:
    return weighted_sum(rows, weights.to(rows.dtype), back, None, BY_ROW)


ROUTINGS = {"tp": infer_tp, "fusion_v1": infer_fusion_v1, "fusion_v2": infer_fusion_v2}
# The sums that they end with, of rows (T K, H) of which row back[t K + k] belongs to token t and ids[t, k].
SUMS = {"tp": sum_by_index, "fusion_v1": sum_by_column, "fusion_v2": sum_by_row}


def in_int8(experts: Bank) -> bool:
    """Returns whether the experts' rows are rounded to eight bits."""
    return experts.w13.format.spec.int8_inputs


def products(
    rows: Tensor, scales: Tensor | None, groups: Tensor, kind: int, experts: Bank, can: Abilities, dtype: torch.dtype
) -> Tensor:
    """Computes what the experts' kind says of rows (T K, H) in expert order, H in the order of w13. Rows that are in
    int8 have `scales`. Results are of `dtype`; those of rows that no group has are undefined."""
    if in_int8(experts):
        if rows.dtype != torch.int8 or scales is None:
            rows, scales = w8a8.rounded(rows)
        return w8a8.products(rows, scales, groups, kind, experts, dtype, can.fused_swiglu)
    hidden = activated(grouped(rows, experts.w13, groups, kind), experts.kind, can.clipped)
    return grouped(hidden, experts.w2, groups, kind)


def grouped(x: Tensor, matrices: StoredMatrices, groups: Tensor, kind: int) -> Tensor:
    if x.shape[1] != matrices.columns:
        raise TypeError(f"npu_grouped_matmul: {x.shape[1]} columns meet {matrices.columns} rows")
    if groups.dtype != torch.int64 or groups.shape != matrices.data.shape[:1]:
        raise TypeError(f"npu_grouped_matmul: group_list {tuple(groups.shape)} {groups.dtype} is not (E) int64")
    whole = matrices.planes is None
    values = None if torch.compiler.is_compiling() else matrices.values
    weight = matrices.data if whole else values.take(matrices) if values else unpacked(matrices)
    y = grouped_matmul(
        x,
        weight,
        groups,
        kind,
        bias=matrices.bias,
        antiquant=(matrices.scales, matrices.offsets) if whole else (None, None),
    )
    if values:
        values.release(matrices)
    return y


def weighted_sum(rows: Tensor, weights: Tensor, back: Tensor, ids: Tensor | None, order: int) -> Tensor:
    """Sums of rows (T K, H), multiplied by weights (T, K), for each token; `back` has the rows' places in `order`.
    Weights have the type of the rows; with bfloat16 rows they may be float32."""
    return torch_npu.npu_moe_finalize_routing(
        expanded_permuted_rows=rows,
        skip1=None,
        skip2=None,
        bias=None,
        scales=weights,
        expanded_src_to_dst_row=back,
        export_for_source_row=ids,
        drop_pad_mode=order,
    )

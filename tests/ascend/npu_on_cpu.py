"""Plain CPU implementations under the real `npu::` schemas, with which the Ascend model code computes without a device.

Importing this registers them. Each does what the op's documentation says and refuses what it forbids. Values that an
op leaves undefined are NaN here, so that nothing can depend on them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401 (declares the schemas)
from torch import Tensor

LIBRARY = torch.library.Library("npu", "IMPL")


def under_schema(function: Callable[..., object]) -> Callable[..., object]:
    LIBRARY.impl(function.__name__, function, "CPU")
    return function


def expect(condition: bool, rule: str) -> None:
    if not condition:
        raise RuntimeError(rule)


@under_schema
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    expect(gamma.dtype in (input.dtype, torch.float32), "rms_norm: gamma has the type of its input, or is float32")
    inverse = torch.rsqrt(input.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (input.float() * inverse * gamma.float()).to(input.dtype), inverse


@under_schema
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    expect(gamma.dtype == x1.dtype == x2.dtype, "add_rms_norm: one type")
    total = x1 + x2
    return *npu_rms_norm(total, gamma, epsilon), total  # type: ignore[misc]


@under_schema
def npu_add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator that torchair makes of a norm whose rows become float32."""
    normed: Any = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return normed[0].float(), *normed


@under_schema
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    expect(layout == "BSND" and query.dim() == 4, "rotary: (B, S, N, D)")
    expect(query.shape[-1] in (64, 128), "rotary: D is 64 or 128")
    expect(cos.shape == (*query.shape[:2], 1, query.shape[-1]) == sin.shape, "rotary: cos and sin are (B, S, 1, D)")
    expect(len({t.dtype for t in (query, key, cos, sin)}) == 1, "rotary: one type")

    return turned(query, cos, sin), turned(key, cos, sin)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos.float() + torch.cat((-second, first), -1) * sin.float()).to(x.dtype)


@under_schema
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    expect(rotary_mode == "half" and rotate is None and input.shape[-1] <= 896, "rotary_mul: halves, D up to 896")
    expect(r1.shape == r2.shape == (1, input.shape[1], 1, input.shape[3]), "rotary_mul: cos and sin are (1, S, 1, D)")
    expect(len(input) == 1 and input.dtype == r1.dtype == r2.dtype, "rotary_mul: fewer than 1000 batches, one type")
    return turned(input, r1, r2)


@under_schema
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, up = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


@under_schema
def npu_clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    expect(group_index is None and dim == -1, "clipped_swiglu: all rows, last dimension")
    gate, up = (x.float()[..., ::2], x.float()[..., 1::2]) if interleaved else x.float().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + bias)).to(x.dtype)


@under_schema
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    expect(indices.dtype in (torch.int32, torch.int64) and bool((indices >= 0).all()), "scatter_nd_update: indices")
    expect(input.is_contiguous(), "scatter_nd_update: without gaps, or all of it is copied")
    expect(updates.shape == (len(indices), *input.shape[indices.shape[1] :]), "scatter_nd_update: updates")
    input[indices.long().unbind(1)] = updates
    return input


def in_tiles(x: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes x (T, columns) into a cache (pages, columns / 16, page size, 16)."""
    expect(cache.is_contiguous() and cache.dtype == x.dtype, "tiled cache: contiguous, of the type of its rows")
    expect(
        cache.dim() == 4 and cache.shape[1::2] == (x.shape[1] // 16, 16), "tiled cache: (pages, columns / 16, .., 16)"
    )
    expect(slot_mapping.dtype == torch.int64 and slot_mapping.shape == x.shape[:1], "tiled cache: a slot for each row")
    expect(len(slot_mapping.unique()) == len(slot_mapping), "tiled cache: no slot is written twice")
    for row, slot in zip(x, slot_mapping.tolist(), strict=True):
        page, offset = divmod(slot, cache.shape[2])
        cache[page, :, offset] = row.view(-1, 16)


@under_schema
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    expect(key.dim() == 3 and key.shape == value.shape and cache_mode == "PA_NZ", "scatter_pa_kv_cache: (T, heads, D)")
    in_tiles(key.flatten(1), key_cache, slot_mapping)
    in_tiles(value.flatten(1), value_cache, slot_mapping)


@under_schema
def npu_qkv_rms_norm_rope_cache(
    qkv: Tensor,
    q_gamma: Tensor,
    k_gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv_size: Sequence[int],
    head_nums: Sequence[int],
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_offset: Tensor | None = None,
    v_offset: Tensor | None = None,
    epsilon: float = 1e-6,
    cache_mode: str = "PA_NZ",
    is_output_qkv: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, heads, dim = qkv_size
    expect(dim == 128 and cache_mode == "PA_NZ" and not is_output_qkv, "qkv_rms_norm_rope_cache: D is 128, tiles")
    expect(qkv.shape == (batch * length, heads * dim) and sum(head_nums) == heads, "qkv_rms_norm_rope_cache: heads")
    expect(head_nums[1] == head_nums[2] and head_nums[0] % head_nums[1] == 0, "qkv_rms_norm_rope_cache: groups")
    expect(len(k_cache) >= -(-length // k_cache.shape[2]) * batch, "qkv_rms_norm_rope_cache: enough pages")
    expect(cos.shape == sin.shape == (len(qkv), dim), "qkv_rms_norm_rope_cache: cos and sin are (T, D)")
    types = {t.dtype for t in (qkv, q_gamma, k_gamma, cos, sin, q_out)}
    expect(len(types) == 1, "qkv_rms_norm_rope_cache: one type")
    expect(q_out.shape == (len(qkv), head_nums[0] * dim), "qkv_rms_norm_rope_cache: q_out (T, heads D)")
    q, k, v = qkv.view(-1, heads, dim).float().split(list(head_nums), 1)

    def turned(x: Tensor, gamma: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * gamma.float()
        first, second = x.chunk(2, -1)
        return (x * cos[:, None].float() + torch.cat((-second, first), -1) * sin[:, None].float()).to(qkv.dtype)

    q_out.copy_(turned(q, q_gamma).flatten(1))
    in_tiles(turned(k, k_gamma).flatten(1), k_cache, index)
    in_tiles(v.flatten(1).to(qkv.dtype), v_cache, index)
    undefined = qkv.new_full((), torch.nan)
    return undefined, undefined.clone(), undefined.clone()


@under_schema
def npu_kv_rmsnorm_rope_cache_v2(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """Neighbouring columns of keys rotate, of which the first ones of all pairs are then before the second ones."""
    tokens = len(kv)
    expect(cache_mode == "PA" and not is_output_kv and not any(others.values()), "kv_rmsnorm_rope_cache: plain pages")
    expect(kv.shape == (tokens, 1, 1, 576) and gamma.shape == (512,), "kv_rmsnorm_rope_cache: (T, 1, 1, 576)")
    expect(cos.shape == sin.shape == (tokens, 1, 1, 64), "kv_rmsnorm_rope_cache: cos and sin are (T, 1, 1, 64)")
    expect(index.dtype == torch.int64 and index.shape == (tokens,), "kv_rmsnorm_rope_cache: a slot for each row")
    expect(len(index.unique()) == tokens, "kv_rmsnorm_rope_cache: no slot is written twice")
    page, one = k_cache.shape[1:3]
    expect(page % 16 == 0 and one == 1, "kv_rmsnorm_rope_cache: pages of multiples of 16 tokens, one head")
    expect(ckv_cache.shape == (len(k_cache), page, 1, 512) and k_cache.shape[3] == 64, "kv_rmsnorm_rope_cache: caches")
    expect(len({t.dtype for t in (kv, gamma, cos, sin, k_cache, ckv_cache)}) == 1, "kv_rmsnorm_rope_cache: one type")
    latents, keys = kv[:, 0, 0].split([512, 64], 1)
    apart = torch.cat((keys[:, ::2], keys[:, 1::2]), 1)
    for cache, rows in (
        (ckv_cache, npu_rms_norm(latents, gamma, epsilon)[0]),  # type: ignore[index]
        (k_cache, turned(apart, cos[:, 0, 0], sin[:, 0, 0])),
    ):
        expect(cache.is_contiguous(), "kv_rmsnorm_rope_cache: caches without gaps")
        cache.flatten(0, 2)[index] = rows
    undefined = kv.new_full((), torch.nan)
    return undefined, undefined.clone()


@under_schema
def npu_mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    *,
    cache_index: Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Neighbouring columns rotate, of which the first ones of all pairs are then before the second ones."""
    expect(cache_mode == "PA_BSND" and not any(others.values()), "mla_prolog: pages, nothing quantised or scaled")
    heads, still, latent = weight_uk.shape
    expect((still, latent) == (128, 512) and heads.bit_count() == 1 and heads <= 128, "mla_prolog: heads")
    expect(weight_dq.shape == (token_x.shape[1], 1536), "mla_prolog: queries' latents of 1536")
    expect(weight_uq_qr.shape == (1536, heads * 192), "mla_prolog: heads of 128 + 64, side by side")
    expect(len({t.dtype for t in (token_x, weight_dq, weight_uk, rope_cos, kv_cache)}) == 1, "mla_prolog: one type")
    compressed: Any = npu_rms_norm(token_x @ weight_dq, rmsnorm_gamma_cq, rmsnorm_epsilon_cq)
    own, turning = (compressed[0] @ weight_uq_qr).unflatten(1, (heads, -1)).split([128, 64], 2)
    npu_kv_rmsnorm_rope_cache_v2(
        (token_x @ weight_dkv_kr)[:, None, None],
        rmsnorm_gamma_ckv,
        rope_cos[:, None, None],
        rope_sin[:, None, None],
        cache_index,
        kr_cache,
        kv_cache,
        epsilon=rmsnorm_epsilon_ckv,
        cache_mode="PA",
    )
    apart = torch.cat((turning[..., ::2], turning[..., 1::2]), -1)
    query = torch.einsum("thk,hkn->thn", own.float(), weight_uk.float()).to(token_x.dtype)
    undefined = (token_x.new_empty(0) for _ in range(3))
    return query, turned(apart, rope_cos[:, None], rope_sin[:, None]), *undefined  # type: ignore[return-value]


@under_schema
def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    perm_x1: Sequence[int] = (),
    perm_x2: Sequence[int] = (),
    perm_y: Sequence[int] = (),
    batch_split_factor: int = 1,
    **others: object,
) -> Tensor:
    orders = [list(order) for order in (perm_x1, perm_x2, perm_y)]
    expect(orders == [[1, 0, 2], [0, 1, 2], [1, 0, 2]] and batch_split_factor == 1, "transpose_batchmatmul: orders")
    expect(not any(others.values()) and input.dtype == weight.dtype, "transpose_batchmatmul: one type")
    tokens, heads, inputs = input.shape
    expect(inputs % 128 == 0 and weight.shape[2] % 128 == 0, "transpose_batchmatmul: K, N are multiples of 128")
    expect(tokens > 0 and heads * inputs < 65536, "transpose_batchmatmul: fewer than 65,536 values a row")
    return torch.einsum("thk,hkn->thn", input.float(), weight.float()).to(input.dtype)


@under_schema
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = torch.softmax(x.float(), -1).topk(k, -1)
    rows = torch.arange(x.shape[0] * k, dtype=torch.int32).view(k, -1).T.contiguous()
    return weights.to(x.dtype), ids.int(), rows


@under_schema
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """A softmax is renormalised if `renorm` says so, a sigmoid always."""
    expect(x.dim() == 2 and len(x) > 0 and 0 < k <= x.shape[1] <= 2048, "gating_top_k: (T, experts), k of at most 2048")
    expect(x.dtype in (torch.float32, torch.float16, torch.bfloat16), "gating_top_k: floats")
    expect(bias is None or (bias.dtype, bias.shape) == (x.dtype, x.shape[1:]), "gating_top_k: a bias as x")
    expect(input_ids is None and tid2eid is None, "gating_top_k: no table of experts")
    each, rest = divmod(x.shape[1], group_count)
    expect(rest == 0 and 0 < k_group <= group_count and k <= k_group * each, "gating_top_k: groups")
    expect(group_select_mode in (0, 1) and each > group_select_mode, "gating_top_k: groups by one score or two")
    plain = group_count in (1, x.shape[1]) or k_group == group_count
    expect(plain or group_count * -(-each // 32) * 32 <= 2048, "gating_top_k: groups in multiples of 32")
    expect(renorm in (0, 1), "gating_top_k: renormalises or does not")
    expect(norm_type in (0, 1), "gating_top_k: softmax or sigmoid")
    scores = x.float().sigmoid() if norm_type else x.float().softmax(-1)
    biased = scores if bias is None else scores + bias.float()
    if not plain:
        apart = biased.unflatten(1, (group_count, -1))
        best = apart.sort(dim=-1, descending=True).values[..., : 1 + group_select_mode].sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :k_group]
        here = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
        biased = apart.masked_fill(~here[..., None], -torch.inf).flatten(1)
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(-1, ids)
    if norm_type or renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    out = scores if out_flag else torch.full_like(scores, torch.nan)
    return (weights * routed_scaling_factor).to(x.dtype), ids.int(), out


@under_schema
def npu_moe_init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    expect(row_idx.dtype == expert_idx.dtype == torch.int32, "init_routing: int32")
    expect(bool((expert_idx >= 0).all()), "init_routing: a negative expert crashes it")
    ids, order = expert_idx.flatten().sort(stable=True)
    source = row_idx.flatten()[order]
    back = torch.empty_like(source)
    back[source.long()] = torch.arange(len(source), dtype=torch.int32)
    return x[source.long() % x.shape[0]], back, ids


@under_schema
def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    expect(sorted_expert_for_source_row.dtype == torch.int32, "compute_expert_tokens: int32")
    return torch.bincount(sorted_expert_for_source_row.long(), minlength=num_expert).cumsum(0).int()


@under_schema
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    expect(expert_idx.dtype == torch.int32, "init_routing_v2: int32")
    expect(expert_tokens_num_type == 1 and expert_tokens_num_flag, "init_routing_v2: counts")
    expect(quant_mode in (-1, 1) and scale is None, "init_routing_v2: rows as they are, or rounded by their own scale")
    expect(drop_pad_mode == 0 and row_idx_type == 0, "init_routing_v2: nothing dropped")
    expect(list(active_expert_range) == [0, expert_num], "init_routing_v2: all experts")
    flat = expert_idx.flatten()
    order = flat.argsort(stable=True)
    back = torch.empty_like(flat)
    back[order] = torch.arange(len(flat), dtype=torch.int32)
    rows, scales = x[order // expert_idx.shape[1]], torch.full((len(flat),), float("nan"))
    if quant_mode == 1:
        rows, scales = rounded(rows)
    return rows, back, torch.bincount(flat.long(), minlength=expert_num), scales


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (T, K) in int8, and the scale of each row."""
    scales = x.float().abs().amax(-1) / 127
    return (x.float() / torch.where(scales > 0, scales, 1)[:, None]).round().to(torch.int8), scales


@under_schema
def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    antiquant_scale: Sequence[Tensor] | None = None,
    antiquant_offset: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    **others: Any,
) -> list[Tensor]:
    expect(len(x) == len(weight) == 1 and group_list is not None, "grouped_matmul: single tensors")
    assert group_list is not None
    expect(split_item == 3 and group_type == 0 and group_list.dtype == torch.int64, "grouped_matmul: rows in groups")
    counts = group_list if group_list_type else group_list.diff(prepend=group_list.new_zeros(1))
    rest = len(x[0]) - int(counts.sum())
    expect(rest >= 0, "grouped_matmul: groups have no more rows than there are")
    matrices = weight[0]
    if matrices.dtype == torch.int8:
        return [int8_products(x[0], matrices, counts, **others)]
    if antiquant_scale is not None:
        matrices = dequantised(matrices, antiquant_scale[0], None if antiquant_offset is None else antiquant_offset[0])
    *parts, _ = x[0].split([*counts.tolist(), rest])
    added = torch.zeros(len(matrices), matrices.shape[-1]) if bias is None else bias[0]
    own = torch.float32 if x[0].dtype == torch.bfloat16 else x[0].dtype
    expect(added.shape == (len(matrices), matrices.shape[-1]), "grouped_matmul: a bias is (E, N)")
    expect(bias is None or bias[0].dtype == own, "grouped_matmul: a bias is float32 beside bfloat16")
    products = [
        (part.float() @ m.float() + b.float()).to(part.dtype) for part, m, b in zip(parts, matrices, added, strict=True)
    ]
    return [torch.cat([*products, x[0].new_full((rest, matrices.shape[-1]), torch.nan)])]


def int8_products(
    x: Tensor,
    matrices: Tensor,
    counts: Tensor,
    scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    output_dtype: Any = None,
    **others: object,
) -> Tensor:
    """Multiplies in int8. Rows that belong to no group get sums of 0 and values of NaN."""
    each = torch.arange(len(matrices)).repeat_interleave(counts)
    sums = torch.zeros(len(x), matrices.shape[-1], dtype=torch.float64)
    for expert, matrix in enumerate(matrices):
        sums[: len(each)][each == expert] = x[: len(each)][each == expert].double() @ matrix.double()
    if scale is None or per_token_scale is None:
        expect(output_dtype in (torch.int32, 3), "grouped_matmul: sums of integers are int32")
        return sums.int()
    dtype = {torch.bfloat16: torch.bfloat16, 15: torch.bfloat16}.get(output_dtype, torch.float16)
    own = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    expect(scale[0].dtype == own and per_token_scale[0].dtype == torch.float32, "grouped_matmul: types of scales")
    expect(scale[0].shape == (len(matrices), matrices.shape[-1]), "grouped_matmul: a scale for each column")
    y = x.new_full(sums.shape, torch.nan, dtype=dtype)
    y[: len(each)] = (sums[: len(each)].float() * scale[0].float()[each] * per_token_scale[0][: len(each), None]).to(
        dtype
    )
    return y


@under_schema
def npu_grouped_matmul_swiglu_quant_v2(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    dequant_mode: int = 0,
    dequant_dtype: int = 6,
    quant_mode: int = 0,
    quant_dtype: int = 1,
    group_list_type: int = 0,
    **others: object,
) -> tuple[Tensor, Tensor]:
    expect(len(weight) == 1 and all(given is None for given in others.values()), "swiglu_quant: single tensors")
    expect((dequant_mode, dequant_dtype, quant_mode, quant_dtype) == (0, 6, 0, 1), "swiglu_quant: int8 by float32")
    counts = group_list if group_list_type else group_list.diff(prepend=group_list.new_zeros(1))
    sums = int8_products(x, weight[0], counts, output_dtype=torch.int32)
    return npu_dequant_swiglu_quant(
        sums,
        weight_scale=weight_scale[0],
        activation_scale=x_scale,
        group_index=counts,
        activate_left=True,
        quant_mode=1,
    )  # type: ignore[return-value]


@under_schema
def npu_dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """Scales of rows that no group has are NaN."""
    assert weight_scale is not None
    assert activation_scale is not None
    assert group_index is not None
    expect(x.dtype == torch.int32 and group_index.dtype == torch.int64, "dequant_swiglu_quant: int32, counts int64")
    expect(weight_scale.dtype == activation_scale.dtype == torch.float32, "dequant_swiglu_quant: float32 scales")
    expect(activate_left and quant_mode == 1 and swiglu_mode == 0, "dequant_swiglu_quant: gates left, rows rounded")
    each = torch.arange(len(weight_scale)).repeat_interleave(group_index)
    gate, up = (x[: len(each)] * weight_scale[each] * activation_scale[: len(each), None]).chunk(2, -1)
    hidden, scales = torch.zeros(len(x), x.shape[1] // 2, dtype=torch.int8), torch.full((len(x),), torch.nan)
    hidden[: len(each)], scales[: len(each)] = rounded(torch.nn.functional.silu(gate) * up)
    return hidden, scales


@under_schema
def npu_dynamic_quant(input: Tensor, *, dst_type: Any = None, **others: object) -> tuple[Tensor, Tensor]:
    expect(input.dtype in (torch.bfloat16, torch.float16) and len(input) > 0, "dynamic_quant: rows of 16 bits")
    return rounded(input)


@under_schema
def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: Sequence[bool] | None = None,
    y_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The norm is rounded once, from float32."""
    plain = (smooth_scale1, smooth_scale2, y_dtype) == (None, None, None)
    expect(plain and output_mask == [True, False] and len(x1) > 0, "add_rms_norm_dynamic_quant: one output, as it is")
    expect(x1.dtype == x2.dtype == gamma.dtype != torch.float32, "add_rms_norm_dynamic_quant: one type of 16 bits")
    total = x1 + x2
    inverse = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + epsilon)
    rows, scales = rounded(total.float() * inverse * gamma.float() + (0 if beta is None else beta.float()))
    return rows, rows.new_empty(()), total, scales, torch.tensor(torch.nan)


@under_schema
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: Any = None,
    **others: object,
) -> Tensor:
    assert pertoken_scale is not None
    dtype = {torch.bfloat16: torch.bfloat16, 15: torch.bfloat16}.get(output_dtype, torch.float16)
    expect(x1.dtype == x2.dtype == torch.int8 and scale.shape == x2.shape[1:], "quant_matmul: int8, a scale a column")
    expect(scale.dtype == pertoken_scale.dtype == torch.float32, "quant_matmul: float32 scales")
    expect(bias is None or bias.dtype in (dtype, torch.float32), "quant_matmul: a bias as the result")
    y = (x1.double() @ x2.double()).float() * scale * pertoken_scale[:, None]
    return (y if bias is None else y + bias.float()).to(dtype)


def dequantised(words: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """(..., K, N / 8) int32, scales (..., K / group, N). -> float32 (..., K, N)"""
    nibbles = torch.stack([(words << (28 - 4 * i)) >> 28 for i in range(8)], -1).flatten(-2)
    group = nibbles.shape[-2] // scale.shape[-2]
    shift = 0 if offset is None else offset.float().repeat_interleave(group, -2)
    return (nibbles + shift) * scale.float().repeat_interleave(group, -2)


@under_schema
def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:
    expect(x.shape[1] == antiquant_scale.shape[0] * antiquant_group_size, "weight_quant_batchmatmul: groups of K")
    y = x.float() @ dequantised(weight, antiquant_scale, antiquant_offset)
    return (y if bias is None else y + bias.float()).to(x.dtype)


@under_schema
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int = 0,
    k: int = 1,
) -> Tensor:
    assert scales is not None
    types = expanded_permuted_rows.dtype, scales.dtype
    expect(
        types[0] == types[1] or types == (torch.bfloat16, torch.float32),
        "finalize_routing: scales have the type of the rows, or are float32 beside bfloat16",
    )
    expect(
        expanded_src_to_dst_row.dtype == torch.int32 and expanded_src_to_dst_row.dim() == 1 and scales.dim() == 2,
        "finalize_routing: rows in int32, (T K); scales (T, K)",
    )
    tokens, top_k = scales.shape
    rows = expanded_permuted_rows[expanded_src_to_dst_row.long()].float()
    width = rows.shape[1]
    shaped = rows.view(tokens, top_k, width) if drop_pad_mode == 2 else rows.view(top_k, tokens, width).transpose(0, 1)
    return (shaped * scales.float()[..., None]).sum(1).to(expanded_permuted_rows.dtype)


@under_schema
def npu_moe_distribute_dispatch_v2(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    expert_token_nums_type: int = 1,
    quant_mode: int = 0,
    **others: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Over gloo, whose group has the name. Rows for an expert are in the order of ranks and tokens."""
    expect(expert_token_nums_type == 1, "dispatch: counts")
    expect(all(value in (None, "", 0) for value in others.values()), "dispatch: nothing smoothed, shared or masked")
    expect(quant_mode in (0, 2), "dispatch: rows as they are, or rounded by their own scale")
    expect(expert_ids.dtype == torch.int32, "dispatch: ids are int32")
    expect(bool(((expert_ids >= 0) & (expert_ids < moe_expert_num)).all()), "dispatch: all ids are experts")
    expect(moe_expert_num % ep_world_size == 0, "dispatch: each rank has as many experts")
    rows, ids = (of_all_ranks(t, group_ep) for t in (x, expert_ids))
    (tokens, top_k), here = expert_ids.shape, moe_expert_num // ep_world_size
    out = x.new_full((tokens * ep_world_size * min(here, top_k), x.shape[1]), torch.nan)
    assist = torch.full((128 * len(out),), -1, dtype=torch.int32)
    counts, received, filled = torch.zeros(here, dtype=torch.int64), [], 0
    for expert in range(here):
        for rank in range(ep_world_size):
            sent = (ids[rank] == ep_rank_id * here + expert).nonzero().tolist()
            for token, which in sent:
                out[filled] = rows[rank][token]
                assist[128 * filled : 128 * filled + 3] = torch.tensor([rank, token, which])
                filled += 1
            counts[expert] += len(sent)
            received.append(filled)
    undefined, scales = torch.full((len(out),), torch.nan), torch.full((len(out),), torch.nan)
    if quant_mode:
        out, scales = rounded(out)
    return out, scales, assist, counts, torch.tensor(received, dtype=torch.int32), torch.empty(0), undefined


@under_schema
def npu_moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **others: object,
) -> Tensor:
    expect(all(value in (None, "", 0) for value in others.values()), "combine: nothing quantised, shared or masked")
    expect(expert_scales.dtype == torch.float32, "combine: weights are float32")
    expect(len(ep_send_counts) == moe_expert_num, "combine: numbers of each rank and expert here")
    rows, assist, ends = (
        of_all_ranks(t, group_ep) for t in (expand_x, assist_info_for_combine.view(-1, 128)[:, :3], ep_send_counts)
    )
    weighted = torch.zeros(*expert_ids.shape, expand_x.shape[1])
    for rank in range(ep_world_size):
        filled = int(ends[rank][-1])
        for row, (to, token, which) in zip(rows[rank][:filled], assist[rank][:filled].tolist(), strict=True):
            if to == ep_rank_id:
                weighted[token, which] = expert_scales[token, which] * row.float()
    return weighted.sum(1).to(expand_x.dtype)  # of each row, in the order of its experts


def of_all_ranks(x: Tensor, group: str) -> list[Tensor]:
    resolve: Any = dist.distributed_c10d._resolve_process_group
    handle = resolve(group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(handle.size())]
    dist.all_gather(parts, x.contiguous(), group=handle)
    return parts


@under_schema
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    softmax_lse_flag: bool = False,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    lengths = actual_seq_lengths, actual_seq_lengths_kv
    out, sums = attended(query, key, value, *lengths, heads=num_heads, scale=scale, sinks=None, **given)
    return out, sums if softmax_lse_flag else torch.zeros(1)


@under_schema
def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    learnable_sink: Tensor | None = None,
    num_query_heads: int = 1,
    softmax_scale: float = 1.0,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    assert learnable_sink is not None
    expect(learnable_sink.dtype == query.dtype == torch.bfloat16, "attention: sinks are bfloat16")
    expect(learnable_sink.shape == (num_query_heads,) and given["input_layout"] == "TND", "attention: sinks of TND")
    lengths, heads, scale = (actual_seq_qlen, actual_seq_kvlen), num_query_heads, softmax_scale
    out, _ = attended(query, key, value, *lengths, heads=heads, scale=scale, sinks=learnable_sink, **given)
    return out, torch.zeros(1)


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Sequence[int] | None,
    kv_lens: Sequence[int] | None,
    heads: int,
    scale: float,
    sinks: Tensor | None,
    *,
    atten_mask: Tensor | None = None,
    block_table: Tensor | None = None,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    pre_tokens: int = 2**31 - 1,
    next_tokens: int = 2**31 - 1,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """-> attention, and the logarithms (T, heads, 1) of the sums of exponentials. Keys that a mask hides are not read:
    of a band, those before the first query's."""
    assert kv_lens is not None
    if query_rope is not None and key_rope is not None:
        widths = query.shape[-1], query_rope.shape[-1], key_rope.shape[-1]
        expect(widths in ((512, 64, 64), (128, 64, 64)), "attention: 512 or 128 columns beside rotated ones")
        one = num_key_value_heads == 1 and heads in (1, 2, 4, 8, 16, 32, 64, 128) and block_table is not None
        expect(widths[0] == 128 or one, "attention: a power of two of heads over latents in pages")
        expect(query_rope.shape[:-1] == query.shape[:-1] and key_rope.shape[:2] == key.shape[:2], "attention: rope")
        padding = torch.zeros_like(query_rope), torch.zeros_like(key_rope)
        shaped = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1), torch.cat((value, padding[1]), -1)
        given: Any = dict(
            atten_mask=atten_mask,
            block_table=block_table,
            input_layout=input_layout,
            sparse_mode=sparse_mode,
            num_key_value_heads=num_key_value_heads,
            block_size=block_size,
            pre_tokens=pre_tokens,
            next_tokens=next_tokens,
            **others,
        )
        out, sums = attended(*shaped, ends, kv_lens, heads, scale, sinks, **given)
        return out[..., : widths[0]].contiguous(), sums
    if block_table is None:  # keys and values are packed
        expect(key.shape == value.shape == (kv_lens[-1], num_key_value_heads, query.shape[2]), "attention: packed keys")
        lengths = [end - start for start, end in zip([0, *kv_lens], kv_lens, strict=False)]
        pages = [-(-n // 16) for n in lengths]
        block_table, block_size = torch.zeros(len(lengths), max(pages), dtype=torch.int32), 16
        caches = [x.new_full((sum(pages), 16, x.shape[1] * x.shape[2]), torch.nan) for x in (key, value)]
        for s, (end, n) in enumerate(zip(kv_lens, lengths, strict=True)):
            first = sum(pages[:s])
            block_table[s, : pages[s]] = torch.arange(first, first + pages[s])
            for cache, x in zip(caches, (key, value), strict=True):
                cache[first : first + pages[s]].flatten(0, 1)[:n] = x[end - n : end].flatten(1)
        (key, value), kv_lens = caches, lengths
    expect(block_table.dtype == torch.int32 and block_size % 16 == 0 and block_size <= 512, "attention: pages")
    if input_layout == "BSND":
        expect(query.shape[1] == 1 and atten_mask is None and sparse_mode == 0, "attention: one token, no mask")
        ends, packed = list(range(1, len(query) + 1)), query[:, 0]
    else:
        assert ends is not None
        assert atten_mask is not None
        expect(input_layout == "TND" and sparse_mode in (3, 4), "attention: packed, causal at the end or a band")
        expect(bool((atten_mask == torch.ones(2048, 2048).triu(1).bool()).all()), "attention: mask of later tokens")
        packed = query
    before, after = (pre_tokens, next_tokens) if sparse_mode == 4 else (2**31 - 1, 0)
    expect(len(ends) == len(kv_lens) == len(block_table), "attention: one length a sequence")
    width = packed.shape[2]
    expect(packed.shape[1] == heads, "attention: heads")
    if key.dim() == 5:  # tiles
        shape = num_key_value_heads, width // 16, block_size, 16
        expect(key.shape[1:] == value.shape[1:] == shape and width in (64, 128), "attention: tiles")
        key, value = (cache.permute(0, 3, 1, 2, 4).flatten(2) for cache in (key, value))
    expect(key.shape[1:] == (block_size, num_key_value_heads * width), "attention: a cache")
    out, sums, start = torch.empty_like(packed), torch.empty(len(packed), heads, 1), 0
    for end, length, pages in zip(ends, kv_lens, block_table, strict=True):
        first = max(0, length - (end - start) - before)
        k, v = (
            cache[pages.long()]
            .flatten(0, 1)[first:length]
            .unflatten(1, (num_key_value_heads, width))
            .float()
            .repeat_interleave(heads // num_key_value_heads, 1)
            for cache in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", packed[start:end].float(), k) * scale
        apart = torch.arange(first, length) - torch.arange(length - (end - start), length)[:, None]
        scores = scores.masked_fill((apart < -before) | (apart > after), -torch.inf)
        lse = scores.logsumexp(-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float()[:, None])
        out[start:end] = torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), v)
        sums[start:end] = lse.T[..., None]
        start = end
    return out.view(query.shape), sums

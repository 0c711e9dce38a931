"""Plain CPU implementations under the real `npu::` schemas, with which the Ascend model code computes without a device.

Importing this registers them. Each does what the op's documentation says and refuses what it forbids. Values that an
op leaves undefined are NaN here, so that nothing can depend on them.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from torch import Tensor

LIBRARY = torch.library.Library("npu", "IMPL")


class Given:
    """The arguments of a call by their names in the op's schema, with its defaults."""

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any]):
        self._unread, self._values, self._defaults = set(values), values, defaults

    def __getattr__(self, name: str) -> Any:
        self._unread.discard(name)
        return self._values[name]

    def rest(self) -> dict[str, Any]:
        """Returns the arguments that were not read, which then count as read."""
        return {name: getattr(self, name) for name in sorted(self._unread)}

    def refuse_unread(self, op: str) -> None:
        """Raises RuntimeError for an argument that says something and was not read."""
        for name in self._unread:
            value = self._values[name]
            plain = value is None or (not isinstance(value, Tensor) and value in ("", 0, self._defaults.get(name)))
            expect(plain, f"{op}: {name} is not computed")


def under_schema(function: Callable[..., object]) -> Callable[..., object]:
    """Registers the function, which takes its op's arguments or, if there are many, `a: Given`."""
    name, run = function.__name__, function
    if list(inspect.signature(function).parameters) == ["a"]:
        arguments = getattr(torch.ops.npu, name).default._schema.arguments
        defaults = {x.name: x.default_value for x in arguments if x.has_default_value()}

        def run(*args: object, **kwargs: object) -> object:
            positional = {x.name: value for x, value in zip(arguments, args, strict=False)}
            given = Given(defaults | positional | kwargs, defaults)
            result = function(given)
            given.refuse_unread(name)
            return result

    LIBRARY.impl(name, run, "CPU")
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
def npu_clipped_swiglu(a: Given) -> Tensor:
    expect(a.group_index is None and a.dim == -1, "clipped_swiglu: all rows, last dimension")
    gate, up = (a.x.float()[..., ::2], a.x.float()[..., 1::2]) if a.interleaved else a.x.float().chunk(2, -1)
    gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
    return (gate * torch.sigmoid(a.alpha * gate) * (up + a.bias)).to(a.x.dtype)


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
def npu_scatter_pa_kv_cache(a: Given) -> None:
    expect(
        a.key.dim() == 3 and a.key.shape == a.value.shape and a.cache_mode == "PA_NZ",
        "scatter_pa_kv_cache: (T, heads, D)",
    )
    in_tiles(a.key.flatten(1), a.key_cache, a.slot_mapping)
    in_tiles(a.value.flatten(1), a.value_cache, a.slot_mapping)


@under_schema
def npu_qkv_rms_norm_rope_cache(a: Given) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, heads, dim = a.qkv_size
    expect(dim == 128 and a.cache_mode == "PA_NZ" and not a.is_output_qkv, "qkv_rms_norm_rope_cache: D is 128, tiles")
    expect(a.qkv.shape == (batch * length, heads * dim) and sum(a.head_nums) == heads, "qkv_rms_norm_rope_cache: heads")
    expect(a.head_nums[1] == a.head_nums[2] and a.head_nums[0] % a.head_nums[1] == 0, "qkv_rms_norm_rope_cache: groups")
    expect(len(a.k_cache) >= -(-length // a.k_cache.shape[2]) * batch, "qkv_rms_norm_rope_cache: enough pages")
    expect(a.cos.shape == a.sin.shape == (len(a.qkv), dim), "qkv_rms_norm_rope_cache: cos and sin are (T, D)")
    types = {t.dtype for t in (a.qkv, a.q_gamma, a.k_gamma, a.cos, a.sin, a.q_out)}
    expect(len(types) == 1, "qkv_rms_norm_rope_cache: one type")
    expect(a.q_out.shape == (len(a.qkv), a.head_nums[0] * dim), "qkv_rms_norm_rope_cache: q_out (T, heads D)")
    q, k, v = a.qkv.view(-1, heads, dim).float().split(list(a.head_nums), 1)

    def turned(x: Tensor, gamma: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + a.epsilon) * gamma.float()
        first, second = x.chunk(2, -1)
        return (x * a.cos[:, None].float() + torch.cat((-second, first), -1) * a.sin[:, None].float()).to(a.qkv.dtype)

    a.q_out.copy_(turned(q, a.q_gamma).flatten(1))
    in_tiles(turned(k, a.k_gamma).flatten(1), a.k_cache, a.index)
    in_tiles(v.flatten(1).to(a.qkv.dtype), a.v_cache, a.index)
    undefined = a.qkv.new_full((), torch.nan)
    return undefined, undefined.clone(), undefined.clone()


@under_schema
def npu_kv_rmsnorm_rope_cache_v2(a: Given) -> tuple[Tensor, Tensor]:
    """Neighbouring columns of keys rotate, of which the first ones of all pairs are then before the second ones."""
    tokens = len(a.kv)
    expect(a.cache_mode == "PA", "kv_rmsnorm_rope_cache: plain pages")
    expect(a.kv.shape == (tokens, 1, 1, 576) and a.gamma.shape == (512,), "kv_rmsnorm_rope_cache: (T, 1, 1, 576)")
    expect(a.cos.shape == a.sin.shape == (tokens, 1, 1, 64), "kv_rmsnorm_rope_cache: cos and sin are (T, 1, 1, 64)")
    expect(a.index.dtype == torch.int64 and a.index.shape == (tokens,), "kv_rmsnorm_rope_cache: a slot for each row")
    expect(len(a.index.unique()) == tokens, "kv_rmsnorm_rope_cache: no slot is written twice")
    page, one = a.k_cache.shape[1:3]
    expect(page % 16 == 0 and one == 1, "kv_rmsnorm_rope_cache: pages of multiples of 16 tokens, one head")
    expect(
        a.ckv_cache.shape == (len(a.k_cache), page, 1, 512) and a.k_cache.shape[3] == 64,
        "kv_rmsnorm_rope_cache: caches",
    )
    expect(
        len({t.dtype for t in (a.kv, a.gamma, a.cos, a.sin, a.k_cache, a.ckv_cache)}) == 1,
        "kv_rmsnorm_rope_cache: one type",
    )
    latents, keys = a.kv[:, 0, 0].split([512, 64], 1)
    apart = torch.cat((keys[:, ::2], keys[:, 1::2]), 1)
    for cache, rows in (
        (a.ckv_cache, torch_npu.npu_rms_norm(latents, a.gamma, a.epsilon)[0]),
        (a.k_cache, turned(apart, a.cos[:, 0, 0], a.sin[:, 0, 0])),
    ):
        expect(cache.is_contiguous(), "kv_rmsnorm_rope_cache: caches without gaps")
        cache.flatten(0, 2)[a.index] = rows
    undefined = a.kv.new_full((), torch.nan)
    return undefined, undefined.clone()


@under_schema
def npu_mla_prolog_v3(a: Given) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Neighbouring columns rotate, of which the first ones of all pairs are then before the second ones."""
    expect(a.cache_mode == "PA_BSND", "mla_prolog: pages")
    heads, still, latent = a.weight_uk.shape
    expect((still, latent) == (128, 512) and heads.bit_count() == 1 and heads <= 128, "mla_prolog: heads")
    expect(a.weight_dq.shape == (a.token_x.shape[1], 1536), "mla_prolog: queries' latents of 1536")
    expect(a.weight_uq_qr.shape == (1536, heads * 192), "mla_prolog: heads of 128 + 64, side by side")
    expect(
        len({t.dtype for t in (a.token_x, a.weight_dq, a.weight_uk, a.rope_cos, a.kv_cache)}) == 1,
        "mla_prolog: one type",
    )
    compressed: Any = npu_rms_norm(a.token_x @ a.weight_dq, a.rmsnorm_gamma_cq, a.rmsnorm_epsilon_cq)
    own, turning = (compressed[0] @ a.weight_uq_qr).unflatten(1, (heads, -1)).split([128, 64], 2)
    torch_npu.npu_kv_rmsnorm_rope_cache_v2(
        (a.token_x @ a.weight_dkv_kr)[:, None, None],
        a.rmsnorm_gamma_ckv,
        a.rope_cos[:, None, None],
        a.rope_sin[:, None, None],
        a.cache_index,
        a.kr_cache,
        a.kv_cache,
        epsilon=a.rmsnorm_epsilon_ckv,
        cache_mode="PA",
    )
    apart = torch.cat((turning[..., ::2], turning[..., 1::2]), -1)
    query = torch.einsum("thk,hkn->thn", own.float(), a.weight_uk.float()).to(a.token_x.dtype)
    undefined = (a.token_x.new_empty(0) for _ in range(3))
    return query, turned(apart, a.rope_cos[:, None], a.rope_sin[:, None]), *undefined


@under_schema
def npu_transpose_batchmatmul(a: Given) -> Tensor:
    orders = [list(order) for order in (a.perm_x1, a.perm_x2, a.perm_y)]
    expect(orders == [[1, 0, 2], [0, 1, 2], [1, 0, 2]] and a.batch_split_factor == 1, "transpose_batchmatmul: orders")
    expect(a.input.dtype == a.weight.dtype, "transpose_batchmatmul: one type")
    tokens, heads, inputs = a.input.shape
    expect(inputs % 128 == 0 and a.weight.shape[2] % 128 == 0, "transpose_batchmatmul: K, N are multiples of 128")
    expect(tokens > 0 and heads * inputs < 65536, "transpose_batchmatmul: fewer than 65,536 values a row")
    return torch.einsum("thk,hkn->thn", a.input.float(), a.weight.float()).to(a.input.dtype)


@under_schema
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = torch.softmax(x.float(), -1).topk(k, -1)
    rows = torch.arange(x.shape[0] * k, dtype=torch.int32).view(k, -1).T.contiguous()
    return weights.to(x.dtype), ids.int(), rows


@under_schema
def npu_moe_gating_top_k(a: Given) -> tuple[Tensor, Tensor, Tensor]:
    """A softmax is renormalised if `renorm` says so, a sigmoid always."""
    expect(
        a.x.dim() == 2 and len(a.x) > 0 and 0 < a.k <= a.x.shape[1] <= 2048,
        "gating_top_k: (T, experts), k of at most 2048",
    )
    expect(a.x.dtype in (torch.float32, torch.float16, torch.bfloat16), "gating_top_k: floats")
    expect(a.bias is None or (a.bias.dtype, a.bias.shape) == (a.x.dtype, a.x.shape[1:]), "gating_top_k: a bias as x")
    expect(a.input_ids is None and a.tid2eid is None, "gating_top_k: no table of experts")
    per_group, rest = divmod(a.x.shape[1], a.group_count)
    expect(rest == 0 and 0 < a.k_group <= a.group_count and a.k <= a.k_group * per_group, "gating_top_k: groups")
    expect(
        a.group_select_mode in (0, 1) and per_group > a.group_select_mode, "gating_top_k: groups by one score or two"
    )
    plain = a.group_count in (1, a.x.shape[1]) or a.k_group == a.group_count
    expect(plain or a.group_count * -(-per_group // 32) * 32 <= 2048, "gating_top_k: groups in multiples of 32")
    expect(a.renorm in (0, 1), "gating_top_k: renormalises or does not")
    expect(a.norm_type in (0, 1), "gating_top_k: softmax or sigmoid")
    scores = a.x.float().sigmoid() if a.norm_type else a.x.float().softmax(-1)
    biased = scores if a.bias is None else scores + a.bias.float()
    if not plain:
        apart = biased.unflatten(1, (a.group_count, -1))
        best = apart.sort(dim=-1, descending=True).values[..., : 1 + a.group_select_mode].sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : a.k_group]
        here = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
        biased = apart.masked_fill(~here[..., None], -torch.inf).flatten(1)
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, : a.k]
    weights = scores.gather(-1, ids)
    if a.norm_type or a.renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + a.eps)
    out = scores if a.out_flag else torch.full_like(scores, torch.nan)
    return (weights * a.routed_scaling_factor).to(a.x.dtype), ids.int(), out


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
def npu_moe_init_routing_v2(a: Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    expect(a.expert_idx.dtype == torch.int32, "init_routing_v2: int32")
    expect(a.expert_tokens_num_type == 1 and a.expert_tokens_num_flag, "init_routing_v2: counts")
    expect(
        a.quant_mode in (-1, 1) and a.scale is None, "init_routing_v2: rows as they are, or rounded by their own scale"
    )
    expect(a.drop_pad_mode == 0 and a.active_num == a.expert_idx.numel(), "init_routing_v2: nothing dropped")
    expect(list(a.active_expert_range) == [0, a.expert_num], "init_routing_v2: all experts")
    flat = a.expert_idx.flatten()
    order = flat.argsort(stable=True)
    back = torch.empty_like(flat)
    back[order] = torch.arange(len(flat), dtype=torch.int32)
    rows, scales = a.x[order // a.expert_idx.shape[1]], torch.full((len(flat),), float("nan"))
    if a.quant_mode == 1:
        rows, scales = rounded(rows)
    return rows, back, torch.bincount(flat.long(), minlength=a.expert_num), scales


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (T, K) in int8, and the scale of each row."""
    scales = x.float().abs().amax(-1) / 127
    return (x.float() / torch.where(scales > 0, scales, 1)[:, None]).round().to(torch.int8), scales


@under_schema
def npu_grouped_matmul(a: Given) -> list[Tensor]:
    expect(len(a.x) == len(a.weight) == 1 and a.group_list is not None, "grouped_matmul: single tensors")
    expect(
        a.split_item == 3 and a.group_type == 0 and a.group_list.dtype == torch.int64, "grouped_matmul: rows in groups"
    )
    counts = a.group_list if a.group_list_type else a.group_list.diff(prepend=a.group_list.new_zeros(1))
    rest = len(a.x[0]) - int(counts.sum())
    expect(rest >= 0, "grouped_matmul: groups have no more rows than there are")
    matrices = a.weight[0]
    if matrices.dtype == torch.int8:
        return [int8_products(a.x[0], matrices, counts, a.scale, a.per_token_scale, a.output_dtype)]
    if a.antiquant_scale is not None:
        matrices = dequantised(
            matrices, a.antiquant_scale[0], None if a.antiquant_offset is None else a.antiquant_offset[0]
        )
    *parts, _ = a.x[0].split([*counts.tolist(), rest])
    added = torch.zeros(len(matrices), matrices.shape[-1]) if a.bias is None else a.bias[0]
    own = torch.float32 if a.x[0].dtype == torch.bfloat16 else a.x[0].dtype
    expect(added.shape == (len(matrices), matrices.shape[-1]), "grouped_matmul: a bias is (E, N)")
    expect(a.bias is None or a.bias[0].dtype == own, "grouped_matmul: a bias is float32 beside bfloat16")
    products = [
        (part.float() @ m.float() + b.float()).to(part.dtype) for part, m, b in zip(parts, matrices, added, strict=True)
    ]
    return [torch.cat([*products, a.x[0].new_full((rest, matrices.shape[-1]), torch.nan)])]


def int8_products(
    x: Tensor,
    matrices: Tensor,
    counts: Tensor,
    scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    output_dtype: Any = None,
) -> Tensor:
    """Multiplies in int8. Rows that belong to no group get sums of 0 and values of NaN."""
    experts = torch.arange(len(matrices)).repeat_interleave(counts)
    sums = torch.zeros(len(x), matrices.shape[-1], dtype=torch.float64)
    for expert, matrix in enumerate(matrices):
        sums[: len(experts)][experts == expert] = x[: len(experts)][experts == expert].double() @ matrix.double()
    if scale is None or per_token_scale is None:
        expect(output_dtype in (torch.int32, 3), "grouped_matmul: sums of integers are int32")
        return sums.int()
    dtype = {torch.bfloat16: torch.bfloat16, 15: torch.bfloat16}.get(output_dtype, torch.float16)
    own = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    expect(scale[0].dtype == own and per_token_scale[0].dtype == torch.float32, "grouped_matmul: types of scales")
    expect(scale[0].shape == (len(matrices), matrices.shape[-1]), "grouped_matmul: a scale for each column")
    y = x.new_full(sums.shape, torch.nan, dtype=dtype)
    y[: len(experts)] = (
        sums[: len(experts)].float() * scale[0].float()[experts] * per_token_scale[0][: len(experts), None]
    ).to(dtype)
    return y


@under_schema
def npu_grouped_matmul_swiglu_quant_v2(a: Given) -> tuple[Tensor, Tensor]:
    expect(len(a.weight) == 1, "swiglu_quant: single tensors")
    expect(
        (a.dequant_mode, a.dequant_dtype, a.quant_mode, a.quant_dtype) == (0, 6, 0, 1), "swiglu_quant: int8 by float32"
    )
    counts = a.group_list if a.group_list_type else a.group_list.diff(prepend=a.group_list.new_zeros(1))
    sums = int8_products(a.x, a.weight[0], counts, output_dtype=torch.int32)
    return torch_npu.npu_dequant_swiglu_quant(
        sums,
        weight_scale=a.weight_scale[0],
        activation_scale=a.x_scale,
        group_index=counts,
        activate_left=True,
        quant_mode=1,
    )


@under_schema
def npu_dequant_swiglu_quant(a: Given) -> tuple[Tensor, Tensor]:
    """Scales of rows that no group has are NaN."""
    expect(a.x.dtype == torch.int32 and a.group_index.dtype == torch.int64, "dequant_swiglu_quant: int32, counts int64")
    expect(a.weight_scale.dtype == a.activation_scale.dtype == torch.float32, "dequant_swiglu_quant: float32 scales")
    expect(
        a.activate_left and a.quant_mode == 1 and a.swiglu_mode == 0, "dequant_swiglu_quant: gates left, rows rounded"
    )
    experts = torch.arange(len(a.weight_scale)).repeat_interleave(a.group_index)
    gate, up = (a.x[: len(experts)] * a.weight_scale[experts] * a.activation_scale[: len(experts), None]).chunk(2, -1)
    hidden, scales = (torch.zeros(len(a.x), a.x.shape[1] // 2, dtype=torch.int8), torch.full((len(a.x),), torch.nan))
    hidden[: len(experts)], scales[: len(experts)] = rounded(torch.nn.functional.silu(gate) * up)
    return hidden, scales


@under_schema
def npu_dynamic_quant(input: Tensor, *, dst_type: Any = None, **others: object) -> tuple[Tensor, Tensor]:
    expect(input.dtype in (torch.bfloat16, torch.float16) and len(input) > 0, "dynamic_quant: rows of 16 bits")
    return rounded(input)


@under_schema
def npu_add_rms_norm_dynamic_quant(a: Given) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The norm is rounded once, from float32."""
    plain = (a.smooth_scale1, a.smooth_scale2, a.y_dtype) == (None, None, None)
    expect(
        plain and a.output_mask == [True, False] and len(a.x1) > 0, "add_rms_norm_dynamic_quant: one output, as it is"
    )
    expect(
        a.x1.dtype == a.x2.dtype == a.gamma.dtype != torch.float32, "add_rms_norm_dynamic_quant: one type of 16 bits"
    )
    total = a.x1 + a.x2
    inverse = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + a.epsilon)
    rows, scales = rounded(total.float() * inverse * a.gamma.float() + (0 if a.beta is None else a.beta.float()))
    return rows, rows.new_empty(()), total, scales, torch.tensor(torch.nan)


@under_schema
def npu_quant_matmul(a: Given) -> Tensor:
    dtype = {torch.bfloat16: torch.bfloat16, 15: torch.bfloat16}.get(a.output_dtype, torch.float16)
    expect(
        a.x1.dtype == a.x2.dtype == torch.int8 and a.scale.shape == a.x2.shape[1:],
        "quant_matmul: int8, a scale a column",
    )
    expect(a.scale.dtype == a.pertoken_scale.dtype == torch.float32, "quant_matmul: float32 scales")
    expect(a.bias is None or a.bias.dtype in (dtype, torch.float32), "quant_matmul: a bias as the result")
    y = (a.x1.double() @ a.x2.double()).float() * a.scale * a.pertoken_scale[:, None]
    return (y if a.bias is None else y + a.bias.float()).to(dtype)


def dequantised(words: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """(..., K, N / 8) int32, scales (..., K / group, N). -> float32 (..., K, N)"""
    nibbles = torch.stack([(words << (28 - 4 * i)) >> 28 for i in range(8)], -1).flatten(-2)
    group = nibbles.shape[-2] // scale.shape[-2]
    shift = 0 if offset is None else offset.float().repeat_interleave(group, -2)
    return (nibbles + shift) * scale.float().repeat_interleave(group, -2)


@under_schema
def npu_weight_quant_batchmatmul(a: Given) -> Tensor:
    expect(a.x.shape[1] == a.antiquant_scale.shape[0] * a.antiquant_group_size, "weight_quant_batchmatmul: groups of K")
    y = a.x.float() @ dequantised(a.weight, a.antiquant_scale, a.antiquant_offset)
    return (y if a.bias is None else y + a.bias.float()).to(a.x.dtype)


@under_schema
def npu_moe_finalize_routing(a: Given) -> Tensor:
    expect(a.skip1 is None and a.bias is None, "finalize_routing: nothing is added")
    expect(a.export_for_source_row is None or a.export_for_source_row.dtype == torch.int32, "finalize_routing: int32")
    types = a.expanded_permuted_rows.dtype, a.scales.dtype
    expect(
        types[0] == types[1] or types == (torch.bfloat16, torch.float32),
        "finalize_routing: scales have the type of the rows, or are float32 beside bfloat16",
    )
    expect(
        a.expanded_src_to_dst_row.dtype == torch.int32 and a.expanded_src_to_dst_row.dim() == 1 and a.scales.dim() == 2,
        "finalize_routing: rows in int32, (T K); scales (T, K)",
    )
    tokens, top_k = a.scales.shape
    rows = a.expanded_permuted_rows[a.expanded_src_to_dst_row.long()].float()
    width = rows.shape[1]
    shaped = (
        rows.view(tokens, top_k, width) if a.drop_pad_mode == 2 else rows.view(top_k, tokens, width).transpose(0, 1)
    )
    return (shaped * a.scales.float()[..., None]).sum(1).to(a.expanded_permuted_rows.dtype)


@under_schema
def npu_moe_distribute_dispatch_v2(a: Given) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Over gloo, whose group has the name. Rows for an expert are in the order of ranks and tokens."""
    expect(a.expert_token_nums_type == 1, "dispatch: counts")
    expect(a.quant_mode in (0, 2), "dispatch: rows as they are, or rounded by their own scale")
    expect(a.expert_ids.dtype == torch.int32, "dispatch: ids are int32")
    expect(bool(((a.expert_ids >= 0) & (a.expert_ids < a.moe_expert_num)).all()), "dispatch: all ids are experts")
    expect(a.moe_expert_num % a.ep_world_size == 0, "dispatch: each rank has as many experts")
    rows, ids = (of_all_ranks(t, a.group_ep) for t in (a.x, a.expert_ids))
    (tokens, top_k), here = a.expert_ids.shape, a.moe_expert_num // a.ep_world_size
    out = a.x.new_full((tokens * a.ep_world_size * min(here, top_k), a.x.shape[1]), torch.nan)
    assist = torch.full((128 * len(out),), -1, dtype=torch.int32)
    counts, received, filled = torch.zeros(here, dtype=torch.int64), [], 0
    for expert in range(here):
        for rank in range(a.ep_world_size):
            sent = (ids[rank] == a.ep_rank_id * here + expert).nonzero().tolist()
            for token, which in sent:
                out[filled] = rows[rank][token]
                assist[128 * filled : 128 * filled + 3] = torch.tensor([rank, token, which])
                filled += 1
            counts[expert] += len(sent)
            received.append(filled)
    undefined, scales = torch.full((len(out),), torch.nan), torch.full((len(out),), torch.nan)
    if a.quant_mode:
        out, scales = rounded(out)
    return out, scales, assist, counts, torch.tensor(received, dtype=torch.int32), torch.empty(0), undefined


@under_schema
def npu_moe_distribute_combine_v2(a: Given) -> Tensor:
    expect(a.expert_scales.dtype == torch.float32, "combine: weights are float32")
    expect(len(a.ep_send_counts) == a.moe_expert_num, "combine: numbers of each rank and expert here")
    rows, assist, ends = (
        of_all_ranks(t, a.group_ep)
        for t in (a.expand_x, a.assist_info_for_combine.view(-1, 128)[:, :3], a.ep_send_counts)
    )
    weighted = torch.zeros(*a.expert_ids.shape, a.expand_x.shape[1])
    for rank in range(a.ep_world_size):
        filled = int(ends[rank][-1])
        for row, (to, token, which) in zip(rows[rank][:filled], assist[rank][:filled].tolist(), strict=True):
            if to == a.ep_rank_id:
                weighted[token, which] = a.expert_scales[token, which] * row.float()
    return weighted.sum(1).to(a.expand_x.dtype)  # of each row, in the order of its experts


def of_all_ranks(x: Tensor, group: str) -> list[Tensor]:
    resolve: Any = dist.distributed_c10d._resolve_process_group
    handle = resolve(group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(handle.size())]
    dist.all_gather(parts, x.contiguous(), group=handle)
    return parts


@under_schema
def npu_fused_infer_attention_score(a: Given) -> tuple[Tensor, Tensor]:
    lengths = a.actual_seq_lengths, a.actual_seq_lengths_kv
    out, sums = attended(a.query, a.key, a.value, *lengths, heads=a.num_heads, scale=a.scale, sinks=None, **a.rest())
    return out, sums if a.softmax_lse_flag else torch.zeros(1)


@under_schema
def npu_fused_infer_attention_score_v2(a: Given) -> tuple[Tensor, Tensor]:
    sinks = a.learnable_sink
    expect(sinks.dtype == a.query.dtype == torch.bfloat16, "attention: sinks are bfloat16")
    lengths, heads, scale = (a.actual_seq_qlen, a.actual_seq_kvlen), a.num_query_heads, a.softmax_scale
    given, others = (a.query, a.key, a.value), a.rest()
    expect(sinks.shape == (heads,) and others["input_layout"] == "TND", "attention: sinks of TND")
    out, _ = attended(*given, *lengths, heads=heads, scale=scale, sinks=sinks, **others)
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

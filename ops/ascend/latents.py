"""Attention over latents by the fused operator of ops/ascend/attention.py, which takes latents and rotated keys apart:
in two caches whose pages have the same numbers.

Its kernels are for latents of 512 columns, keys of 64 and a power of two of query heads, so others are added that are
zeros. Prompts may have keys and values made of all tokens that they read: where each has 128 columns, rotated keys stay
apart; they are joined to keys that are then as wide as values.
"""

from typing import cast

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from umbra.ops.ascend.attention import ALL_TOKENS, CAUSAL_AT_THE_END, WHOLE_MASK, AttentionCall, attended, checked
from umbra.ops.ascend.weights import AscendHeads, AscendMatrix
from umbra.ops.interface import LatentCache, LatentNorm, Paged, PrologWeights

APART_WIDTH = 128  # of keys and values of a head, beside rotated keys of 64 columns
MOST_JOINED = 256  # columns of packed keys and values
# OT attention/mla_prolog/op_host/mla_prolog_tiling_check.cpp: hidden columns, those of queries' latents, keys and heads
PROLOG_HIDDEN = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
PROLOG_RANK, PROLOG_KEY, PROLOG_HEADS = 1536, 128, (1, 2, 4, 8, 16, 32, 64, 128)
# OT 8.5.0 to 9.1.0: ON matmul/transpose_batch_mat_mul/op_api/aclnn_transpose_batch_mat_mul.cpp
MOST_INPUTS, WHOLE_INPUTS = 65535, 128  # of all heads together; a divisor of those of a head, and of its outputs


def head_linear(x: Tensor, weights: AscendHeads) -> Tensor:
    """x (T, heads, K) -> (T, heads, N)"""
    (tokens, heads, inputs), outputs = x.shape, weights.rows
    if not tokens:  # a data-parallel group that has no prompt in this step
        return x.new_empty(0, heads, outputs)
    if inputs % WHOLE_INPUTS or outputs % WHOLE_INPUTS or heads * inputs > MOST_INPUTS:
        return torch.bmm(x.transpose(0, 1), weights.data).transpose(0, 1)
    return torch_npu.npu_transpose_batchmatmul(
        input=x,
        weight=weights.data,
        bias=None,
        scale=None,
        perm_x1=[1, 0, 2],
        perm_x2=[0, 1, 2],
        perm_y=[1, 0, 2],
        batch_split_factor=1,
    )


def rope_write(q: Tensor, rows: Tensor, norm: LatentNorm, cache: LatentCache, slot_mapping: Tensor) -> Tensor:
    """`Ops.rope_write_latents`. One kernel normalises and writes latents, and rotates and writes keys, of which it puts
    the first columns of all pairs before the second ones; so queries have them at load."""
    if not len(q):
        return q
    latents, keys = cache
    angles = [angle[:, None, None] for angle in (norm.cos, norm.sin)]
    torch_npu.npu_kv_rmsnorm_rope_cache_v2(
        kv=rows[:, None, None],
        gamma=norm.weight,
        cos=angles[0],
        sin=angles[1],
        index=slot_mapping,
        k_cache=keys,
        ckv_cache=latents,
        k_rope_scale=None,
        c_kv_scale=None,
        k_rope_offset=None,
        c_kv_offset=None,
        epsilon=norm.eps,
        cache_mode="PA",
        is_output_kv=False,
    )
    turned = torch_npu.npu_rotary_mul(
        input=q[None], r1=norm.cos[None, :, None], r2=norm.sin[None, :, None], rotary_mode="half"
    )
    return turned.squeeze(0)


def takes_prolog(hidden: int, rank: int, heads: int, key: int) -> bool:
    return hidden in PROLOG_HIDDEN and rank == PROLOG_RANK and key == PROLOG_KEY and heads in PROLOG_HEADS


def prolog(
    x: Tensor, weights: PrologWeights, norm: LatentNorm, cache: LatentCache, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """`LatentProlog`. Keys and queries are rotated as `rope_write` does."""
    of_heads = cast(AscendHeads, weights.keys)
    if not len(x):  # a data-parallel group that has no token in this step
        heads = len(of_heads.data)
        return x.new_empty(0, heads, of_heads.rows), x.new_empty(0, heads, norm.cos.shape[1])
    q_a, q_b, kv_a = (cast(AscendMatrix, matrix).data for matrix in (weights.q_a, weights.q_b, weights.kv_a))
    q, turned, *_ = torch_npu.npu_mla_prolog_v3(
        token_x=x,
        weight_dq=q_a,
        weight_uq_qr=q_b,
        weight_uk=of_heads.data,
        weight_dkv_kr=kv_a,
        rmsnorm_gamma_cq=weights.q_norm,
        rmsnorm_gamma_ckv=norm.weight,
        rope_sin=norm.sin,
        rope_cos=norm.cos,
        kv_cache=cache[0],
        kr_cache=cache[1],
        cache_index=slot_mapping,
        dequant_scale_x=None,
        dequant_scale_w_dq=None,
        dequant_scale_w_uq_qr=None,
        dequant_scale_w_dkv_kr=None,
        quant_scale_ckv=None,
        quant_scale_ckr=None,
        smooth_scales_cq=None,
        actual_seq_len=None,
        k_nope_clip_alpha=None,
        rmsnorm_epsilon_cq=norm.eps,
        rmsnorm_epsilon_ckv=norm.eps,
        cache_mode="PA_BSND",
        query_norm_flag=False,
        weight_quant_mode=0,
        kv_cache_quant_mode=0,
        query_quant_mode=0,
        ckvkr_repo_mode=0,
        quant_scale_repo_mode=0,
        tile_size=128,
        qc_qr_scale=1.0,
        kc_scale=1.0,
    )
    return q, turned


def attend_latents(q: Tensor, q_rotary: Tensor, cache: LatentCache, paged: Paged, scale: float, mask: Tensor) -> Tensor:
    """`Ops.latent_attention`, of decode steps and of prompts."""
    ends, on_device = checked(paged)
    tokens, heads, _ = q.shape
    if not tokens:
        return torch.empty_like(q)
    more = (1 << (heads - 1).bit_length()) - heads
    if more:
        q, q_rotary = (F.pad(x, (0, 0, 0, more)) for x in (q, q_rotary))
    latents, keys = (part.squeeze(2) for part in cache)
    decode = tokens == len(paged.kv_lens)
    q, q_rotary = (x[:, None] if decode else x for x in (q, q_rotary))
    call = AttentionCall(
        q,
        latents,
        latents,
        None if decode else mask,
        None if decode else ends,
        paged.kv_lens,
        paged.block_tables,
        heads + more,
        1,
        scale,
        "BSND" if decode else "TND",
        WHOLE_MASK if decode else CAUSAL_AT_THE_END,
        ALL_TOKENS,
        ALL_TOKENS,
        latents.shape[1],
        q_rotary,
        keys,
    )
    out = attended(call, on_device)
    return (out.squeeze(1) if decode else out)[:, :heads]


def attend_expanded(
    q: Tensor,
    q_rotary: Tensor,
    cache: LatentCache,
    keys: AscendHeads,
    values: AscendHeads,
    paged: Paged,
    scale: float,
    mask: Tensor,
) -> Tensor:
    """`Ops.expanded_attention`. Sequences come one after another, so that keys and values of one take memory."""
    ends, _ = checked(paged)
    width, joined = values.rows, q.shape[2] + q_rotary.shape[2]
    if not q.shape[2] == width == APART_WIDTH and not joined == width <= MOST_JOINED:
        sums = attend_latents(head_linear(q, keys), q_rotary, cache, paged, scale, mask)
        return head_linear(sums, values)
    outs, start = [], 0
    for end, length, table in zip(ends, paged.kv_lens, paged.block_tables, strict=True):
        rows = slice(start, int(end))
        outs.append(_of_sequence(q[rows], q_rotary[rows], cache, keys, values, table, int(length), scale, mask))
        start = rows.stop
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _of_sequence(
    q: Tensor,
    q_rotary: Tensor,
    cache: LatentCache,
    keys: AscendHeads,
    values: AscendHeads,
    table: Tensor,
    length: int,
    scale: float,
    mask: Tensor,
) -> Tensor:
    """The cached tokens of a sequence are gathered, and each head's keys and values made of them."""
    heads, pages = q.shape[1], table[: -(-length // cache[0].shape[1])]
    latents, turned = (part[pages].flatten(0, 2)[:length] for part in cache)
    own = torch.mm(latents, keys.data.permute(2, 0, 1).flatten(1)).view(length, heads, -1)
    value = torch.mm(latents, values.data.transpose(0, 1).flatten(1)).view(length, heads, -1)
    turned, apart = turned[:, None].expand(-1, heads, -1), q.shape[2] == APART_WIDTH
    if not apart:
        q, own = torch.cat((q, q_rotary), -1), torch.cat((own, turned), -1)
    call = AttentionCall(
        q.contiguous(),
        own,
        value,
        mask,
        (len(q),),
        (length,),
        None,
        heads,
        heads,
        scale,
        "TND",
        CAUSAL_AT_THE_END,
        ALL_TOKENS,
        ALL_TOKENS,
        0,
        *((q_rotary, turned.contiguous()) if apart else ()),
    )
    return attended(call, False)

"""Attention over paged caches by one fused operator of torch_npu, whose second version takes sinks.

In a decode step the sequences, of one token each, form a batch. With more tokens, or over windows and with sinks, they
are packed: the operator ignores windows of batches of single tokens and takes sinks of packed tokens only. Where it
takes none, its outputs are those of a softmax without the sink, and the sum of that one's exponentials tells what the
sink would have taken of them. Packed tokens of 64 or 128 values go to kernels that take lengths on the device, as GE
passes them, since CANN 8.5 (OT 8.5.0 fused_infer_attention_score/op_host/arch32/.._tiling_v3.cpp 860, info_parser 115).
"""

from typing import Any, NamedTuple

import torch
import torch_npu
import torchair
from torch import Tensor

from umbra.ops.ascend.layout import TILE
from umbra.ops.interface import Lengths, Paged

WHOLE_MASK, CAUSAL_AT_THE_END, BAND = 0, 3, 4  # values of sparse_mode
ALL_TOKENS = 2147483647  # for pre_tokens and next_tokens


class KvCaches(NamedTuple):
    """The keys and values of a layer, as `Ops.kv_cache` makes their caches; `tiled`: in tiles."""

    keys: Tensor
    values: Tensor
    tiled: bool


class AttentionCall(NamedTuple):
    """The arguments of both versions of the operator. Tokens `before` to `after` the last ones are seen, both
    included."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    ends: Lengths | None  # of the sequences' tokens
    kv_lens: Lengths
    tables: Tensor | None  # None: keys and values are packed too, and `kv_lens` are the sequences' ends
    heads: int
    kv_heads: int
    scale: float
    layout: str
    mode: int  # sparse_mode
    before: int
    after: int
    page_size: int
    query_rotary: Tensor | None = None  # further columns of queries and keys
    key_rotary: Tensor | None = None


def checked(paged: Paged) -> tuple[Lengths, bool]:
    """The ends of the sequences' tokens, and whether their lengths are a tensor on the device, as they may be in a GE
    graph of a decode step."""
    on_device = isinstance(paged.kv_lens, Tensor)
    if isinstance(paged.query_starts, Tensor) or (on_device and not torch.compiler.is_compiling()):
        raise TypeError("lengths must be host integers, as `paging` makes them")
    if paged.block_tables.dtype != torch.int32:
        raise TypeError(f"block_tables: {paged.block_tables.dtype}: npu_fused_infer_attention_score takes int32")
    return paged.query_starts[1:], on_device


def attended(call: AttentionCall, on_device: bool) -> Tensor:
    """`on_device`: lengths are a tensor, which torchair's form of the operator takes."""
    out, _ = _first(torchair.ops if on_device else torch_npu, call, False)
    return out


def attend(
    q: Tensor,
    caches: KvCaches,
    paged: Paged,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    mask: Tensor,
    takes_sinks: bool,
) -> Tensor:
    """Computes `Ops.attention`. `mask` (bool) hides later tokens; `takes_sinks`: the operator does, in bfloat16."""
    (k_cache, v_cache, tiled), (_, block_tables, _, kv_lens) = caches, paged
    ends, on_device = checked(paged)
    tokens, heads, width = q.shape
    if not tokens:  # a data-parallel group that has no prompt in this step
        return torch.empty_like(q)
    page_size, kv_heads = k_cache.shape[1], k_cache.shape[2] // width
    if tiled:
        page_size, kv_heads = k_cache.shape[2], k_cache.shape[1] * TILE // width
        k_cache, v_cache = (x.unflatten(1, (kv_heads, width // TILE)) for x in (k_cache, v_cache))
    decode = tokens == len(kv_lens)
    batch = decode and window is None and sinks is None
    if decode:  # known when a graph is made
        ends = torch.arange(1, tokens + 1, device=q.device) if on_device else tuple(range(1, tokens + 1))
    call = AttentionCall(
        q[:, None] if batch else q,
        k_cache,
        v_cache,
        None if batch else mask,
        None if batch else ends,
        kv_lens,
        block_tables,
        heads,
        kv_heads,
        scale,
        "BSND" if batch else "TND",
        WHOLE_MASK if batch else CAUSAL_AT_THE_END if window is None else BAND,
        ALL_TOKENS if window is None else window - 1,
        ALL_TOKENS if window is None else 0,
        page_size,
    )
    if sinks is None:
        out = attended(call, on_device)
        return out.squeeze(1) if batch else out
    ops = torchair.ops if on_device else torch_npu
    if takes_sinks and q.dtype == torch.bfloat16:
        return _second(ops, call, sinks)
    out, sums = _first(ops, call, True)  # sums (tokens, heads, 1) float32: their logarithms
    return out * (sums - sinks[:, None]).sigmoid().to(out.dtype)


def _first(fused: Any, call: AttentionCall, with_sums: bool) -> tuple[Tensor, Tensor]:
    out, sums = fused.npu_fused_infer_attention_score(
        query=call.query,
        key=call.key,
        value=call.value,
        pse_shift=None,
        atten_mask=call.mask,
        actual_seq_lengths=call.ends,
        actual_seq_lengths_kv=call.kv_lens,
        dequant_scale1=None,
        quant_scale1=None,
        dequant_scale2=None,
        quant_scale2=None,
        quant_offset2=None,
        antiquant_scale=None,
        antiquant_offset=None,
        key_antiquant_scale=None,
        key_antiquant_offset=None,
        value_antiquant_scale=None,
        value_antiquant_offset=None,
        block_table=call.tables,
        query_padding_size=None,
        kv_padding_size=None,
        key_shared_prefix=None,
        value_shared_prefix=None,
        actual_shared_prefix_len=None,
        query_rope=call.query_rotary,
        key_rope=call.key_rotary,
        key_rope_antiquant_scale=None,
        num_heads=call.heads,
        scale=call.scale,
        pre_tokens=call.before,
        next_tokens=call.after,
        input_layout=call.layout,
        num_key_value_heads=call.kv_heads,
        sparse_mode=call.mode,
        inner_precise=0,
        block_size=call.page_size,
        antiquant_mode=0,
        key_antiquant_mode=0,
        value_antiquant_mode=0,
        softmax_lse_flag=with_sums,
    )
    return out, sums


def _second(fused: Any, call: AttentionCall, sinks: Tensor) -> Tensor:
    out, _ = fused.npu_fused_infer_attention_score_v2(
        query=call.query,
        key=call.key,
        value=call.value,
        query_rope=None,
        key_rope=None,
        pse_shift=None,
        atten_mask=call.mask,
        actual_seq_qlen=call.ends,
        actual_seq_kvlen=call.kv_lens,
        block_table=call.tables,
        dequant_scale_query=None,
        dequant_scale_key=None,
        dequant_offset_key=None,
        dequant_scale_value=None,
        dequant_offset_value=None,
        dequant_scale_key_rope=None,
        quant_scale_out=None,
        quant_offset_out=None,
        learnable_sink=sinks,
        num_query_heads=call.heads,
        num_key_value_heads=call.kv_heads,
        softmax_scale=call.scale,
        pre_tokens=call.before,
        next_tokens=call.after,
        input_layout=call.layout,
        sparse_mode=call.mode,
        block_size=call.page_size,
        query_quant_mode=0,
        key_quant_mode=0,
        value_quant_mode=0,
        inner_precise=0,
        return_softmax_lse=False,
        query_dtype=None,
        key_dtype=None,
        value_dtype=None,
        query_rope_dtype=None,
        key_rope_dtype=None,
        key_shared_prefix_dtype=None,
        value_shared_prefix_dtype=None,
        dequant_scale_query_dtype=None,
        dequant_scale_key_dtype=None,
        dequant_scale_value_dtype=None,
        dequant_scale_key_rope_dtype=None,
    )
    return out

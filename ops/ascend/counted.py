"""The costs of Ascend's ops beyond their specs: the tensors that each makes, with their shapes, types and lifetimes
on the NPU, and kernels where an op is not one.

tests/ascend/test_shapes.py compares the tensors with those of AscendOps. Workspaces inside torch_npu's operators are
not counted, nor what attention with sinks makes in float16. With the kernels of ops/ascend/vector_core, and with
`npu_qkv_rms_norm_rope_cache`, a step makes fewer temporaries than are counted here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from umbra.ops.ascend.vector_core.planes import MOST_ROWS
from umbra.ops.counted import CountedExchange, CountedOps, OpCosts
from umbra.ops.interface import (
    SILU_EXPERTS,
    Groups,
    Heads,
    LatentCache,
    LatentNorm,
    Paged,
    Recurrent,
    Rounded,
    RoundingNorm,
)
from umbra.ops.specs import SPECS, Work, in_int8

CHUNK, CHUNKS = 64, 64  # rows of a chunk of the gated delta rule, and chunks that are prepared at once
BY_ROW = 16, 16  # the same where rows of a state have decays of their own
ASSIST = 128  # numbers that npu_moe_distribute_dispatch_v2 keeps of each row
APART_WIDTH, MOST_JOINED = 128, 256  # of heads whose keys and values are made of latents (ops/ascend/latents.py)
# Kernels of a decode graph's ops, by the labels of their work, where they are not one. tests/ascend/test_eager.py holds
# them against the real wheels: a layer of attention and experts has 13.
KERNELS = {
    "linear by int8": 2,
    "moe": 5,
    "write_kv": 2,
    "split_rms_norm": 6,
    "add_gated": 2,
    "causal_conv": 9,
    "gated_delta_rule": 22,
    "gated_rms_norm": 3,
    "sigmoid_mul": 2,
    "rope_write_latents": 2,
    "expanded_attention": 8,
}
MOE_BY_INT8 = 4  # kernels of "moe" by int8


class AscendCosts(OpCosts):
    """`routing` is one of ops.ascend.moe.ROUTINGS."""

    def __init__(self, ops: CountedOps, routing: str = "fusion_v2"):
        super().__init__(ops)
        self.new, self.dtype, self.page_size, self.routing = ops.new, ops.dtype, ops.page_size, routing

    def kernels(self, work: Work) -> int:
        return MOE_BY_INT8 if work.label == "moe" and in_int8(work.bank) else KERNELS.get(work.label, 1)

    def few(self, bank: Any) -> bool:
        columns, kind = getattr(bank, "columns", 0), getattr(bank, "kind", SILU_EXPERTS)
        return bool(columns <= MOST_ROWS and kind == SILU_EXPERTS)

    def embedding(self, ids: Tensor, table: Any, first_id: int | None) -> Tensor:
        columns = table.shape[1] if isinstance(table, Tensor) else table.columns
        rows = self.new("rows", ids, len(ids), columns, dtype=self.dtype)
        return rows if first_id is None else self.new("masked rows", rows, *rows.shape)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        if x.dtype != torch.float32 and weight.data.dtype == torch.float32:
            x = self.new("input in float32", x, *x.shape, dtype=torch.float32)
        _rows = self._rounded(x) if in_int8(weight) else None
        return self.new("product", x, len(x), weight.rows)

    def head_linear(self, x: Tensor, weights: Any) -> Tensor:
        return self.new("products of heads", x, *x.shape[:2], weights.rows)

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.new("rows in int8", x, *x.shape, dtype=torch.int8)
        return rows, self.new("scales of rows", x, *x.shape[:-1], dtype=torch.float32)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        return self._moved(self._normalised(x), bias)

    def _moved(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return x
        return self.new("sum with the bias", x, *x.shape)

    def _normalised(self, x: Tensor) -> Tensor:
        out, _ = self.new("normalised", x, *x.shape), self.new("rstd", x, *x.shape[:-1], dtype=torch.float32)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        total = self.new("residual sum", x, *x.shape)
        return self._moved(self._normalised(x), bias), total

    def rounding_norm(self, reader: Any) -> RoundingNorm | None:
        return self._rounding_norm if in_int8(reader) else None

    def _rounding_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None
    ) -> tuple[Rounded, Tensor]:
        """Makes the tensors of the norm and of the rounding apart, as older versions do."""
        normed, total = self.ops.add_rms_norm(x, residual, weight, eps, bias)
        return Rounded(partial(self._linear_of_rounded, normed)), total

    def _linear_of_rounded(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        _rows = self._rounded(x)
        out = self.new("product", x, len(x), weight.rows)
        (work,) = SPECS["linear"].work(dict(x=x, weight=weight, out=out))
        self.ops.note(replace(work, label="linear of rounded rows"))
        return out

    def split_rms_norm(
        self,
        parts: Sequence[Tensor],
        weights: Sequence[Tensor],
        counts: Sequence[int],
        eps: float,
        total: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        normed = [self.new("normalised", x, *x.shape) for x in parts]
        rstds = [self.new("rstd", x, len(x), 1, dtype=torch.float32) for x in parts]
        rstd = self.new("rstd of all parts", rstds[0], len(parts) * len(parts[0]))
        factors = self._factors(rstd, total)
        _rows = self.new("row numbers", factors, len(parts[0]), dtype=torch.int32)
        return [self.new("multiplied rows", x, *x.shape) for x in normed]

    def _factors(self, rstd: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        means = total(self._means(rstd))
        roots = self.new("roots of means", means, *means.shape)
        del means
        factors = self.new("factors", roots, *roots.shape)
        del roots
        halves = self.dtype == torch.float16
        return self.new("factors", factors, *factors.shape, dtype=self.dtype) if halves else factors

    def _means(self, rstd: Tensor) -> Tensor:
        squares = self.new("mean squares", rstd, *rstd.shape)
        return self.new("parts of means", squares, *squares.shape)

    def rope(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, of_queries: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        if of_queries:
            return self.new("rotated queries", q, *q.shape), self.new("rotated keys", k, *k.shape)
        return self._copied(q), self._copied(k)

    def _copied(self, x: Tensor) -> Tensor:
        if x.is_contiguous():
            return x
        return self.new("copied heads", x, *x.shape)

    def norm_rope_write(
        self, qkv: Tensor, heads: Heads, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, out: Tensor | None
    ) -> Tensor:
        by_head = qkv.unflatten(1, (-1, len(heads.q_weight)))
        q, k, _ = by_head.split([by_head.shape[1] - 2 * heads.kv_heads, heads.kv_heads, heads.kv_heads], 1)
        q, k = self._normalised(q), self._normalised(k)
        return q

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        paged: Paged,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self.new("attention", q, *q.shape)

    def rope_write_latents(
        self, q: Tensor, rows: Tensor, norm: LatentNorm, cache: LatentCache, slot_mapping: Tensor
    ) -> Tensor:
        return self.new("rotated queries", q, *q.shape)

    def latent_attention(self, q: Tensor, q_rotary: Tensor, cache: LatentCache, paged: Paged, scale: float) -> Tensor:
        return self._latent_attention(q, q_rotary)

    def _latent_attention(self, q: Tensor, q_rotary: Tensor) -> Tensor:
        """The operator takes a power of two of heads, so further ones are added."""
        heads = q.shape[1]
        if more := (1 << (heads - 1).bit_length()) - heads:
            q, q_rotary = (self.new("padded heads", x, len(x), heads + more, x.shape[2]) for x in (q, q_rotary))
        return self.new("latent attention", q, *q.shape)[:, :heads]

    def expanded_attention(
        self, q: Tensor, q_rotary: Tensor, cache: LatentCache, keys: Any, values: Any, paged: Paged, scale: float
    ) -> Tensor:
        joined = q.shape[2] + q_rotary.shape[2]
        if q.shape[2] == values.rows == APART_WIDTH or joined == values.rows <= MOST_JOINED:
            return self._by_sequence(q, q_rotary, keys, values, paged)
        sums = self._latent_attention(self.new("products of heads", q, *q.shape[:2], keys.rows), q_rotary)
        return self.new("products of heads", sums, *q.shape[:2], values.rows)

    def _by_sequence(self, q: Tensor, q_rotary: Tensor, keys: Any, values: Any, paged: Paged) -> Tensor:
        starts, outs = paged.query_starts, []
        for first, end, length in zip(starts[:-1], starts[1:], paged.kv_lens, strict=True):
            rows, tokens = q[int(first) : int(end)], int(length)
            outs.append(self._of_sequence(rows, q_rotary.shape[2], keys.rows, values.rows, tokens))
        return outs[0] if len(outs) == 1 else self.new("expanded attention", q, *q.shape[:2], values.rows)

    def _of_sequence(self, q: Tensor, rotary: int, latent: int, value: int, tokens: int) -> Tensor:
        whole, (new, heads, key) = -(-tokens // self.page_size) * self.page_size, q.shape
        latents, turned = (self.new("gathered", q, whole, columns) for columns in (latent, rotary))
        keys = self.new("keys of heads", q, tokens, heads * key)
        values = self.new("values of heads", q, tokens, heads * value)
        if heads > 1:  # else they are no copies
            matrix = self.new("matrices of values", q, latent, heads * value)
            del matrix
        if key != value:
            q = self.new("joined queries", q, new, heads, value)
            keys = self.new("joined keys", q, tokens, heads, value)
        else:
            q = q if q.is_contiguous() else self.new("copied queries", q, *q.shape)
            turned = self.new("rotated keys of heads", q, tokens, heads, rotary) if heads > 1 else turned
        out = self.new("expanded attention", q, new, heads, value)
        del latents, turned, keys, values
        return out

    def silu_mul(self, x: Tensor) -> Tensor:
        return self._activated(x)

    def _activated(self, x: Tensor) -> Tensor:
        return self.new("silu(gate) * up", x, *x.shape[:-1], x.shape[-1] // 2)

    def gelu_mul(self, x: Tensor, up: Tensor | None = None) -> Tensor:
        gelu = self.new("gelu(gate)", x, *x.shape[:-1], x.shape[-1] // (2 if up is None else 1))
        return self.new("gelu(gate) * up", gelu, *gelu.shape)

    def add_gated(self, x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
        if gate is not None:
            _ = self.new("sigmoid of the gate", gate, *gate.shape)
        return x

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        _ = self.new("sigmoid of the gate", gate, *gate.shape)
        return x

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
        _ = self._normalised(x), self.new("silu of the gate", gate, *gate.shape)
        return self.new("gated", x, *x.shape)

    def causal_conv(self, x: Tensor, weight: Tensor, states: Tensor, recurrent: Recurrent) -> Tensor:
        rows = 3 * len(x) + 9 * len(recurrent.reads)  # with states before them, in steps of one row twice; convolved
        _ = self.new("rows in float32", x, rows, x.shape[1], dtype=torch.float32)
        return self.new("convolution", x, *x.shape)

    def gated_delta_rule(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        rates: Tensor,
        dt_bias: Tensor,
        states: Tensor,
        inputs: Tensor,
        recurrent: Recurrent,
        lowest: float = 0.0,
    ) -> Tensor:
        _, heads, depth, width = states.shape
        rows, sequences, keys = len(qkv), len(recurrent.reads), (qkv.shape[1] - heads * width) // 2
        by_row = a.shape[1] > heads
        parts = [
            ("queries, keys and values", rows, 3 * keys + heads * width + 2 * by_row * a.shape[1]),
            ("states", 2 * sequences, states[0].numel()),
        ]
        if rows > sequences:
            length, most = BY_ROW if by_row else (CHUNK, CHUNKS)
            chunks = min(-(-rows // length), most) * heads
            parts += [("chunks", 7 * chunks, length * width), ("products in chunks", 5 * chunks, length * length)]
            if by_row:
                parts.append(("columns of products in chunks", 2 * chunks, length * length * depth))
        _ = [self.new(f"{what} in float32", qkv, *shape, dtype=torch.float32) for what, *shape in parts]
        return self.new("delta rule", qkv, len(qkv), heads, width)

    def route_softmax(
        self,
        logits: Tensor,
        top_k: int,
        renormalise: bool,
        scale: float = 1.0,
        groups: Groups | None = None,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # `npu_moe_gating_top_k_softmax` makes less, as do plain ops in groups.
        weights, ids = self._gated(logits, top_k)
        if factors is None:
            return weights, ids
        own = self.new("factors of experts", factors, *ids.shape)
        return self._in_own_type(self.new("weights times factors", own, *ids.shape)), ids

    def route_sigmoid(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        renormalise: bool,
        scale: float = 1.0,
        groups: Groups | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not renormalise:
            return self._plain_gating(logits, bias, top_k, scale)
        return self._gated(logits, top_k)

    def _gated(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        shape = len(logits), top_k
        weights, ids = self.new("weights", logits, *shape), self.new("ids", logits, *shape, dtype=torch.int32)
        _ = self.new("unused scores", logits, *logits.shape, dtype=torch.float32)
        return self._in_own_type(weights), ids

    def _plain_gating(self, logits: Tensor, bias: Tensor | None, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
        scores = self.new("scores", logits, *logits.shape)
        biased = scores if bias is None else self.new("biased scores", scores, *scores.shape)
        top = self.new("largest scores", biased, len(logits), top_k)
        ids = self.new("ids", biased, len(logits), top_k, dtype=torch.int64)
        del biased, top
        weights = self.new("weights", scores, *ids.shape)
        if scale != 1:
            weights = self.new("scaled weights", weights, *ids.shape)
        weights = self._in_own_type(weights)
        return weights, self.new("ids", ids, *ids.shape, dtype=torch.int32)

    def _in_own_type(self, weights: Tensor) -> Tensor:
        if weights.dtype == self.dtype:
            return weights
        return self.new("weights in the model's type", weights, *weights.shape, dtype=self.dtype)

    def moe(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Any, first_expert: int | None) -> Tensor:
        if first_expert is not None:
            weights = self.new("weights of experts here", weights, *weights.shape)
            ids = self.new("ids of experts here", ids, *ids.shape)
        route = {"tp": self._tp, "fusion_v1": self._fusion_v1, "fusion_v2": self._fusion_v2}[self.routing]
        return route(x, ids, experts)

    def _tp(self, x: Tensor, ids: Tensor, experts: Any) -> Tensor:
        shape = *ids.shape, x.shape[1]
        order = self.new("order", ids, *ids.shape, dtype=torch.int64)
        numbers = self.new("expert numbers", ids, experts.count)
        _ = self.new("rows of each expert", numbers, experts.count, dtype=torch.int64)
        rows = self.products(self.new("rows in expert order", x, *shape), experts)
        back = self.new("order back", order, *order.shape)
        weighted = self.weighted(rows, back)
        return self.new("sums over experts", weighted, len(x), x.shape[1])

    def weighted(self, rows: Tensor, back: Tensor) -> Tensor:
        _ = self.new("rows in token order", rows, *rows.shape)
        return self.new("weighted rows", rows, *rows.shape)

    def _fusion_v1(self, x: Tensor, ids: Tensor, experts: Any) -> Tensor:
        _places = self.new("row index", ids, *ids.shape)
        rows = self.new("rows in expert order", x, *ids.shape, x.shape[1])
        _back, _ids = self.new("order back", ids, *ids.shape), self.new("sorted ids", ids, *ids.shape)
        _ends = self.new("ends of experts", ids, experts.count)
        wide = self.new("ends of experts", ids, experts.count, dtype=torch.int64)
        sums = self.products(rows, experts)
        del wide
        return self._finalized(x, sums)

    def _fusion_v2(self, x: Tensor, ids: Tensor, experts: Any) -> Tensor:
        dtype = torch.int8 if in_int8(experts) else x.dtype
        rows = self.new("rows in expert order", x, *ids.shape, x.shape[1], dtype=dtype)
        _back = self.new("order back", ids, *ids.shape)
        _counts = self.new("rows of each expert", ids, experts.count, dtype=torch.int64)
        _scales = self.new("scales of rows", ids, *ids.shape, dtype=torch.float32)
        return self._finalized(x, self.products(rows, experts))

    def _finalized(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.new("sums over experts", x, *x.shape)

    def products(self, rows: Tensor, experts: Any) -> Tensor:
        """Makes the tensors of the experts' products by rows (T, K, H)."""
        if in_int8(experts):
            if rows.dtype != torch.int8:
                rows, _scales = self._rounded(rows)
            return self._int8_products(rows, experts)
        gate_up = self.new("gate and up", rows, *rows.shape[:2], 2 * experts.inner)
        act = self.gelu_mul(gate_up) if experts.kind.gelu else self._activated(gate_up)
        del gate_up
        return self.new("down's result", act, *rows.shape)

    def _int8_products(self, rows: Tensor, experts: Any) -> Tensor:
        sums = self.new("gate and up", rows, *rows.shape[:2], 2 * experts.inner, dtype=torch.int32)  # or a workspace
        ends = self.routing == "fusion_v1"
        counts = self.new("rows of each expert", rows, experts.count, dtype=torch.int64) if ends else None
        act = self.new("silu(gate) * up", rows, *rows.shape[:2], experts.inner)
        _scales_of_act = self.new("scales of rows", act, *rows.shape[:2], dtype=torch.float32)
        del sums, counts
        return self.new("down's result", rows, *rows.shape, dtype=self.dtype)

    def exchange(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Any, exchange: CountedExchange) -> Tensor:
        here = exchange.size * len(x) * min(experts.count, ids.shape[1])
        sent = torch.int8 if in_int8(experts) else x.dtype
        rows = self.new("rows for experts here", x, here, 1, x.shape[1], dtype=sent)
        _scales = self.new("scales of rows", x, here, dtype=torch.float32)
        _assist = self.new("places of rows", ids, here * ASSIST)
        _counts = self.new("rows of each expert", ids, experts.count, dtype=torch.int64)
        _received = self.new("rows of each rank and expert", ids, exchange.size * experts.count)
        y = self.products(rows, experts)
        _weights = self.new("weights in float32", weights, *weights.shape, dtype=torch.float32)
        return self.new("sums over experts", y, *x.shape)

"""The ops of `ops.ascend.ops` without a device or torch_npu. Each makes its outputs and temporaries as tensors on meta,
with the shapes, types and lifetimes that they have on the NPU. So a model that runs on these ops shows how much memory
a step takes. `tests/ascend/test_shapes.py` compares the two. Workspaces inside torch_npu's operators are not counted.

With the kernels of ops/ascend/vector_core, and with `npu_qkv_rms_norm_rope_cache`, a step makes fewer temporaries than
are counted here.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ops import composed
from ops.ascend.layout import AscendLayout
from ops.ascend.weights import AscendExperts, AscendMatrix
from ops.interface import Lengths, Ops, Slots

ASSIST = 128  # numbers that npu_moe_distribute_dispatch_v2 keeps of each row


class AscendShapes(AscendLayout):
    def __init__(self, dtype: torch.dtype, routing: str, note: Callable[[Tensor, str], None]):
        """`routing` is one of ops.ascend.moe.ROUTINGS; `note(tensor, what)` is called for every tensor made."""
        super().__init__(dtype)
        self.routing, self.note = routing, note

    def made(self, what: str, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = like.new_empty(shape, dtype=dtype or like.dtype)
        self.note(tensor, what)
        return tensor

    def embedding(self, ids: Tensor, table: Tensor, first_id: int | None) -> Tensor:
        rows = self.made("rows", table, len(ids), table.shape[1])
        return rows if first_id is None else self.made("masked rows", rows, *rows.shape)

    def linear(self, x: Tensor, weight: AscendMatrix, bias: Tensor | None) -> Tensor:
        if weight.data.dtype == torch.float32 != x.dtype:
            x = self.made("input in float32", x, *x.shape, dtype=torch.float32)
        return self.made("product", x, len(x), weight.rows)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, _ = self.made("normalised", x, *x.shape), self.made("rstd", x, *x.shape[:-1], dtype=torch.float32)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = self.made("residual sum", x, *x.shape)
        return self.rms_norm(x, weight, eps), total

    def split_rms_norm(
        self,
        parts: Sequence[Tensor],
        weights: Sequence[Tensor],
        counts: Sequence[int],
        eps: float,
        total: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        normed = [self.made("normalised", x, *x.shape) for x in parts]
        rstds = [self.made("rstd", x, len(x), 1, dtype=torch.float32) for x in parts]
        rstd = self.made("rstd of all parts", rstds[0], len(parts) * len(parts[0]))
        factors = self._factors(rstd, total)
        _rows = self.made("row numbers", factors, len(parts[0]), dtype=torch.int32)
        return [self.made("multiplied rows", x, *x.shape) for x in normed]

    def _factors(self, rstd: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        means = total(self._means(rstd))
        roots = self.made("roots of means", means, *means.shape)
        del means
        factors = self.made("factors", roots, *roots.shape)
        del roots
        halves = self.dtype == torch.float16
        return self.made("factors", factors, *factors.shape, dtype=self.dtype) if halves else factors

    def _means(self, rstd: Tensor) -> Tensor:
        squares = self.made("mean squares", rstd, *rstd.shape)
        return self.made("parts of means", squares, *squares.shape)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q, k  # rotated in place

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, places: Tensor) -> None:
        pass  # views of k and v are written

    def norm_rope_write(
        self,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        kv_heads: int,
        k_cache: Tensor,
        v_cache: Tensor,
        places: Tensor,
        out: Tensor | None,
    ) -> Tensor:
        own = cast(Ops, self)
        return composed.norm_rope_write(own, qkv, q_weight, k_weight, eps, cos, sin, kv_heads, k_cache, v_cache, places)

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_starts: Lengths,
        kv_lens: Lengths,
        scale: float,
    ) -> Tensor:
        return self.made("attention", q, *q.shape)

    def silu_mul(self, x: Tensor) -> Tensor:
        return self.made("silu(gate) * up", x, *x.shape[:-1], x.shape[-1] // 2)

    def route_softmax(self, logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        return self._gated(logits, top_k)  # `npu_moe_gating_top_k_softmax` makes less

    def route_sigmoid(
        self, logits: Tensor, bias: Tensor | None, top_k: int, renormalise: bool
    ) -> tuple[Tensor, Tensor]:
        if not renormalise:
            return self._plain_gating(logits, bias, top_k)
        weights, ids = self._gated(logits, top_k)
        return self._in_own_type(weights), ids

    def _gated(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        shape = len(logits), top_k
        weights, ids = self.made("weights", logits, *shape), self.made("ids", logits, *shape, dtype=torch.int32)
        _ = self.made("unused scores", logits, *logits.shape, dtype=torch.float32)
        return weights, ids

    def _plain_gating(self, logits: Tensor, bias: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        scores = self.made("scores", logits, *logits.shape)
        biased = scores if bias is None else self.made("biased scores", scores, *scores.shape)
        top = self.made("largest scores", biased, len(logits), top_k)
        ids = self.made("ids", biased, len(logits), top_k, dtype=torch.int64)
        del biased, top
        weights = self._in_own_type(self.made("weights", scores, *ids.shape))
        return weights, self.made("ids", ids, *ids.shape, dtype=torch.int32)

    def _in_own_type(self, weights: Tensor) -> Tensor:
        if weights.dtype == self.dtype:
            return weights
        return self.made("weights in the model's type", weights, *weights.shape, dtype=self.dtype)

    def argmax(self, x: Tensor) -> Tensor:
        return self.made("argmax", x, len(x), dtype=torch.int64)

    def moe(self, x: Tensor, weights: Tensor, ids: Tensor, experts: AscendExperts, first_expert: int | None) -> Tensor:
        if first_expert is not None:
            weights = self.made("weights of experts here", weights, *weights.shape)
            ids = self.made("ids of experts here", ids, *ids.shape)
        route = {"tp": self._tp, "fusion_v1": self._fusion_v1, "fusion_v2": self._fusion_v2}[self.routing]
        return route(x, weights, ids, experts)

    def _tp(self, x: Tensor, weights: Tensor, ids: Tensor, experts: AscendExperts) -> Tensor:
        shape = *ids.shape, x.shape[1]
        order = self.made("order", ids, *ids.shape, dtype=torch.int64)
        each = self.made("expert numbers", ids, experts.count)
        _ = self.made("rows of each expert", each, experts.count, dtype=torch.int64)
        rows = self.products(self.made("rows in expert order", x, *shape), experts)
        back = self.made("order back", order, *order.shape)
        weighted = self._weighted(rows, back)
        return self.made("sums over experts", weighted, len(x), x.shape[1])

    def _weighted(self, rows: Tensor, back: Tensor) -> Tensor:
        _ = self.made("rows in token order", rows, *rows.shape)
        return self.made("weighted rows", rows, *rows.shape)

    def _fusion_v1(self, x: Tensor, weights: Tensor, ids: Tensor, experts: AscendExperts) -> Tensor:
        _places = self.made("row index", ids, *ids.shape)
        rows = self.made("rows in expert order", x, *ids.shape, x.shape[1])
        _back, _ids = self.made("order back", ids, *ids.shape), self.made("sorted ids", ids, *ids.shape)
        _ends = self.made("ends of experts", ids, experts.count)
        wide = self.made("ends of experts", ids, experts.count, dtype=torch.int64)
        sums = self.products(rows, experts)
        del wide
        return self._finalized(x, sums)

    def _fusion_v2(self, x: Tensor, weights: Tensor, ids: Tensor, experts: AscendExperts) -> Tensor:
        rows = self.made("rows in expert order", x, *ids.shape, x.shape[1])
        _back = self.made("order back", ids, *ids.shape)
        _counts = self.made("rows of each expert", ids, experts.count, dtype=torch.int64)
        _scales = self.made("unused scales", ids, *ids.shape, dtype=torch.float32)
        return self._finalized(x, self.products(rows, experts))

    def _finalized(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.made("sums over experts", x, *x.shape)

    def products(self, rows: Tensor, experts: AscendExperts) -> Tensor:
        """rows (T, K, H)"""
        gate_up = self.made("gate and up", rows, *rows.shape[:2], 2 * experts.inner)
        act = self.silu_mul(gate_up)
        del gate_up
        return self.made("down's result", act, *rows.shape)


class ExchangeShapes:
    """AscendExchange over `size` ranks, in the same way."""

    uneven = False

    def __init__(self, ops: AscendShapes, size: int, most_rows: int):
        self.ops, self.size, self.most_rows = ops, size, most_rows

    def takes(self, rows: int, experts: AscendExperts) -> bool:
        return 0 < rows <= self.most_rows

    def mixture(
        self, x: Tensor, weights: Tensor, ids: Tensor, experts: AscendExperts, slots: Slots | None = None
    ) -> Tensor:
        made, here = self.ops.made, self.size * len(x) * min(experts.count, ids.shape[1])
        _slots = made("slots of experts", ids, *ids.shape) if slots else None
        rows = made("rows for experts here", x, here, 1, x.shape[1])
        _scales = made("unused scales", x, here, dtype=torch.float32)
        _assist = made("places of rows", ids, here * ASSIST)
        _counts = made("rows of each expert", ids, experts.count, dtype=torch.int64)
        _received = made("rows of each rank and expert", ids, self.size * experts.count)
        del _scales
        y = self.ops.products(rows, experts)
        _weights = made("weights in float32", weights, *weights.shape, dtype=torch.float32)
        return made("sums over experts", y, *x.shape)

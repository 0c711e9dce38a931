"""The ops without a device: a model that runs on them, on PyTorch's meta device, shows what a step takes.

*Memory*, as the Ascend ops use it. Each op makes its outputs and temporaries as tensors on meta, with the shapes, types
and lifetimes that they have on the NPU; `tests/ascend/test_shapes.py` compares the two. Workspaces inside torch_npu's
operators are not counted, nor what attention with sinks makes in float16. With the kernels of ops/ascend/vector_core,
and with `npu_qkv_rms_norm_rope_cache`, a step makes fewer temporaries than are counted here.

*Work*, on any platform: kernels, bytes and products of each op, as `Notes` has them.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from umbra.ops.interface import (
    SILU_EXPERTS,
    Groups,
    Heads,
    LatentCache,
    LatentNorm,
    Paged,
    PhysicalExperts,
    Recurrent,
    Rounded,
    RoundingNorm,
)

CHUNK, CHUNKS = 64, 64  # rows of a chunk of the gated delta rule, and chunks that are prepared at once
ASSIST = 128  # numbers that npu_moe_distribute_dispatch_v2 keeps of each row
# Kernels of Ascend's ops in a decode graph, where they are not one. tests/ascend/test_eager.py holds them against the
# real wheels: a layer of attention and experts has 13. On the CPU an op is one native call.
ASCEND_KERNELS = {
    "linear by int8": 2,
    "moe by int8": 4,
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
BY_INT8 = " by int8"  # of the name of an op
APART_WIDTH, MOST_JOINED = 128, 256  # of heads whose keys and values are made of latents (ops/ascend/latents.py)
EXCHANGED = 6  # kernels of a mixture whose rows are exchanged: dispatch, the experts' three (two by int8), a cast,
# combine
AMONG_PHYSICAL = 2  # more of them where experts are copied among physical ones: a look-up and a count


@dataclass(frozen=True)
class Done:
    """The work of one op of a step on a rank, done `times` times in a step."""

    name: str
    times: int
    kernels: int
    weights: float = 0.0  # bytes of weights that it reads
    cached: float = 0.0  # bytes of cached keys and values that it reads, or of states that it reads and writes
    rows: float = 0.0  # bytes of activations that it reads and writes
    macs: float = 0.0  # multiply-adds
    mixture: bool = False  # whether the weights are those of experts
    plain: bool = True  # whether products multiply by the weights as they are: floats, or int8
    few: bool = True  # whether Ascend's kernels for few rows by 4-bit weights compute it


@dataclass(frozen=True)
class Message:
    """A collective of a step, `times` times in a step."""

    kind: str  # all_reduce, all_gather, reduce_scatter, dispatch or combine
    group: str  # name of the rank group
    ranks: int
    nbytes: int  # of this rank's input
    times: int


class Notes:
    """The work that a step asked its ops for, each `multiple` times."""

    def __init__(self) -> None:
        self.done: list[Done] = []
        self.messages: list[Message] = []
        self.multiple = 1


def in_int8(weights: Any) -> bool:
    """Returns whether products multiply by these matrices as they are, in int8, which rounds their rows too."""
    return any(t.dtype == torch.int8 for t in weights.storages)


def plain(weights: Any) -> bool:
    """Returns whether products multiply by these matrices as they are: floats, or int8."""
    return in_int8(weights) or all(t.is_floating_point() for t in weights.storages)


class CountedOps:
    """`layout` stores weights and caches, of pages of `page_size` tokens, as the platform does; activations are of
    `dtype`. `experts` is the number of a layer's experts on all ranks, with copies."""

    def __init__(
        self,
        layout: Any,
        dtype: torch.dtype,
        page_size: int,
        experts: int,
        *,
        routing: str = "fusion_v2",
        kernels: Mapping[str, int] | None = None,
        name: Callable[[Tensor, str], object] | None = None,
        most_columns: int = sys.maxsize,
    ):
        """`routing` is one of ops.ascend.moe.ROUTINGS; `kernels` are those of ops that are not one; `name(tensor,
        what)` is called for every tensor made; kernels for few rows take matrices of `most_columns` at most."""
        self.most_columns = most_columns
        self.layout, self.dtype, self.page_size, self.experts = layout, dtype, page_size, experts
        self.routing, self.kernels, self.name, self.notes = routing, kernels or {}, name, Notes()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layout, name)

    def made(self, what: str, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = like.new_empty(shape, dtype=dtype or like.dtype)
        if self.name:
            self.name(tensor, what)
        return tensor

    def note(
        self,
        name: str,
        *rows: Tensor,
        weights: float = 0.0,
        cached: float = 0.0,
        macs: float = 0.0,
        plain: bool = True,
        few: bool = True,
    ) -> None:
        nbytes, times = float(sum(t.numel() for t in rows) * self.dtype.itemsize), self.notes.multiple
        kernels = self.kernels.get(name, 1)
        self.notes.done.append(Done(name, times, kernels, weights, cached, nbytes, macs, plain=plain, few=few))

    def embedding(self, ids: Tensor, table: Any, first_id: int | None) -> Tensor:
        columns = table.shape[1] if isinstance(table, Tensor) else table.columns
        rows = self.made("rows", ids, len(ids), columns, dtype=self.dtype)
        self.note("embedding", rows, rows)
        return rows if first_id is None else self.made("masked rows", rows, *rows.shape)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        if x.dtype != torch.float32 and weight.data.dtype == torch.float32:
            x = self.made("input in float32", x, *x.shape, dtype=torch.float32)
        int8 = in_int8(weight)
        _rows = self._rounded(x) if int8 else None
        return self._product("linear" + BY_INT8 * int8, x, weight)

    def head_linear(self, x: Tensor, weights: Any) -> Tensor:
        out = self.made("products of heads", x, *x.shape[:2], weights.rows)
        size = sum(t.nbytes for t in weights.storages)
        macs = x.numel() * weights.rows
        self.note("head_linear", x, out, weights=size, macs=macs, plain=plain(weights))
        return out

    def _product(self, name: str, x: Tensor, weight: Any) -> Tensor:
        out = self.made("product", x, len(x), weight.rows)
        size, macs = sum(t.nbytes for t in weight.storages), len(x) * weight.rows * weight.columns
        few = weight.columns <= self.most_columns
        self.note(name, x, out, weights=size, macs=macs, plain=plain(weight), few=few)
        return out

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.made("rows in int8", x, *x.shape, dtype=torch.int8)
        return rows, self.made("scales of rows", x, *x.shape[:-1], dtype=torch.float32)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        self.note("rms_norm", x, x)
        return self._moved(self._normalised(x), bias)

    def _moved(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return x
        self.note("add", x, x)
        return self.made("sum with the bias", x, *x.shape)

    def _normalised(self, x: Tensor) -> Tensor:
        out, _ = self.made("normalised", x, *x.shape), self.made("rstd", x, *x.shape[:-1], dtype=torch.float32)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.note("add_rms_norm", x, x, x, x)
        total = self.made("residual sum", x, *x.shape)
        return self._moved(self._normalised(x), bias), total

    def rounding_norm(self, reader: Any) -> RoundingNorm | None:
        return self._rounding_norm if in_int8(reader) else None

    def _rounding_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None
    ) -> tuple[Rounded, Tensor]:
        """Makes the tensors of the norm and of the rounding apart, as older versions do."""
        normed, total = self.add_rms_norm(x, residual, weight, eps, bias)

        def linear(weight: Any, bias: Tensor | None) -> Tensor:
            _rows = self._rounded(normed)
            return self._product("linear of rounded rows", normed, weight)

        return Rounded(linear), total

    def split_rms_norm(
        self,
        parts: Sequence[Tensor],
        weights: Sequence[Tensor],
        counts: Sequence[int],
        eps: float,
        total: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        self.note("split_rms_norm", *parts, *parts)
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
        self.note("rope", q, q, k, k)  # rotated in place, or in a copy of columns of a wider product
        return self._copied(q), self._copied(k)

    def _copied(self, x: Tensor) -> Tensor:
        if x.is_contiguous():
            return x
        self.note("copy", x, x)
        return self.made("copied heads", x, *x.shape)

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        self.note("write_kv", k, k, v, v)  # views of k and v are written

    def norm_rope_write(
        self, qkv: Tensor, heads: Heads, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, out: Tensor | None
    ) -> Tensor:
        self.note("norm_rope_write", qkv, qkv)
        each = qkv.unflatten(1, (-1, len(heads.q_weight)))
        q, k, _ = each.split([each.shape[1] - 2 * heads.kv_heads, heads.kv_heads, heads.kv_heads], 1)
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
        token = (k_cache.nbytes + v_cache.nbytes) / (len(k_cache) * self.page_size)  # bytes of a cached token
        read, pairs = self._seen(paged, window)
        self.note("attention", q, q, cached=token * read, macs=2 * pairs * q.shape[1] * q.shape[2])
        return self.made("attention", q, *q.shape)

    def _seen(self, paged: Paged, window: int | None) -> tuple[float, float]:
        """The tokens that attention reads, and the pairs of a new token and one that it sees."""
        starts, lens = paged.query_starts, paged.kv_lens
        pairs = read = 0.0
        for first, end, length in zip(starts[:-1], starts[1:], lens, strict=True):
            new, all_seen = int(end) - int(first), int(length)
            read += min(all_seen, new - 1 + (window or all_seen))
            whole = new if window is None else max(0, min(new, window - (all_seen - new)))  # that see all before them
            pairs += whole * (all_seen - new) + whole * (whole + 1) / 2 + (new - whole) * (window or 0)
        return read, pairs

    def rope_write_latents(
        self, q: Tensor, rows: Tensor, norm: LatentNorm, cache: LatentCache, slot_mapping: Tensor
    ) -> Tensor:
        self.note("rope_write_latents", q, q, rows, rows)
        return self.made("rotated queries", q, *q.shape)

    def _token(self, cache: LatentCache) -> float:
        """The bytes of a cached token."""
        return sum(part.nbytes / (len(part) * self.page_size) for part in cache)

    def latent_attention(self, q: Tensor, q_rotary: Tensor, cache: LatentCache, paged: Paged, scale: float) -> Tensor:
        read, pairs = self._seen(paged, None)
        token, columns = self._token(cache), 2 * q.shape[2] + q_rotary.shape[2]
        self.note("latent_attention", q, q_rotary, q, cached=token * read, macs=pairs * q.shape[1] * columns)
        return self._latent_attention(q, q_rotary)

    def _latent_attention(self, q: Tensor, q_rotary: Tensor) -> Tensor:
        """Counts attention over latents. Heads are padded to a power of two."""
        heads = q.shape[1]
        if more := (1 << (heads - 1).bit_length()) - heads:
            q, q_rotary = (self.made("padded heads", x, len(x), heads + more, x.shape[2]) for x in (q, q_rotary))
        return self.made("latent attention", q, *q.shape)[:, :heads]

    def expanded_attention(
        self, q: Tensor, q_rotary: Tensor, cache: LatentCache, keys: Any, values: Any, paged: Paged, scale: float
    ) -> Tensor:
        """Keys and values are made once of each token that is read."""
        read, pairs = self._seen(paged, None)
        token = self._token(cache)
        columns, own = q.shape[2] + q_rotary.shape[2] + values.rows, q.shape[2] + values.rows
        weights = sum(t.nbytes for bank in (keys, values) for t in bank.storages)
        macs = q.shape[1] * (pairs * columns + read * own * keys.rows)
        joined = q.shape[2] + q_rotary.shape[2]
        if q.shape[2] == values.rows == APART_WIDTH or joined == values.rows <= MOST_JOINED:
            out = self._expanded_attention(q, q_rotary, keys, values, paged)
        else:
            sums = self._latent_attention(self.made("products of heads", q, *q.shape[:2], keys.rows), q_rotary)
            out = self.made("products of heads", sums, *q.shape[:2], values.rows)
        self.note("expanded_attention", q, q_rotary, out, weights=weights, cached=token * read, macs=macs)
        return out

    def _expanded_attention(self, q: Tensor, q_rotary: Tensor, keys: Any, values: Any, paged: Paged) -> Tensor:
        """Sequence by sequence."""
        starts, found = paged.query_starts, []
        for first, end, length in zip(starts[:-1], starts[1:], paged.kv_lens, strict=True):
            rows, tokens = q[int(first) : int(end)], int(length)
            found.append(self._of_sequence(rows, q_rotary.shape[2], keys.rows, values.rows, tokens))
        return found[0] if len(found) == 1 else self.made("expanded attention", q, *q.shape[:2], values.rows)

    def _of_sequence(self, q: Tensor, rotary: int, latent: int, value: int, tokens: int) -> Tensor:
        whole, (new, heads, key) = -(-tokens // self.page_size) * self.page_size, q.shape
        latents, turned = (self.made("gathered", q, whole, columns) for columns in (latent, rotary))
        keys = self.made("keys of heads", q, tokens, heads * key)
        values = self.made("values of heads", q, tokens, heads * value)
        if heads > 1:  # else they are no copies
            matrix = self.made("matrices of values", q, latent, heads * value)
            del matrix
        if key != value:
            q = self.made("joined queries", q, new, heads, value)
            keys = self.made("joined keys", q, tokens, heads, value)
        else:
            q = q if q.is_contiguous() else self.made("copied queries", q, *q.shape)
            turned = self.made("rotated keys of heads", q, tokens, heads, rotary) if heads > 1 else turned
        out = self.made("expanded attention", q, new, heads, value)
        del latents, turned, keys, values
        return out

    def silu_mul(self, x: Tensor) -> Tensor:
        out = self._activated(x)
        self.note("silu_mul", x, out)
        return out

    def _activated(self, x: Tensor) -> Tensor:
        return self.made("silu(gate) * up", x, *x.shape[:-1], x.shape[-1] // 2)

    def add_gated(self, x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
        self.note("add" if gate is None else "add_gated", x, x, y)
        if gate is not None:
            _ = self.made("sigmoid of the gate", gate, *gate.shape)
        return x

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        self.note("sigmoid_mul", x, x, gate)
        _ = self.made("sigmoid of the gate", gate, *gate.shape)
        return x

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.note("gated_rms_norm", x, gate, x)
        _ = self._normalised(x), self.made("silu of the gate", gate, *gate.shape)
        return self.made("gated", x, *x.shape)

    def causal_conv(self, x: Tensor, weight: Tensor, states: Tensor, recurrent: Recurrent) -> Tensor:
        rows = 3 * len(x) + 9 * len(recurrent.reads)  # with states before them, in steps of one row twice; convolved
        _ = self.made("rows in float32", x, rows, x.shape[1], dtype=torch.float32)
        out = self.made("convolution", x, *x.shape)
        size = 2 * len(recurrent.reads) * states[0].nbytes  # read and written
        self.note("causal_conv", x, out, cached=size, macs=weight.numel() * len(x))
        return out

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
    ) -> Tensor:
        _, heads, depth, width = states.shape
        rows, sequences, keys = len(qkv), len(recurrent.reads), (qkv.shape[1] - heads * width) // 2
        parts = [
            ("queries, keys and values", rows, 3 * keys + heads * width),
            ("states", 2 * sequences, states[0].numel()),
        ]
        if rows > sequences:
            chunks = min(-(-rows // CHUNK), CHUNKS) * heads
            parts += [("chunks", 7 * chunks, CHUNK * width), ("products in chunks", 5 * chunks, CHUNK * CHUNK)]
        _ = [self.made(f"{what} in float32", qkv, *shape, dtype=torch.float32) for what, *shape in parts]
        out = self.made("delta rule", qkv, len(qkv), heads, width)
        size, pairs = 2 * len(recurrent.reads) * states[0].nbytes, len(qkv) * heads * depth * width
        self.note("gated_delta_rule", qkv, a, b, out, cached=size, macs=4 * pairs)
        return out

    def route_softmax(
        self, logits: Tensor, top_k: int, renormalise: bool, scale: float = 1.0, groups: Groups | None = None
    ) -> tuple[Tensor, Tensor]:
        self.note("route", logits)
        return self._gated(logits, top_k)  # `npu_moe_gating_top_k_softmax` makes less, as plain ops do in groups

    def route_sigmoid(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        renormalise: bool,
        scale: float = 1.0,
        groups: Groups | None = None,
    ) -> tuple[Tensor, Tensor]:
        self.note("route", logits)
        if not renormalise:
            return self._plain_gating(logits, bias, top_k, scale)
        return self._gated(logits, top_k)

    def _gated(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        shape = len(logits), top_k
        weights, ids = self.made("weights", logits, *shape), self.made("ids", logits, *shape, dtype=torch.int32)
        _ = self.made("unused scores", logits, *logits.shape, dtype=torch.float32)
        return self._in_own_type(weights), ids

    def _plain_gating(self, logits: Tensor, bias: Tensor | None, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
        scores = self.made("scores", logits, *logits.shape)
        biased = scores if bias is None else self.made("biased scores", scores, *scores.shape)
        top = self.made("largest scores", biased, len(logits), top_k)
        ids = self.made("ids", biased, len(logits), top_k, dtype=torch.int64)
        del biased, top
        weights = self.made("weights", scores, *ids.shape)
        if scale != 1:
            weights = self.made("scaled weights", weights, *ids.shape)
        weights = self._in_own_type(weights)
        return weights, self.made("ids", ids, *ids.shape, dtype=torch.int32)

    def _in_own_type(self, weights: Tensor) -> Tensor:
        if weights.dtype == self.dtype:
            return weights
        return self.made("weights in the model's type", weights, *weights.shape, dtype=self.dtype)

    def argmax(self, x: Tensor) -> Tensor:
        return self.made("argmax", x, len(x), dtype=torch.int64)

    def moe(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Any, first_expert: int | None) -> Tensor:
        kernels = self.kernels.get("moe" + BY_INT8 * in_int8(experts), 1)
        self.note_mixture("moe", len(x), x.shape[1], ids.shape[1], experts, kernels)
        if first_expert is not None:
            weights = self.made("weights of experts here", weights, *weights.shape)
            ids = self.made("ids of experts here", ids, *ids.shape)
        route = {"tp": self._tp, "fusion_v1": self._fusion_v1, "fusion_v2": self._fusion_v2}[self.routing]
        return route(x, ids, experts)

    def note_mixture(self, name: str, tokens: int, width: int, top_k: int, experts: Any, kernels: int) -> None:
        """Notes the mixtures of `tokens` tokens, whose experts are spread evenly over all ranks."""
        share = 1 - (1 - top_k / self.experts) ** tokens  # of the experts, that the tokens use
        pairs = tokens * top_k * experts.count / self.experts
        rows = self.dtype.itemsize * pairs * (4 * width + 4 * experts.inner)  # sorted, gate and up, product, result
        weights, macs = share * sum(t.nbytes for t in experts.storages), 3 * pairs * experts.inner * width
        few = experts.kind == SILU_EXPERTS
        done = Done(name, self.notes.multiple, kernels, weights, 0.0, rows, macs, True, plain(experts), few)
        self.notes.done.append(done)

    def _tp(self, x: Tensor, ids: Tensor, experts: Any) -> Tensor:
        shape = *ids.shape, x.shape[1]
        order = self.made("order", ids, *ids.shape, dtype=torch.int64)
        each = self.made("expert numbers", ids, experts.count)
        _ = self.made("rows of each expert", each, experts.count, dtype=torch.int64)
        rows = self.products(self.made("rows in expert order", x, *shape), experts)
        back = self.made("order back", order, *order.shape)
        weighted = self.weighted(rows, back)
        return self.made("sums over experts", weighted, len(x), x.shape[1])

    def weighted(self, rows: Tensor, back: Tensor) -> Tensor:
        _ = self.made("rows in token order", rows, *rows.shape)
        return self.made("weighted rows", rows, *rows.shape)

    def _fusion_v1(self, x: Tensor, ids: Tensor, experts: Any) -> Tensor:
        _places = self.made("row index", ids, *ids.shape)
        rows = self.made("rows in expert order", x, *ids.shape, x.shape[1])
        _back, _ids = self.made("order back", ids, *ids.shape), self.made("sorted ids", ids, *ids.shape)
        _ends = self.made("ends of experts", ids, experts.count)
        wide = self.made("ends of experts", ids, experts.count, dtype=torch.int64)
        sums = self.products(rows, experts)
        del wide
        return self._finalized(x, sums)

    def _fusion_v2(self, x: Tensor, ids: Tensor, experts: Any) -> Tensor:
        dtype = torch.int8 if in_int8(experts) else x.dtype
        rows = self.made("rows in expert order", x, *ids.shape, x.shape[1], dtype=dtype)
        _back = self.made("order back", ids, *ids.shape)
        _counts = self.made("rows of each expert", ids, experts.count, dtype=torch.int64)
        _scales = self.made("scales of rows", ids, *ids.shape, dtype=torch.float32)
        return self._finalized(x, self.products(rows, experts))

    def _finalized(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.made("sums over experts", x, *x.shape)

    def products(self, rows: Tensor, experts: Any) -> Tensor:
        """rows (T, K, H)"""
        if in_int8(experts):
            if rows.dtype != torch.int8:
                rows, _scales = self._rounded(rows)
            return self._int8_products(rows, experts)
        gate_up = self.made("gate and up", rows, *rows.shape[:2], 2 * experts.inner)
        act = self._activated(gate_up)
        del gate_up
        return self.made("down's result", act, *rows.shape)

    def _int8_products(self, rows: Tensor, experts: Any) -> Tensor:
        sums = self.made("gate and up", rows, *rows.shape[:2], 2 * experts.inner, dtype=torch.int32)  # or a workspace
        ends = self.routing == "fusion_v1"
        counts = self.made("rows of each expert", rows, experts.count, dtype=torch.int64) if ends else None
        act = self.made("silu(gate) * up", rows, *rows.shape[:2], experts.inner)
        _scales_of_act = self.made("scales of rows", act, *rows.shape[:2], dtype=torch.float32)
        del sums, counts
        return self.made("down's result", rows, *rows.shape, dtype=self.dtype)


class CountedExchange:
    """AscendExchange over `size` ranks, in the same way: steps of at most `most_rows` rows."""

    uneven = False

    def __init__(self, ops: CountedOps, size: int, most_rows: int):
        self.ops, self.size, self.most_rows = ops, size, most_rows

    def takes(self, rows: int, experts: object) -> bool:
        return 0 < rows <= self.most_rows

    def mixture(
        self, x: Tensor, weights: Tensor, ids: Tensor, experts: Any, physical: PhysicalExperts | None = None
    ) -> Tensor:
        made, notes, top_k = self.ops.made, self.ops.notes, ids.shape[1]
        sent = torch.int8 if in_int8(experts) else x.dtype
        for kind, dtype in (("dispatch", sent), ("combine", x.dtype)):
            nbytes = top_k * x.numel() * dtype.itemsize
            notes.messages.append(Message(kind, "world", self.size, nbytes, notes.multiple))
        kernels = EXCHANGED + (AMONG_PHYSICAL if physical else 0) - in_int8(experts)
        self.ops.note_mixture("exchanged moe", self.size * len(x), x.shape[1], top_k, experts, kernels)
        here = self.size * len(x) * min(experts.count, top_k)
        _physical = made("physical experts", ids, *ids.shape) if physical else None
        rows = made("rows for experts here", x, here, 1, x.shape[1], dtype=sent)
        _scales = made("scales of rows", x, here, dtype=torch.float32)
        _assist = made("places of rows", ids, here * ASSIST)
        _counts = made("rows of each expert", ids, experts.count, dtype=torch.int64)
        _received = made("rows of each rank and expert", ids, self.size * experts.count)
        y = self.ops.products(rows, experts)
        _weights = made("weights in float32", weights, *weights.shape, dtype=torch.float32)
        return made("sums over experts", y, *x.shape)

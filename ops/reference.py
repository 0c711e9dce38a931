"""The meaning of each op of interface.py: plain PyTorch that computes in float32 and returns the input's type."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from umbra.ops import ngrams, recurrent, sampling, selected, streams
from umbra.ops.formats import Format
from umbra.ops.formats.quantised import Quantised, floats
from umbra.ops.interface import (
    SILU_EXPERTS,
    ExpertKind,
    Groups,
    Heads,
    LatentCache,
    LatentNorm,
    Matrix,
    Numbers,
    Paged,
    tensor_of,
)


class DenseMatrix:
    """A matrix as one tensor (rows, columns)."""

    def __init__(self, rows: int, columns: int, format: Format, device: torch.device):
        self.rows, self.columns = rows, columns
        self.data = torch.empty(
            rows, columns, dtype=getattr(torch, format.kind), device=device
        )  # no quantised formats here
        self.nbytes = self.data.nbytes
        self.storages = [self.data]

    def fill(self, row: int, part: Tensor | Quantised) -> None:
        wide = floats(part)
        self.data[row : row + len(wide)] = wide


class DenseExperts:
    """w13 (count, 2 inner, hidden) stacks gate and up, w2 (count, hidden, inner) is down. b13 and b2 are their biases,
    zeros if the kind has none."""

    def __init__(
        self, count: int, inner: int, hidden: int, format: Format, device: torch.device, kind: ExpertKind = SILU_EXPERTS
    ):
        self.count, self.kind = count, kind
        dtype: torch.dtype = getattr(torch, format.kind)
        self.w13 = torch.empty(count, 2 * inner, hidden, dtype=dtype, device=device)
        self.w2 = torch.empty(count, hidden, inner, dtype=dtype, device=device)
        self.b13, self.b2 = (torch.zeros(w.shape[:2], device=device) for w in (self.w13, self.w2))
        self.storages = [self.w13, self.w2, *([self.b13, self.b2] if kind.biased else [])]
        self.nbytes = sum(storage.nbytes for storage in self.storages)

    def fill(self, expert: int, which: str, part: Tensor | Quantised) -> None:
        gate, up = self.w13[expert].chunk(2)
        {"gate": gate, "up": up, "down": self.w2[expert]}[which].copy_(floats(part))

    def fill_bias(self, expert: int, which: str, part: Tensor) -> None:
        gate, up = self.b13[expert].chunk(2)
        {"gate": gate, "up": up, "down": self.b2[expert]}[which].copy_(part)

    def stored(self, experts: Sequence[int]) -> Tensor:
        return torch.cat([w[experts].flatten(1).view(torch.uint8) for w in self.storages], 1)

    def restore(self, experts: Sequence[int], stored: Tensor) -> None:
        sizes = [w[0].nbytes for w in self.storages]
        for to, part in zip(self.storages, stored.split(sizes, 1), strict=True):
            to[experts] = part.contiguous().view(to.dtype).view(-1, *to.shape[1:])


class DenseHeads:
    """The matrices of all heads as one tensor (count, rows, columns)."""

    def __init__(self, count: int, rows: int, columns: int, format: Format, device: torch.device):
        self.data = torch.empty(count, rows, columns, dtype=getattr(torch, format.kind), device=device)
        self.nbytes, self.storages = self.data.nbytes, [self.data]

    def fill(self, head: int, part: Tensor) -> None:
        self.data[head] = part


matrix, head_matrices = DenseMatrix, DenseHeads
latent_parts, keys_in_pairs, heads_in_q8, selects = 1, False, False, True


def stack(parts: Sequence[tuple[int, Format]], columns: int, device: torch.device) -> DenseMatrix:
    return DenseMatrix(sum(rows for rows, _ in parts), columns, parts[0][1], device)


expert_matrices = DenseExperts


def table(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device=device)


def fill_table(table: Tensor, part: Tensor | Quantised) -> None:
    table.copy_(floats(part))


def vector_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float32


def paging(
    slot_mapping: Numbers, block_tables: Tensor, query_starts: Numbers, kv_lens: Numbers, page_size: int
) -> Paged:
    return Paged(tensor_of(slot_mapping), block_tables, tensor_of(query_starts), tensor_of(kv_lens))


def embedding(ids: Tensor, table: Tensor, first_id: int | None) -> Tensor:
    local = ids - (first_id or 0)
    here = (local >= 0) & (local < table.shape[0])
    return torch.where(here[:, None], table[torch.where(here, local, 0)], 0.0)


def linear(x: Tensor, weight: DenseMatrix, bias: Tensor | None) -> Tensor:
    y = x.float() @ weight.data.float().T
    return (y if bias is None else y + bias.float()).to(torch.promote_types(x.dtype, weight.data.dtype))


def head_linear(x: Tensor, weights: DenseHeads) -> Tensor:
    return torch.einsum("thk,hnk->thn", x.float(), weights.data.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps, bias), total


def rounding_norm(reader: Matrix) -> None:
    """There is none, since `linear` takes rows as they are."""


def latent_prolog(hidden: int, rank: int, heads: int, key: int, format: Format) -> None:
    """There is none."""


def split_rms_norm(
    parts: Sequence[Tensor],
    weights: Sequence[Tensor],
    counts: Sequence[int],
    eps: float,
    total: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    squares = total(torch.stack([x.float().square().sum(-1) for x in parts]))  # (parts, T)
    scales = torch.rsqrt(squares / torch.tensor(counts, device=squares.device)[:, None] + eps)
    return [
        (x.float() * scale[:, None] * weight.float()).to(x.dtype)
        for x, weight, scale in zip(parts, weights, scales, strict=True)
    ]


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, of_queries: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x.float()
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (wide * cos[:, None] + turned * sin[:, None]).to(x.dtype)

    return rotate(q, *(of_queries or (cos, sin))), rotate(k, cos, sin)


SCALE = 4  # bytes of the float32 scale that follows each int8 row


def kv_cache(pages: int, page_size: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(pages, page_size, kv_heads, width + SCALE * (dtype == torch.int8), dtype=dtype, device=device)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    _write(k, k_cache, slot_mapping)
    _write(v, v_cache, slot_mapping)


def _write(x: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    if cache.dtype == torch.int8:
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        quants = (x / torch.where(scale > 0, scale, 1)).round().to(torch.int8)
        x = torch.cat((quants, scale.view(torch.int8)), dim=-1)
    cache.flatten(0, 1)[slot_mapping] = x.to(cache.dtype)


def norm_rope_write(
    qkv: Tensor, heads: Heads, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, out: Tensor | None
) -> Tensor:
    dim = len(heads.q_weight)
    kv = heads.kv_heads * dim
    q, k, v = (x.unflatten(1, (-1, dim)) for x in qkv.split([qkv.shape[1] - 2 * kv, kv, kv], 1))
    q, k = rms_norm(q, heads.q_weight, heads.eps), rms_norm(k, heads.k_weight, heads.eps)
    q, k = rope(q, k, heads.cos, heads.sin)
    write_kv(k, v, k_cache, v_cache, slot_mapping)
    return q


def _cached(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` cached tokens of `pages`, float32 (length, kv_heads, D)."""
    x = cache[pages].flatten(0, 1)[:length]
    if cache.dtype == torch.int8:
        return x[..., :-SCALE] * x[..., -SCALE:].contiguous().view(torch.float32)
    return x.float()


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    paged: Paged,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    page_size, kv_heads = k_cache.shape[1:3]
    out = q.new_empty(*q.shape[:2], v_cache.shape[3] - SCALE * (v_cache.dtype == torch.int8))
    group = q.shape[1] // kv_heads
    starts, lengths = (torch.as_tensor(x).tolist() for x in (paged.query_starts, paged.kv_lens))
    for s, kv_len in enumerate(lengths):
        pages = paged.block_tables[s, : -(-kv_len // page_size)]
        k, v = (_cached(c, pages, kv_len).repeat_interleave(group, dim=1) for c in (k_cache, v_cache))  # (kv_len, H, D)
        rows = q[starts[s] : starts[s + 1]].float()
        scores = torch.einsum("qhd,khd->hqk", rows, k) * scale
        position = torch.arange(kv_len - len(rows), kv_len, device=q.device)
        key = torch.arange(kv_len, device=q.device)[None, :]
        hidden = (key > position[:, None]) | (key <= position[:, None] - (window or kv_len))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, len(rows), 1)
            scores, v = torch.cat((scores, sink), -1), F.pad(v, (0, 0, 0, 0, 0, 1))
        probabilities = scores.softmax(-1)
        out[starts[s] : starts[s + 1]] = torch.einsum("hqk,khd->qhd", probabilities, v).to(q.dtype)
    return out


def latent_cache(
    part: int, pages: int, page_size: int, width: int, rotary: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return kv_cache(pages, page_size, 1, width + rotary, dtype, device)


def write_latents(latents: Tensor, keys: Tensor, cache: LatentCache, slot_mapping: Tensor) -> None:
    _write(torch.cat((latents, keys), 1)[:, None], cache[0], slot_mapping)


def rope_write_latents(q: Tensor, rows: Tensor, norm: LatentNorm, cache: LatentCache, slot_mapping: Tensor) -> Tensor:
    latents, keys = rows.split([len(norm.weight), rows.shape[1] - len(norm.weight)], 1)
    q, key = rope(q, keys[:, None], norm.cos, norm.sin)
    write_latents(rms_norm(latents, norm.weight, norm.eps), key[:, 0], cache, slot_mapping)
    return q


def latent_attention(q: Tensor, q_rotary: Tensor, cache: LatentCache, paged: Paged, scale: float) -> Tensor:
    rows = torch.cat((q, q_rotary), 2)
    return attention(rows, cache[0], cache[0], paged, scale)[:, :, : q.shape[2]]


def expanded_attention(
    q: Tensor, q_rotary: Tensor, cache: LatentCache, keys: DenseHeads, values: DenseHeads, paged: Paged, scale: float
) -> Tensor:
    pages = cache[0]
    tokens = _cached(pages, torch.arange(len(pages), device=pages.device), pages.shape[0] * pages.shape[1])
    latents, turned = tokens[:, 0].split([keys.data.shape[1], q_rotary.shape[2]], 1)
    own = torch.einsum("tn,hnk->thk", latents, keys.data.float())
    k = torch.cat((own, turned[:, None].expand(-1, q.shape[1], -1)), 2)
    v = torch.einsum("tn,hvn->thv", latents, values.data.float())
    k, v = (x.unflatten(0, pages.shape[:2]) for x in (k, v))
    return attention(torch.cat((q, q_rotary), 2), k, v, paged, scale)


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_mul(x: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1) if up is None else (x.float(), up.float())
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def softcap(x: Tensor, cap: float) -> Tensor:
    return x.copy_((x.float() / cap).tanh() * cap)


def scale_by(x: Tensor, factor: Tensor) -> Tensor:
    return x.copy_(x.float() * factor.float())


def add_gated(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    return x.copy_(x.float() + (y.float() if gate is None else gate.float().sigmoid() * y.float()))


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    return x.copy_(x.float() * gate.float().sigmoid())


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
    open = gate.float().sigmoid() if sigmoid else F.silu(gate.float())
    return (rms_norm(x, weight, eps).float() * open).to(x.dtype)


causal_conv, gated_delta_rule = recurrent.causal_conv, recurrent.gated_delta_rule
row_cache, norm_rotate, write_rows = selected.row_cache, selected.norm_rotate, selected.write_rows
write_index, choose_blocks = selected.write_index, selected.choose_blocks
selected_attention = selected.selected_attention
ngram_rows, agreeing_values = ngrams.ngram_rows, ngrams.agreeing_values
spread, stream_norm, scaled_silu = streams.spread, streams.stream_norm, streams.scaled_silu
gated_read, gated_write = streams.gated_read, streams.gated_write
sinkhorn_read, sinkhorn_write = streams.sinkhorn_read, streams.sinkhorn_write


def route_softmax(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    scale: float = 1.0,
    groups: Groups | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    scores = logits.float().softmax(-1)
    ordered = scores if groups else logits.float()  # a softmax keeps the order
    weights, ids = _routed(scores, ordered, top_k, renormalise, scale, groups)
    return weights if factors is None else weights * factors.float()[ids], ids


def route_sigmoid(
    logits: Tensor, bias: Tensor | None, top_k: int, renormalise: bool, scale: float = 1.0, groups: Groups | None = None
) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    return _routed(scores, scores if bias is None else scores + bias, top_k, renormalise, scale, groups)


def _routed(
    scores: Tensor, ordered: Tensor, top_k: int, renormalise: bool, scale: float, groups: Groups | None
) -> tuple[Tensor, Tensor]:
    """The scores and ids of the top k of `ordered`."""
    if groups:
        by_group = ordered.unflatten(-1, (groups.number, -1))
        best = by_group.topk(min(groups.best, by_group.shape[-1]), -1).values.sum(-1)
        lost = torch.ones_like(best, dtype=torch.bool).scatter(-1, _first(best, groups.kept), False)
        ordered = by_group.masked_fill(lost[..., None], float("-inf")).flatten(-2)
    ids = _first(ordered, top_k)
    weights = scores.gather(-1, ids)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights) * scale, ids


def _first(x: Tensor, count: int) -> Tensor:
    """The places of the `count` largest. Unlike topk, a stable sort puts the first of equal ones first."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


sample = sampling.sample


def gated(x: Tensor, kind: ExpertKind) -> Tensor:
    """x (T, 2 N) holds gate and up side by side. -> (T, N)"""
    if kind.gelu:
        return gelu_mul(x)
    if not kind.limit:
        return silu_mul(x)
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    return (up + 1) * gate * (kind.alpha * gate).sigmoid()


def moe(x: Tensor, weights: Tensor, ids: Tensor, experts: DenseExperts, first_expert: int | None) -> Tensor:
    first_expert = first_expert or 0
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        if not first_expert <= expert < first_expert + experts.count:
            continue
        rows, columns = (ids == expert).nonzero(as_tuple=True)
        here = expert - first_expert
        hidden = gated(x[rows].float() @ experts.w13[here].float().T + experts.b13[here], experts.kind)
        y = hidden @ experts.w2[here].float().T + experts.b2[here]
        out.index_add_(0, rows, y * weights[rows, columns, None].float())
    return out.to(x.dtype)

"""The spec of each op of interface.py: what a call reads, writes and multiplies.

The signature in `interface.Ops` names the operands of an op, ops/reference.py is its meaning. Formulas take operands
by these names, and beside them `dtype` (of activations), `page_size`, `everyone` (the experts of all ranks, with
copies), and `out`, the op's result. ops/counted.py evaluates them.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from umbra.ops.interface import Ops, Paged

Formula = Callable[..., Any]


@dataclass(frozen=True)
class Work:
    """The bytes, values and multiply-adds of one call of an op."""

    label: str  # the op's name, where it has variants that cost differently also which
    values: float  # activations that it reads and writes
    weights: float = 0.0  # bytes of weights that it reads
    cached: float = 0.0  # bytes of cached keys and values that it reads, or of states that it reads and writes
    macs: float = 0.0  # multiply-adds
    mixture: bool = False  # whether the weights are those of experts
    plain: bool = True  # whether products multiply by the weights as they are: floats, or int8
    bank: Any = None  # the matrices that its products multiply by, where a device has several kernels for these


@dataclass(frozen=True)
class Spec:
    """One op. `moves` names the activations, each as often as it is read or written; `weights` the operands whose
    storages are read; `result` makes its result; `also` names further ops that implementations compute apart. `once`:
    weights are unpacked once for all rows, so that their format does not matter."""

    name: str
    moves: str
    result: Formula
    label: str | Formula = ""
    weights: str = ""
    cached: Formula = lambda: 0.0
    macs: Formula = lambda: 0.0
    also: Formula = lambda: ()
    once: bool = False

    def bound(self, *given: Any, **named: Any) -> dict[str, Any]:
        """Returns the operands of a call by their names, with defaults."""
        arguments = _signature(self.name).bind(None, *given, **named)
        arguments.apply_defaults()
        return dict(list(arguments.arguments.items())[1:])

    def work(self, operands: Mapping[str, Any]) -> list[Work]:
        """Returns the work of a call, and of what is computed apart."""
        label = self.label if isinstance(self.label, str) else applied(self.label, operands)
        banks = [operands[name] for name in self.weights.split()]
        own = Work(
            label or self.name,
            float(sum(_elements(operands[name]) for name in self.moves.split())),
            float(stored(*banks)),
            float(applied(self.cached, operands)),
            float(applied(self.macs, operands)),
            plain=self.once or all(map(plain, banks)),
            bank=None if self.once or not banks else banks[0],
        )
        return [own, *(Work(label, float(2 * x.numel())) for label, x in applied(self.also, operands))]


@dataclass(frozen=True)
class MixtureSpec(Spec):
    """`Ops.moe`, whose experts are spread evenly over all ranks."""

    def work(self, operands: Mapping[str, Any]) -> list[Work]:
        x, ids = operands["x"], operands["ids"]
        return [mixture(self.name, (*x.shape, ids.shape[1]), operands["experts"], operands["everyone"])]


def mixture(label: str, sizes: tuple[int, int, int], experts: Any, everyone: int) -> Work:
    """Returns the work of a mixture of `sizes` (tokens, columns, experts of each token) by the `experts` of a rank."""
    tokens, width, top_k = sizes
    share = 1 - (1 - top_k / everyone) ** tokens  # of the experts, that the tokens use
    pairs = tokens * top_k * experts.count / everyone
    values = pairs * (4 * width + 4 * experts.inner)  # sorted, gate and up, product, result
    macs = 3 * pairs * experts.inner * width
    return Work(label, values, share * stored(experts), 0.0, macs, True, plain(experts), experts)


def applied(formula: Formula, operands: Mapping[str, Any]) -> Any:
    """Returns the value of `formula` for the operands that it names."""
    return formula(**{name: operands[name] for name in _names(formula)})


def in_int8(weights: Any) -> bool:
    """Returns whether products multiply by these matrices as they are, in int8, which rounds their rows too."""
    return any(t.dtype == torch.int8 for t in weights.storages)


def plain(weights: Any) -> bool:
    """Returns whether products multiply by these matrices as they are: floats, or int8."""
    return in_int8(weights) or all(t.is_floating_point() for t in weights.storages)


def stored(*banks: Any) -> int:
    """Returns the bytes of all weights of `banks`."""
    return sum(t.nbytes for bank in banks for t in bank.storages)


def seen(paged: Paged, window: int | None = None) -> tuple[float, float]:
    """Returns the tokens that attention reads, and the pairs of a new token and one that it sees."""
    pairs = read = 0.0
    for first, end, length in zip(paged.query_starts[:-1], paged.query_starts[1:], paged.kv_lens, strict=True):
        new, all_seen = int(end) - int(first), int(length)
        read += min(all_seen, new - 1 + (window or all_seen))
        whole = new if window is None else max(0, min(new, window - (all_seen - new)))  # that see all before them
        pairs += whole * (all_seen - new) + whole * (whole + 1) / 2 + (new - whole) * (window or 0)
    return read, pairs


def selected(paged: Paged, most: int) -> float:
    """Returns the rows that attention over chosen blocks reads, if a query attends to at most so many."""
    rows = 0
    for first, end, length in zip(paged.query_starts[:-1], paged.query_starts[1:], paged.kv_lens, strict=True):
        seen = range(int(length) - (int(end) - int(first)) + 1, int(length) + 1)
        rows += sum(min(tokens, most) for tokens in seen)
    return float(rows)


def row_bytes(cache: Tensor) -> int:
    """Returns the bytes of a row of all heads in a cache (pages, heads, rows, width)."""
    return cache.shape[1] * cache.shape[3] * cache.itemsize


def cached_bytes(tokens: float, cache: Iterable[Tensor], page_size: int) -> float:
    """Returns the bytes of so many tokens in a cache of these parts."""
    return tokens * sum(part.nbytes / (len(part) * page_size) for part in cache)


def state_bytes(states: Tensor, sequences: int) -> int:
    """Returns the bytes of the states of so many sequences, read and written."""
    return 2 * sequences * int(states[0].nbytes)


def _expanded_macs(q: Tensor, q_rotary: Tensor, keys: Any, values: Any, paged: Paged) -> float:
    """Keys and values are made once of each token that is read."""
    (read, pairs), (_, heads, own) = seen(paged), q.shape
    return heads * (pairs * (own + q_rotary.shape[2] + values.rows) + read * (own + values.rows) * keys.rows)


def _routes(logits: Tensor, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), top_k, dtype=dtype), logits.new_empty(len(logits), top_k, dtype=torch.int32)


def _elements(operand: Any) -> int:
    return operand.numel() if isinstance(operand, Tensor) else sum(map(_elements, operand or ()))


@cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(Ops, name))


@cache
def _names(formula: Formula) -> tuple[str, ...]:
    return tuple(inspect.signature(formula).parameters)


def _like_x(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


SPECS = {
    spec.name: spec
    for spec in (
        Spec(
            "embedding",
            "out out",
            lambda ids, table, dtype: ids.new_empty(
                len(ids), table.shape[1] if isinstance(table, Tensor) else table.columns, dtype=dtype
            ),
        ),
        Spec(
            "linear",
            "x out",
            lambda x, weight: x.new_empty(len(x), weight.rows),
            lambda weight: "linear by int8" if in_int8(weight) else "linear",
            "weight",
            macs=lambda x, weight: len(x) * weight.rows * weight.columns,
        ),
        Spec(
            "head_linear",
            "x out",
            lambda x, weights: x.new_empty(*x.shape[:2], weights.rows),
            weights="weights",
            macs=lambda x, weights: x.numel() * weights.rows,
        ),
        Spec("rms_norm", "x x", _like_x, also=lambda x, bias: [("add", x)] * (bias is not None)),
        Spec(
            "add_rms_norm",
            "x x x x",
            lambda x: (_like_x(x), _like_x(x)),
            also=lambda x, bias: [("add", x)] * (bias is not None),
        ),
        Spec("split_rms_norm", "parts parts", lambda parts: [_like_x(x) for x in parts]),
        Spec(
            "rope",
            "q q k k",
            lambda q, k: (q, k),
            also=lambda q, k: [("copy", x) for x in (q, k) if not x.is_contiguous()],
        ),
        Spec("write_kv", "k k v v", lambda: None),
        Spec(
            "norm_rope_write",
            "qkv qkv",
            lambda qkv, heads: qkv.new_empty(
                len(qkv), qkv.shape[1] // len(heads.q_weight) - 2 * heads.kv_heads, len(heads.q_weight)
            ),
        ),
        Spec(
            "attention",
            "q q",
            lambda q: q.new_empty(q.shape),
            cached=lambda k_cache, v_cache, paged, window, page_size: cached_bytes(
                seen(paged, window)[0], (k_cache, v_cache), page_size
            ),
            macs=lambda q, paged, window: 2 * seen(paged, window)[1] * q.shape[1] * q.shape[2],
        ),
        Spec("write_latents", "latents latents keys keys", lambda: None),
        Spec("rope_write_latents", "q q rows rows", lambda q: q.new_empty(q.shape)),
        Spec(
            "latent_attention",
            "q q_rotary q",
            lambda q: q.new_empty(q.shape),
            cached=lambda cache, paged, page_size: cached_bytes(seen(paged)[0], cache, page_size),
            macs=lambda q, q_rotary, paged: seen(paged)[1] * q.shape[1] * (2 * q.shape[2] + q_rotary.shape[2]),
        ),
        Spec(
            "expanded_attention",
            "q q_rotary out",
            lambda q, values: q.new_empty(*q.shape[:2], values.rows),
            weights="keys values",
            cached=lambda cache, paged, page_size: cached_bytes(seen(paged)[0], cache, page_size),
            macs=_expanded_macs,
            once=True,
        ),
        Spec("silu_mul", "x out", lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2)),
        Spec("gelu_mul", "x up out", lambda x, up: x.new_empty(*x.shape[:-1], x.shape[-1] // (2 if up is None else 1))),
        Spec("softcap", "x x", lambda x: x),
        Spec("scale_by", "x x", lambda x: x),
        Spec("add_gated", "x x y", lambda x: x, lambda gate: "add" if gate is None else "add_gated"),
        Spec("sigmoid_mul", "x x gate", lambda x: x),
        Spec("gated_rms_norm", "x gate x", _like_x),
        Spec("norm_rotate", "x out", lambda x: x.new_empty(x.shape)),
        Spec("write_rows", "k k v v", lambda: None),
        Spec("write_index", "keys keys", lambda: None),
        Spec(
            "choose_blocks",
            "q",
            lambda q, top: q.new_empty(len(q), top, dtype=torch.int32),
            cached=lambda cache, paged, ratio: seen(paged)[0] / ratio * row_bytes(cache),
            macs=lambda q, paged, ratio: seen(paged)[1] / ratio * q.shape[1] * q.shape[2],
        ),
        Spec(
            "selected_attention",
            "q q",
            lambda q: q.new_empty(q.shape),
            cached=lambda k_cache, paged, blocks, ratio: (
                2 * selected(paged, (blocks.shape[1] + 1) * ratio - 1) * row_bytes(k_cache)
            ),
            macs=lambda q, paged, blocks, ratio: (
                2 * selected(paged, (blocks.shape[1] + 1) * ratio - 1) * q.shape[1] * q.shape[2]
            ),
        ),
        Spec(
            "ngram_rows",
            "out out",
            lambda token_ids, table, dtype: token_ids.new_empty(
                len(token_ids), len(table.moduli) * table.parts[0].shape[1], dtype=dtype
            ),
        ),
        Spec("agreeing_values", "keys queries values out", lambda keys: keys.new_empty(keys.shape)),
        Spec("spread", "x out", lambda x, streams: x.new_empty(len(x), streams * x.shape[1])),
        Spec("stream_norm", "streams streams", lambda streams: streams.new_empty(streams.shape)),
        Spec("scaled_silu", "x out", _like_x),
        Spec(
            "gated_read",
            "gates normed out",
            lambda normed, streams: normed.new_empty(len(normed), normed.shape[1] // streams),
        ),
        Spec("gated_write", "streams streams y", lambda streams: streams),
        Spec(
            "sinkhorn_read",
            "streams out",
            lambda streams, weights: (
                streams.new_empty(len(streams), streams.shape[1] // weights.count),
                *(
                    streams.new_empty(len(streams), *shape, dtype=torch.float32)
                    for shape in ((weights.count,), (weights.count, weights.count))
                ),
            ),
            macs=lambda streams, weights: len(streams) * weights.fn.numel(),
        ),
        Spec("sinkhorn_write", "streams streams y", lambda streams: streams),
        Spec(
            "causal_conv",
            "x out",
            _like_x,
            cached=lambda states, recurrent: state_bytes(states, len(recurrent.reads)),
            macs=lambda x, weight: weight.numel() * len(x),
        ),
        Spec(
            "gated_delta_rule",
            "qkv a b out",
            lambda qkv, states: qkv.new_empty(len(qkv), states.shape[1], states.shape[3]),
            cached=lambda states, recurrent: state_bytes(states, len(recurrent.reads)),
            macs=lambda qkv, states: 4 * len(qkv) * states[0].numel(),
        ),
        Spec("route_softmax", "logits", _routes, "route"),
        Spec("route_sigmoid", "logits", _routes, "route"),
        MixtureSpec("moe", "", _like_x),
    )
}

"""Stage 3: every operator of ops/ascend, against ops/reference in float32, the smallest sizes first."""

import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch_npu
from torch import Tensor
from torch_npu.npu.utils import get_cann_version

from umbra.executor.platform.ascend.environment import cann_home
from umbra.executor.platform.ascend.versions import read_versions
from umbra.ops import reference
from umbra.ops.ascend.layout import TILE
from umbra.ops.ascend.moe import ROUTINGS
from umbra.ops.ascend.ops import AscendOps, installed
from umbra.ops.ascend.weights import AscendExperts, AscendMatrix, Matrices, in_levels
from umbra.ops.formats import Format
from umbra.ops.interface import SILU_EXPERTS, ExpertKind, Heads
from umbra.tools.benchmarks.npu_layers import alternate
from umbra.tools.npu_check.numbers import SIZES, Size, require
from umbra.tools.npu_check.outcome import Check, Passed

BF16, NPU, CPU = torch.bfloat16, torch.device("npu"), torch.device("cpu")
FLOATS, FOUR_BITS, INT8 = Format("bfloat16", tiled=True), Format("q4", 32, zeros=True), Format("w8a8", 32)
CLIPPED = ExpertKind(limit=1.0, alpha=1.702, biased=True)
TOLERANCE = 0.01  # of bfloat16 results, relative to their norm: a rounding is up to 0.004
OF_INT8 = 0.03  # of products by int8, which round rows to a 127th of their largest value
PAGE, EPS, ROUNDS = 128, 1e-6, 10


@dataclass(frozen=True)
class Pair:
    """A call on the device, and what its results must be, in order."""

    call: Callable[[], Sequence[Tensor]]
    expected: Sequence[Tensor]
    tolerance: float = TOLERANCE


def checks(logs: Path) -> list[Check]:
    return [
        Check(f"{name}, {size.name}", partial(run, make, size)) for size in SIZES for name, make in OPERATORS.items()
    ]


def run(make: Callable[[Size], Pair], size: Size) -> Passed:
    torch.manual_seed(0)
    torch_npu.npu.config.allow_internal_format = True  # tiled weights
    pair = make(size)
    results = pair.call()
    torch_npu.npu.synchronize()
    errors = [
        require(f"result {number}", result, expected, pair.tolerance)
        for number, (result, expected) in enumerate(zip(results, pair.expected, strict=True))
    ]
    us = alternate({"call": pair.call}, ROUNDS)["call"]
    return Passed(f"error {max(errors):.2g}, {us:.1f} us", {"error": max(errors), "us": us})


@functools.cache
def ops(routing: str = "fusion_v2") -> AscendOps:
    cann = read_versions(cann_home(), get_cann_version() or None).cann
    return AscendOps(BF16, NPU, routing, can=installed(cann))


def values(*shape: int) -> Tensor:
    """Random numbers that bfloat16 holds, in float32."""
    return torch.randn(shape).to(BF16).float()


def there(x: Tensor) -> Tensor:
    return x.to(BF16).to(NPU)


def floats_of(plane: Matrices, index: int | None = None) -> Tensor:
    """(outputs, inputs) of a 4-bit matrix."""
    planes = (
        None if t is None else t if index is None else t[index] for t in (plane.data, plane.scales, plane.offsets)
    )
    words, scales, offsets = (None if t is None else t.cpu() for t in planes)
    if words is None or scales is None:
        raise TypeError("the matrix is not quantised")
    nibbles = torch.stack([(words << 28 - 4 * i) >> 28 for i in range(8)], -1).flatten(1)  # (inputs, outputs), signed
    zeros = 0 if offsets is None else offsets.float().repeat_interleave(plane.format.group, 0)
    return ((nibbles + zeros) * scales.float().repeat_interleave(plane.format.group, 0)).T


def embedding(size: Size) -> Pair:
    table, ids = values(512, size.hidden), torch.tensor([3, 700, 512, 1000])
    expected = reference.embedding(ids, table, 512)
    on, at = there(table), ids.to(NPU)
    return Pair(lambda: [ops().embedding(at, on, 512)], [expected])


def linear(format: Format, tokens: int, size: Size) -> Pair:
    rows, x = 2 * size.inner, values(tokens, size.hidden)
    weight = values(rows, size.hidden) / size.hidden**0.5
    matrix = AscendMatrix(rows, size.hidden, format, BF16, NPU)
    matrix.fill(0, weight)
    if format == INT8:
        plain = in_levels(weight, format).floats()
    else:
        plain = floats_of(matrix) if format.quantised else weight.to(getattr(torch, format.kind)).float()
    at = there(x)
    return Pair(lambda: [ops().linear(at, matrix, None)], [x @ plain.T], OF_INT8 if format == INT8 else TOLERANCE)


def rms_norm(size: Size) -> Pair:
    x, weight = values(4, size.heads, size.head_dim), values(size.head_dim)
    at, by = there(x), there(weight)
    return Pair(lambda: [ops().rms_norm(at, by, EPS)], [reference.rms_norm(x, weight, EPS)])


def add_rms_norm(size: Size) -> Pair:
    x, residual, weight = values(4, size.hidden), values(4, size.hidden), values(size.hidden)
    on = [there(t) for t in (x, residual, weight)]
    return Pair(lambda: ops().add_rms_norm(on[0], on[1], on[2], EPS), reference.add_rms_norm(x, residual, weight, EPS))


def split_rms_norm(size: Size) -> Pair:
    widths = [size.heads * size.head_dim, size.kv_heads * size.head_dim]
    parts, weights = [values(4, n) for n in widths], [values(n) for n in widths]
    on, by = [there(t) for t in parts], [there(t) for t in weights]
    expected = reference.split_rms_norm(parts, weights, widths, EPS, lambda t: t)
    return Pair(lambda: ops().split_rms_norm(on, by, widths, EPS, lambda t: t), expected)


def rope(size: Size) -> Pair:
    """The operator rotates in place, so it is given copies."""
    q, k = values(5, size.heads, size.head_dim), values(5, size.kv_heads, size.head_dim)
    angles = torch.randn(5, size.head_dim // 2).repeat(1, 2)
    cos, sin = angles.cos().to(BF16).float(), angles.sin().to(BF16).float()
    on = [there(t) for t in (q, k, cos, sin)]
    call = partial(_rotated, *on)
    return Pair(call, reference.rope(q, k, cos, sin))


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return ops().rope(q.clone(), k.clone(), cos, sin)


def stored(cache: Tensor) -> Tensor:
    """A cache (pages, page, heads, width) in the layout of this CANN's operators."""
    flat = cache.flatten(2)
    return flat.unflatten(2, (-1, TILE)).transpose(1, 2).contiguous() if ops().tiled else flat


def caches_of(size: Size, pages: int) -> list[Tensor]:
    return [ops().kv_cache(pages, PAGE, size.kv_heads, size.head_dim, BF16, NPU) for _ in "kv"]


SLOTS = [127, 2 * PAGE, 2 * PAGE + 1]  # of three tokens: the last two in another page


def slots_there() -> Tensor:
    return (
        ops()
        .paging(array("q", SLOTS), torch.zeros(1, 1, dtype=torch.int64), array("q", [0, 3]), array("q", [3]), PAGE)[0]
        .to(NPU)
    )


def write_kv(size: Size) -> Pair:
    k, v = values(3, size.kv_heads, size.head_dim), values(3, size.kv_heads, size.head_dim)
    expected = [torch.zeros(3, PAGE, size.kv_heads, size.head_dim) for _ in "kv"]
    reference.write_kv(k, v, expected[0], expected[1], torch.tensor(SLOTS))
    caches, at, on = caches_of(size, 3), slots_there(), [there(t) for t in (k, v)]

    def call() -> list[Tensor]:
        ops().write_kv(on[0], on[1], caches[0], caches[1], at)
        return caches

    return Pair(call, [stored(t) for t in expected])


def norm_rope_write(size: Size) -> Pair:
    """Norms, rotation and both writes; one kernel where CANN and the width of a head allow it."""
    heads = size.heads + 2 * size.kv_heads
    qkv, q_weight, k_weight = values(3, heads * size.head_dim), values(size.head_dim), values(size.head_dim)
    angles = torch.randn(3, size.head_dim // 2).repeat(1, 2)
    turns = angles.cos().to(BF16).float(), angles.sin().to(BF16).float()
    expected = [torch.zeros(3, PAGE, size.kv_heads, size.head_dim) for _ in "kv"]
    given = Heads(size.kv_heads, EPS, q_weight, k_weight, *turns)
    q = reference.norm_rope_write(qkv, given, expected[0], expected[1], torch.tensor(SLOTS), None)
    caches, at = caches_of(size, 3), slots_there()
    on, by = there(qkv), [there(t) for t in turns]
    heads_on = Heads(size.kv_heads, EPS, there(q_weight), there(k_weight), *by)

    def call() -> list[Tensor]:
        return [ops().norm_rope_write(on, heads_on, caches[0], caches[1], at, None), *caches]

    return Pair(call, [q, *map(stored, expected)])


def attention(decode: bool, window: int | None, with_sinks: bool, size: Size) -> Pair:
    """Three sequences, the longest in three pages. Pages before windows are full of large numbers."""
    lengths = [5, 130, 300]
    new = [1, 1, 1] if decode else [5, 20, 15]
    starts = [sum(new[:i]) for i in range(4)]
    tables = [[1, 0, 0], [2, 3, 0], [4, 6, 5]]
    q = values(sum(new), size.heads, size.head_dim)
    caches = [values(7, PAGE, size.kv_heads, size.head_dim) for _ in "kv"]
    scale, sinks = size.head_dim**-0.5, values(size.heads) if with_sinks else None
    numbers = array("q", [0] * sum(new)), torch.tensor(tables), array("q", starts), array("q", lengths)
    plain = reference.paging(*numbers, PAGE)
    expected = reference.attention(q, caches[0], caches[1], plain, scale, window, sinks)
    for cache in caches if window else ():
        cache[4] = 1e3
    at, on, by = there(q), [there(stored(t)) for t in caches], None if sinks is None else there(sinks)
    paged = ops().paging(*numbers, PAGE)
    paged = paged._replace(block_tables=paged.block_tables.to(NPU))
    return Pair(lambda: [ops().attention(at, on[0], on[1], paged, scale, window, by)], [expected])


def silu_mul(size: Size) -> Pair:
    x = values(8, 2 * size.inner)
    at = there(x)
    return Pair(lambda: [ops().silu_mul(at)], [reference.silu_mul(x)])


def dense(weights: Tensor, ids: Tensor, experts: int) -> Tensor:
    """Weights (T, k) as (T, experts), in which the order of a token's experts does not matter."""
    wide = torch.zeros(len(ids), experts)
    return wide.scatter_(1, ids.long().cpu(), weights.float().cpu())


def route_softmax(size: Size) -> Pair:
    logits = values(6, size.experts) * 2
    expected = dense(*reference.route_softmax(logits, size.top_k, True), size.experts)
    at = there(logits)
    return Pair(lambda: [dense(*ops().choose_softmax(at, size.top_k, True), size.experts)], [expected])


def route_sigmoid(size: Size) -> Pair:
    logits, bias = values(6, size.experts) * 2, values(size.experts)
    expected = dense(*reference.route_sigmoid(logits, bias, size.top_k, True), size.experts)
    at, by = logits.to(NPU), bias.to(NPU)
    return Pair(lambda: [dense(*ops().choose_sigmoid(at, by, size.top_k, True), size.experts)], [expected])


def argmax(size: Size) -> Pair:
    x = values(3, 151_936 if size.hidden >= 1024 else 96)
    at = there(x + torch.nn.functional.one_hot(torch.tensor([5, 17, 95]), x.shape[1]) * 20)
    return Pair(lambda: [ops().argmax(at)], [torch.tensor([5, 17, 95])])


def moe(format: Format, routing: str, size: Size, kind: ExpertKind = SILU_EXPERTS, gathered: bool = False) -> Pair:
    """Each expert is the first one, rolled, since random numbers for all of them would take long. `gathered` ones take
    the ops that those from slots take."""
    experts = AscendExperts(size.experts, size.inner, size.hidden, format, BF16, NPU, kind=kind)
    experts.w13.gathered = gathered
    shapes = {"gate": (size.inner, size.hidden), "up": (size.inner, size.hidden), "down": (size.hidden, size.inner)}
    first = {which: values(*shape) / shape[1] ** 0.5 for which, shape in shapes.items()}

    def part(expert: int, which: str) -> Tensor:
        return first[which].roll(expert, 0).to(BF16).float()

    x, tokens = values(5, size.hidden), 5
    ids = torch.stack([torch.randperm(size.experts)[: size.top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, size.top_k).to(BF16).float()
    used = ids.unique()
    plain = reference.expert_matrices(len(used), size.inner, size.hidden, Format("float32"), CPU, kind)
    for expert in range(size.experts):
        for which in shapes:
            experts.fill(expert, which, part(expert, which))
    for number, expert in enumerate(used.tolist()):
        if format == INT8:
            parts = {which: in_levels(part(expert, which), format).floats() for which in shapes}
        elif format.quantised:
            gate_up = floats_of(experts.w13, expert)
            parts = {"gate": gate_up[: size.inner], "up": gate_up[size.inner :], "down": floats_of(experts.w2, expert)}
        else:
            parts = {which: part(expert, which) for which in shapes}
        for which, matrix in parts.items():
            plain.fill(number, which, matrix)
            if kind.biased:
                bias = values(len(matrix))
                plain.fill_bias(number, which, bias)
                experts.fill_bias(expert, which, bias)
    expected = reference.moe(x, weights, torch.searchsorted(used, ids), plain, None)
    at, by, chosen = there(x), there(weights), ids.int().to(NPU)
    tolerance = OF_INT8 if format == INT8 else TOLERANCE
    return Pair(lambda: [ops(routing).moe(at, by, chosen, experts, None)], [expected], tolerance)


OPERATORS: dict[str, Callable[[Size], Pair]] = {
    "embedding": embedding,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "split_rms_norm": split_rms_norm,
    "rope": rope,
    "silu_mul": silu_mul,
    "argmax": argmax,
    "route_softmax": route_softmax,
    "route_sigmoid": route_sigmoid,
    "linear, tiled bfloat16": partial(linear, FLOATS, 3),
    "linear, float32": partial(linear, Format("float32"), 3),
    "linear, 4 bits": partial(linear, FOUR_BITS, 3),
    "linear, int8": partial(linear, INT8, 3),
    "write_kv": write_kv,
    "norm_rope_write": norm_rope_write,
    "attention, decode": partial(attention, True, None, False),
    "attention, prefill": partial(attention, False, None, False),
    "attention with sinks, decode": partial(attention, True, None, True),
    "attention with sinks over windows, decode": partial(attention, True, 128, True),
    "attention with sinks over windows, prefill": partial(attention, False, 128, True),
    **{f"moe {routing}, tiled bfloat16": partial(moe, FLOATS, routing) for routing in ROUTINGS},
    "moe fusion_v2, 4 bits": partial(moe, FOUR_BITS, "fusion_v2"),
    "moe fusion_v2, int8": partial(moe, INT8, "fusion_v2"),
    "moe fusion_v2, int8 in slots": partial(moe, INT8, "fusion_v2", gathered=True),
    "moe fusion_v2, biases and clipped SwiGLU": partial(moe, FLOATS, "fusion_v2", kind=CLIPPED),
}

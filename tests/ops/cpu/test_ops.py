"""Every op of the native module against the reference, on every instruction set and several thread counts."""

import inspect
import itertools
import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from tests.gguf_models import in_type
from tests.quantised import nested
from umbra.base.errors import UserError
from umbra.executor.checkpoint.formats.ggml import KEPT, values_of
from umbra.executor.config.case import Case
from umbra.executor.config.schema import leaves
from umbra.executor.engine.schedule.request import SamplingParams
from umbra.ops import IMPLEMENTATIONS, load_ops, reference
from umbra.ops.cpu import engine
from umbra.ops.cpu import ops as cpu
from umbra.ops.cpu.matrix import NativeExperts, NativeMatrix, fill_table
from umbra.ops.formats import FORMATS, GROUP_SIZES, SPECS, Format
from umbra.ops.formats.ggml import Blocks, Undecoded
from umbra.ops.formats.spec import BlockType
from umbra.ops.formats.w8a8 import quantise
from umbra.ops.interface import SILU_EXPERTS, ExpertKind, Groups, Ops, Paged
from umbra.ops.reference import DenseExperts, DenseMatrix
from umbra.ops.sampling import Choice, adjust, filtered_probabilities, uniform
from umbra.tools.native_stub import STUB, native_stub

CPU = torch.device("cpu")
NONE = torch.empty(0, dtype=torch.int64)
NAMES = [name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")]
SETS = engine.module.instruction_sets()
BASIC = [FORMATS[kind] for kind in ("float32", "bfloat16", "float16", "q8", "q4")]
NESTED = [kind for kind, spec in SPECS.items() if spec.nesting and not spec.record]
RECORDS = [kind for kind, spec in SPECS.items() if spec.record]
KINDS = {
    **{kind: format for kind, format in FORMATS.items() if kind not in NESTED + RECORDS},
    **{f"q4 zeros {g}": Format("q4", g, zeros=True) for g in GROUP_SIZES},
    "q8 128": Format("q8", 128),
    **{f"f8 {g}": Format("f8", g) for g in GROUP_SIZES},
}
GUARD = 64  # bytes
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def start(threads: tuple[int, ...], instruction_set: str) -> None:
    """Threads on each of some simulated NUMA nodes."""
    engine.start_teams([engine.native.Team(-1, count, []) for count in threads], instruction_set)


# All sets divide work among threads and nodes in the same way.
ENGINES = [(s, (2,)) for s in SETS] + [(SETS[-1], threads) for threads in ((1,), (5,), (1, 2), (1,) * 8)]
QUICK = (SETS[-1], (2,))  # the engine of `bash test.sh --quick`
MARKED = [pytest.param(e, marks=[] if e == QUICK else [pytest.mark.slow]) for e in ENGINES]


@pytest.fixture(params=MARKED, ids=lambda p: f"{p[0]}-{'+'.join(map(str, p[1]))}")
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Starts an engine; its instruction set."""
    torch.manual_seed(3)
    start(request.param[1], request.param[0])
    yield request.param[0]
    engine.start(1, "auto")


@pytest.fixture(autouse=True)
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fills the memory that ops allocate with NaN, or -1, and asserts that nothing is written behind it."""
    behind = []
    empty = torch.empty

    def guarded(*sizes: Any, dtype: torch.dtype = torch.float32, **others: Any) -> Tensor:
        if others:
            return empty(*sizes, dtype=dtype, **others)
        shape = torch.Size(sizes if isinstance(sizes[0], int) else sizes[0])
        size = shape.numel() * dtype.itemsize
        room = torch.full((size + GUARD,), 255, dtype=torch.uint8)
        behind.append(room[size:])
        return room[:size].view(dtype).view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    yield
    assert all(bool((guard == 255).all()) for guard in behind)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("group", GROUP_SIZES)
def test_rounding_to_f8_keeps_three_bits_and_the_largest(group: int) -> None:
    w = torch.randn(40, 256) * torch.logspace(-6, 2, 40)[:, None]
    w[3, :group] = 0
    matrix = NativeMatrix(40, 256, Format("f8", group), CPU)
    matrix.fill(0, w)
    back, largest = matrix.packed.dequantised(0, 40), w.unflatten(1, (-1, group)).abs().amax(-1)
    smallest = largest.repeat_interleave(group, 1) / 448 * 2**-9  # a step among the smallest numbers
    assert ((back - w).abs() <= w.abs() * 2**-4 + smallest / 2 * 1.01).all()
    torch.testing.assert_close(back.unflatten(1, (-1, group)).abs().amax(-1), largest)


def activation_error(x: Tensor, w: Tensor) -> Tensor:
    """The bound of csrc/kernels/matrix.h: half a step of each 32-block of x, times the block's weights. (T, N)"""
    steps = x.unflatten(-1, (-1, 32)).abs().amax(-1) / 254
    return steps @ w.unflatten(-1, (-1, 32)).abs().sum(-1).T


def rounds(instruction_set: str, format: Format) -> bool:
    """Returns whether the instruction set rounds activations to bfloat16 because it multiplies weights of bfloat16."""
    return format.kind == "bfloat16" and instruction_set in ("avx512_bf16", "amx")


@pytest.mark.parametrize("format", KINDS.values(), ids=KINDS)
def test_linear(format: Format, kernels: str) -> None:
    columns = 3 * format.group if format.quantised else 35  # float formats take any number of columns
    step: dict[str, Any] = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "q8": 1 / 127, "q4": 1 / 7}
    step |= {"f8": 1 / 16, "mxfp4": 1 / 4, "w8a8": 1 / 254}
    for rows in (1, 16, 37):
        w, bias = torch.randn(rows, columns) / 8, torch.randn(rows)
        matrix = NativeMatrix(rows, columns, format, CPU)
        for row in range(0, rows, 5):  # piece by piece, as a loader does
            matrix.fill(row, w[row : row + 5])
        dense = DenseMatrix(rows, columns, FORMATS["float32"], CPU)
        dense.fill(0, matrix.packed.dequantised(0, rows))
        assert ((dense.data - w).abs() <= step[format.kind] * w.abs().amax() + 1e-6).all(), rows
        for tokens in (0, 1, 3, 8, 9, 70):
            x = torch.randn(tokens, columns)
            seen = x.bfloat16().float() if rounds(kernels, format) else x
            actual, expected = cpu.linear(x, matrix, bias), reference.linear(seen, dense, bias)
            bound = activation_error(x, dense.data) if matrix.quantised else 0
            assert ((actual - expected).abs() <= bound + 1e-4).all(), f"{rows} rows, {tokens} tokens"


def test_int8_rows_differ_from_those_rounded_by_token(kernels: str) -> None:
    """Which shadow experts' do from resident ones' on Ascend: by half a step of each way of rounding at most."""
    part = quantise(torch.randn(37, 512))
    matrix, w, x = (
        NativeMatrix(37, 512, FORMATS["w8a8"], CPU),
        part.floats(),
        torch.randn(9, 512) * torch.logspace(-2, 2, 512),
    )
    matrix.fill(0, part)
    steps = x.abs().amax(1, keepdim=True) / 127
    by_token = (x / steps).round() @ w.T * steps
    bound = activation_error(x, w) + steps / 2 * w.abs().sum(1)
    assert ((cpu.linear(x, matrix, None) - by_token).abs() <= bound * 1.001).all(), kernels


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.usefixtures("kernels")
def test_scales_of_scales(kind: str) -> None:
    for group in (32, 256):
        part = nested(kind, 37, 512)
        matrix = NativeMatrix(37, 512, Format(kind, group), CPU)
        matrix.fill(0, part)
        for tokens in (0, 1, 3, 8, 9, 70):
            x = torch.randn(tokens, 512)
            actual, expected = cpu.linear(x, matrix, None), x @ part.floats().T
            assert ((actual - expected).abs() <= activation_error(x, part.floats()) + 1e-3).all(), tokens
        packed = NativeExperts(4, 64, 512, Format(kind, 32), CPU)
        dense = DenseExperts(4, 64, 512, FORMATS["float32"], CPU)
        for e, which in itertools.product(range(4), ("gate", "up", "down")):
            shape = (512, 64) if which == "down" else (64, 512)
            for experts in (packed, dense):
                torch.manual_seed(e)
                experts.fill(e, which, nested(kind, *shape, group=32))
        weights, ids = reference.route_softmax(torch.randn(40, 4), 2, True)
        x = torch.randn(40, 512) / 512
        expected = reference.moe(x, weights, ids, dense, 0)
        assert ((cpu.moe(x, weights, ids, packed, 0) - expected).abs() <= 0.12 * expected.std()).all()


@pytest.mark.parametrize("type", [type for kind in RECORDS for type in SPECS[kind].block_types], ids=lambda t: t.name)
@pytest.mark.usefixtures("kernels")
def test_records(type: BlockType) -> None:
    """Types of two to three bits have the weights that the reader of gguf gives, and their products."""
    part = in_blocks(type, 37, 2304)  # of more columns than are expanded at once
    weights = torch.from_numpy(dequantize(part.of.data.flatten(1).numpy(), GGMLQuantizationType[type.name]))
    for group in (32, 256):
        matrix = NativeMatrix(37, 2304, replace(KEPT[type.name], group=group), CPU)
        assert matrix.fill(0, part)
        assert torch.equal(matrix.packed.dequantised(0, 37), weights)
        for tokens in (0, 1, 3, 8, 9, 70):
            x = torch.randn(tokens, 2304)
            actual, expected = cpu.linear(x, matrix, None), x @ weights.T
            assert ((actual - expected).abs() <= activation_error(x, weights) + 1e-3).all(), tokens
    table = torch.empty(37, 2304)
    assert fill_table(table, part)
    assert torch.equal(table, weights)
    in_part = Blocks(replace(part.of, skipped=32, columns=224))
    matrix = NativeMatrix(37, 224, replace(KEPT[type.name], group=32), CPU)
    matrix.fill(0, in_part)
    assert torch.equal(matrix.packed.dequantised(0, 37), weights[:, 32:256])


def in_blocks(type: BlockType, rows: int, columns: int) -> Blocks:
    """Random rows in one of ggml's types, of weights of about one."""
    bytes_ = in_type(np.random.default_rng(1).standard_normal((rows, columns)), GGMLQuantizationType[type.name], 3e-2)
    data = torch.from_numpy(bytes_).unflatten(1, (-1, type.nbytes))
    return Blocks(Undecoded(type.number, data, 0, columns, KEPT[type.name], partial(values_of, type.name)))


def test_rows_in_several_formats() -> None:
    stack = cpu.stack([(37, FORMATS["q4_k"]), (20, FORMATS["float32"]), (8, FORMATS["q8"])], 512, CPU)
    for row, part in ((0, nested("q4_k", 30, 512)), (37, torch.randn(20, 512)), (57, torch.randn(8, 512))):
        stack.fill(row, part)
    stack.fill(30, nested("q4_k", 7, 512))
    bias = torch.randn(65)
    for tokens in (1, 9, 70):
        x = torch.randn(tokens, 512)
        apart = [cpu.linear(x, part, own) for part, own in zip(stack.parts, bias.split([37, 20, 8]), strict=True)]
        assert torch.equal(cpu.linear(x, stack, bias), torch.cat(apart, 1))


def experts_of(
    format: Format, count: int, inner: int, hidden: int, kind: ExpertKind = SILU_EXPERTS
) -> tuple[NativeExperts, DenseExperts]:
    packed = NativeExperts(count, inner, hidden, format, CPU, kind)
    dense = DenseExperts(count, inner, hidden, FORMATS["float32"], CPU, kind)
    for e in range(count):
        for which, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            packed.fill(e, which, torch.randn(shape) / shape[1] ** 0.5)
            if kind.biased:
                bias = torch.randn(shape[0]).bfloat16()
                packed.fill_bias(e, which, bias)
                dense.fill_bias(e, which, bias)
        dense.fill(e, "gate", packed.dequantised(e, "gate")[:inner])
        dense.fill(e, "up", packed.dequantised(e, "up")[:inner])
        dense.fill(e, "down", packed.dequantised(e, "down")[:, :inner])
    return packed, dense


# (tokens, experts of each, the first expert here, what expert 3 is preferred by), by how many of the eight are here
ROUTED: dict[int, dict[str, tuple[int, int, int, int]]] = {
    8: {
        "one token": (1, 2, 0, 0),
        "many tokens": (40, 3, 0, 0),
        "no tokens": (0, 2, 0, 0),
        "all to one expert": (100, 1, 0, 99),
        "every expert": (7, 8, 0, 0),
    },
    3: {"some experts elsewhere": (40, 3, 2, 0)},
}


CLIPPED = ExpertKind(limit=0.8, alpha=1.702, biased=True)
MIXTURES = [
    *((format, SILU_EXPERTS) for format in KINDS.values()),
    *((KINDS[k], CLIPPED) for k in ("float32", "mxfp4")),
    *((KINDS[k], ExpertKind(gelu=True)) for k in ("float32", "q4")),
]


@pytest.mark.parametrize(("format", "kind"), MIXTURES, ids=str)
def test_moe(format: Format, kind: ExpertKind, kernels: str) -> None:
    inner, hidden = max(64, format.group), max(96, 2 * format.group)
    # Both products' activations are rounded to 8 bits in blocks: half a percent of the result's size, far below 3 %.
    rounded = format.kind in ("q8", "q4", "mxfp4", "w8a8") or rounds(kernels, format)
    for count, routed in ROUTED.items():
        packed, dense = experts_of(format, count, inner, hidden, kind)
        for what, (tokens, top_k, first, skew) in routed.items():
            logits = torch.randn(tokens, 8)
            logits[:, 3] += skew
            weights, ids = reference.route_softmax(logits, top_k, True)
            if tokens > 5:
                ids[2, 0] = -1  # skipped
                ids[3] = ids[3, 0]  # repeated
            x = torch.randn(tokens, hidden)
            expected = reference.moe(x, weights, ids, dense, first)
            actual = cpu.moe(x, weights, ids, packed, first)
            tolerance = 0.03 * float(expected.std()) * 4 if rounded and tokens else 1e-4
            assert actual.shape == expected.shape, what
            assert bool(((actual - expected).abs() <= max(tolerance, 1e-4)).all()), what


@pytest.mark.usefixtures("kernels")
def test_moe_of_any_inner_size_in_float() -> None:
    inner = 33
    packed, dense = experts_of(FORMATS["float32"], 4, inner, 20)
    weights, ids = reference.route_softmax(torch.randn(9, 4), 2, False)
    x = torch.randn(9, 20)
    torch.testing.assert_close(
        cpu.moe(x, weights, ids, packed, 0), reference.moe(x, weights, ids, dense, 0), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("format", BASIC, ids=lambda format: format.kind)
def test_results_do_not_depend_on_the_number_of_threads_or_nodes(format: Format) -> None:
    x = torch.randn(33, 96)
    weights, ids = reference.route_softmax(torch.randn(33, 8), 3, True)
    for instruction_set in SETS:
        results = []
        for threads in ((1,), (2,), (3,), (8,), (1, 1), (3, 1, 1, 2), (1,) * 8):
            start(threads, instruction_set)
            torch.manual_seed(5)
            packed, _ = experts_of(format, 8, 160, 96)  # 5 groups of 32 and 6 blocks: some of eight nodes have none
            matrix = NativeMatrix(200, 96, format, CPU)
            matrix.fill(0, torch.randn(200, 96))
            results.append((cpu.moe(x, weights, ids, packed, 0), cpu.linear(x, matrix, None)))
        for moe, linear in results[1:]:
            assert torch.equal(moe, results[0][0])
            assert torch.equal(linear, results[0][1])
    engine.start(1, "auto")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.usefixtures("kernels")
def test_embedding_of_a_middle_shard(dtype: torch.dtype) -> None:
    ids, table = torch.tensor([0, 4, 5, 9, 10, 12, 5]), torch.randn(5, 8).to(dtype)
    close(cpu.embedding(ids, table, 5), reference.embedding(ids, table, 5).float())


@pytest.mark.parametrize("shape", [(1, 7), (300, 256), (40, 8, 128)])
@pytest.mark.usefixtures("kernels")
def test_norms(shape: tuple[int, ...]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    close(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    if len(shape) == 2:
        close(cpu.add_rms_norm(x, residual, weight, 1e-5), reference.add_rms_norm(x, residual, weight, 1e-5))


@pytest.mark.parametrize(("tokens", "width"), [(1, 96), (300, 40)])
@pytest.mark.usefixtures("kernels")
def test_norms_of_vectors_split_over_ranks(tokens: int, width: int) -> None:
    """With the sums of squares of all ranks, each rank's part is that part of the whole vector's norm."""
    rows, weights = torch.randn(tokens, 3 * width), [torch.randn(width), torch.randn(2 * width)]
    parts, counts = rows.split([width, 2 * width], dim=-1), [4 * width, 8 * width]
    others = torch.rand(2, tokens) * width
    ours, expected = (
        ops.split_rms_norm(parts, weights, counts, 1e-6, lambda squares: squares.add_(others))
        for ops in (cpu, reference)
    )
    close(ours, expected)
    whole = torch.cat((parts[0], torch.randn(tokens, 3 * width)), dim=-1)
    rest = whole[:, width:].square().sum(-1)
    [part] = cpu.split_rms_norm(parts[:1], weights[:1], counts[:1], 1e-6, lambda squares: squares.add_(rest))
    close(part, reference.rms_norm(whole, torch.ones(4 * width), 1e-6)[:, :width] * weights[0])


@pytest.mark.usefixtures("kernels")
def test_heads_inside_a_wider_row() -> None:
    """q, k and v are views into one projection: tokens lie further apart than their heads fill."""
    q, k, v = torch.randn(6, 4 * 16 + 2 * 2 * 16).split([64, 32, 32], dim=-1)
    q, k, v = (t.unflatten(-1, (-1, 16)) for t in (q, k, v))
    weight, cos, sin = torch.randn(16), torch.randn(6, 16), torch.randn(6, 16)
    close(cpu.rms_norm(q, weight, 1e-6), reference.rms_norm(q, weight, 1e-6))
    for turned, expected in zip(cpu.rope(q, k, cos, sin), reference.rope(q, k, cos, sin), strict=True):
        close(turned, expected)
    slots = torch.tensor([6, 9, 0, 1, 11, 3])
    ours, theirs = caches_of(cpu, (3, 4, 2, 16), torch.float32), caches_of(reference, (3, 4, 2, 16), torch.float32)
    cpu.write_kv(k, v, *ours, slots)
    reference.write_kv(k, v, *theirs, slots)
    for mine, expected in zip(cached(*ours), theirs, strict=True):
        assert torch.equal(mine, expected)


def caches_of(ops: Any, shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return ops.kv_cache(*shape, dtype, CPU), ops.kv_cache(*shape, dtype, CPU)


def cached(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the contents of the native caches, each as (pages, page_size, kv_heads, D)."""
    pages, heads, width, size = keys.shape
    width -= 4 * (keys.dtype == torch.int8)
    k, v = (x.reshape(pages, heads, -1)[..., : width * size] for x in (keys, values))
    k = k.reshape(pages, heads, width // 2, size, 2).transpose(3, 4).reshape(pages, heads, width, size)
    v = v.reshape(pages, heads, size // 2, width, 2).transpose(3, 4).reshape(pages, heads, size, width)
    if keys.dtype == torch.int8:
        scales = (x.reshape(pages, heads, -1)[..., width * size :].contiguous() for x in (keys, values))
        k_scale, v_scale = (x.view(torch.float32) for x in scales)
        k, v = k * k_scale[:, :, None], v * v_scale[..., None]
    return k.permute(0, 3, 1, 2), v.transpose(1, 2)


@pytest.mark.parametrize("dtype", [*TYPES, torch.int8])
@pytest.mark.usefixtures("kernels")
def test_write_kv_touches_its_slots_only_and_rounds_to_nearest(dtype: torch.dtype) -> None:
    caches = caches_of(cpu, (3, 4, 2, 8), dtype)
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8) * 1e-6  # float16 subnormals among them
    cpu.write_kv(k, v, *caches, torch.tensor([6, 9]))
    keys, values = cached(*caches)
    if dtype == torch.int8:
        for written, x in ((keys[1, 2], k[0]), (values[2, 1], v[1])):
            assert ((written - x).abs() <= x.abs().amax(-1, keepdim=True) * (0.5001 / 127)).all()
    else:
        assert torch.equal(keys[1, 2], k[0].to(dtype))
        assert torch.equal(values[2, 1], v[1].to(dtype))
    for cache in (keys, values):
        assert cache.flatten(0, 1).float().abs().sum((1, 2)).nonzero().flatten().tolist() == [6, 9]


def paged(
    lens: list[int], kv_heads: int, dim: int, page_size: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Caches of random keys and values of sequences with `lens` tokens, on pages in random order, the block tables, and
    the values."""
    pages = [-(-n // page_size) for n in lens]
    order = torch.randperm(sum(pages)).tolist()
    tables = torch.zeros(len(lens), max(pages), dtype=torch.int64)
    slots = []
    for s, count in enumerate(pages):
        tables[s, :count] = torch.tensor([order.pop() for _ in range(count)])
        slots += [int(tables[s, i // page_size]) * page_size + i % page_size for i in range(lens[s])]
    k, v = torch.randn(2, sum(lens), kv_heads, dim)
    caches = caches_of(cpu, (sum(pages), page_size, kv_heads, dim), dtype)
    cpu.write_kv(k, v, *caches, torch.tensor(slots))
    return caches, tables, v


@pytest.mark.parametrize("dtype", [*TYPES, torch.int8])
@pytest.mark.parametrize(
    ("lens", "new", "kv_heads", "heads", "dim", "page_size"),
    [
        pytest.param([9, 1, 16], [9, 1, 16], 2, 8, 16, 4, id="prefill"),
        pytest.param([9, 13], [4, 7], 1, 3, 8, 6, id="later chunk"),
        pytest.param([300, 17, 64], [1, 1, 1], 1, 16, 128, 16, id="as in practice"),
        pytest.param([130], [70], 1, 1, 256, 128, id="wide heads, large pages, longer than a tile"),
        pytest.param([2300, 5, 1024], [1, 1, 1], 2, 6, 32, 16, id="several sections"),
        pytest.param([1100], [90], 1, 2, 32, 32, id="prefill over sections"),
        pytest.param([1030], [2], 1, 70, 8, 16, id="more heads than rows of a block"),
    ],
)
def test_attention(
    lens: list[int],
    new: list[int],
    kv_heads: int,
    heads: int,
    dim: int,
    page_size: int,
    dtype: torch.dtype,
    kernels: str,
) -> None:
    caches, tables, v = paged(lens, kv_heads, dim, page_size, dtype)
    q, starts = torch.randn(sum(new), heads, dim) * 3, torch.tensor([0, *new]).cumsum(0)
    seen = Paged(NONE, tables, starts, torch.tensor(lens))
    sinks = torch.linspace(-4, 12, heads)
    # The reference sees the very values that were rounded into the native cache.
    k_seen, v_seen = (c.float() for c in cached(*caches))
    for kind in ((None, None), (None, sinks), (1, None), (7, sinks), (100, sinks), (1500, sinks)):
        actual = cpu.attention(q, *caches, seen, dim**-0.5, *kind)
        if kernels in ("avx512_bf16", "amx") and dtype in (torch.bfloat16, torch.int8):  # queries, weights are rounded
            expected = reference.attention((q * dim**-0.5).bfloat16().float(), k_seen, v_seen, seen, 1.0, *kind)
            torch.testing.assert_close(actual, expected, atol=2**-8 * float(v.abs().max()), rtol=0)
        else:
            close(actual, reference.attention(q, k_seen, v_seen, seen, dim**-0.5, *kind))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_attention_does_not_depend_on_threads_company_or_chunks(instruction_set: str, dtype: torch.dtype) -> None:
    """The last 70 tokens of a long sequence: with all others of it or one by one, beside others or alone."""
    torch.manual_seed(7)
    start((1,), instruction_set)
    lens, new, dim = [40, 2120, 1], [40, 70, 1], 16
    caches, tables, _ = paged(lens, 2, dim, 16, dtype)
    q = torch.randn(sum(new), 6, dim) * 3
    of_all = Paged(NONE, tables, torch.tensor([0, 40, 110, 111]), torch.tensor(lens))
    sinks = torch.randn(6)
    kinds = (None, sinks), (50, sinks), (1100, sinks)
    together = [cpu.attention(q, *caches, of_all, 0.25, *kind) for kind in kinds]
    for threads in ((1,), (2,), (9,)):
        start(threads, instruction_set)
        for first, count in ((40, 70), (43, 5), (109, 1), (40, 1)):
            length = lens[1] - (110 - first - count)
            of_one = Paged(NONE, tables[1:2], torch.tensor([0, count]), torch.tensor([length]))
            for kind, of_all_rows in zip(kinds, together, strict=True):
                if kind[0]:  # pages that no query sees are not read: entries before the first one mean nothing
                    of_one = of_one._replace(block_tables=tables[1:2].clone())
                    before = max(0, length - count + 1 - kind[0]) // 16
                    of_one.block_tables[0, :before] = of_one.block_tables[0, before]
                alone = cpu.attention(q[first : first + count], *caches, of_one, 0.25, *kind)
                assert torch.equal(alone, of_all_rows[first : first + count])
    engine.start(1, "auto")


@pytest.mark.usefixtures("kernels")
def test_attention_of_no_sequence() -> None:
    """A data-parallel group may have none in a step."""
    caches = caches_of(cpu, (2, 4, 1, 8), torch.float32)
    of_none = Paged(NONE, NONE.view(0, 1), torch.zeros_like(NONE), NONE)
    assert cpu.attention(torch.empty(0, 2, 8), *caches, of_none, 1.0).shape == (0, 2, 8)


@pytest.mark.usefixtures("kernels")
def test_int8_cache_of_the_reference() -> None:
    k, v, slots = torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.tensor([6, 0, 9])
    ours, theirs = (caches_of(ops, (3, 4, 2, 16), torch.int8) for ops in (cpu, reference))
    for ops, caches in ((cpu, ours), (reference, theirs)):
        ops.write_kv(k, v, *caches, slots)
    rest = Paged(slots, torch.tensor([[1], [0], [2]]), torch.arange(4), torch.tensor([3, 1, 2])), 0.25
    q = torch.randn(3, 4, 16)
    actual, expected = cpu.attention(q, *ours, *rest), reference.attention(q, *theirs, *rest)
    torch.testing.assert_close(actual, expected, atol=float(v.abs().max()) / 127, rtol=0)  # a rounding may fall apart


@pytest.mark.usefixtures("kernels")
def test_silu_mul() -> None:
    x = torch.randn(50, 64) * 20
    x[0, :8] = torch.tensor([0.0, -0.0, 90, -90, 1e30, -1e30, 1e-30, -1e-30])
    close(cpu.silu_mul(x), reference.silu_mul(x))


@pytest.mark.usefixtures("kernels")
def test_gelu_mul() -> None:
    x = torch.randn(50, 64) * 5
    x[0, :8] = torch.tensor([0.0, -0.0, 90, -90, 1e10, -1e10, 1e-30, -1e-30])
    exact = torch.nn.functional.gelu(x[1:, :32]) * x[1:, 32:]
    close(cpu.gelu_mul(x), reference.gelu_mul(x))
    close(cpu.gelu_mul(x[:, 3:19], x[:, 40:56]), reference.gelu_mul(x[:, 3:19], x[:, 40:56]))
    assert float((cpu.gelu_mul(x)[1:] - exact).abs().max()) > 1e-4  # the approximation is another function


@pytest.mark.usefixtures("kernels")
def test_softcap_and_scale_by() -> None:
    for shape in ((1, 9001), (3, 37)):
        x, factor = torch.randn(shape) * 40, torch.tensor([0.3])
        for name, operand in (("softcap", 30.0), ("scale_by", factor)):
            ours, expected = x.clone(), getattr(reference, name)(x.clone(), operand)
            assert getattr(cpu, name)(ours, operand) is ours
            close(ours, expected)


@pytest.mark.parametrize("gate", [None, torch.tensor([[0.5], [-90], [90]])])
@pytest.mark.usefixtures("kernels")
def test_add_gated(gate: Tensor | None) -> None:
    x, y = torch.randn(3, 37), torch.randn(3, 37)
    expected = reference.add_gated(x.clone(), y, gate)
    assert cpu.add_gated(x, y, gate) is x
    close(x, expected)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 256, 8), (600, 64, 2), (3, 5, 5), (0, 4, 2)])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.usefixtures("kernels")
def test_routing(tokens: int, experts: int, top_k: int, renormalise: bool) -> None:
    logits = torch.randn(tokens, experts) * 4
    ways: list[Callable[[Any], tuple[Tensor, Tensor]]] = [
        lambda ops: ops.route_softmax(logits, top_k, renormalise),
        lambda ops: ops.route_softmax(logits, top_k, renormalise, factors=torch.ones(experts).cumsum(0)),
        lambda ops: ops.route_sigmoid(logits, torch.ones(experts).cumsum(0) / 99, top_k, renormalise),
        lambda ops: ops.route_sigmoid(logits, None, top_k, renormalise, 2.5),
    ]
    if experts > 5:
        below = torch.randn(experts) - 5  # zeros in place of scores that are out would be chosen
        ways += [
            lambda ops: ops.route_softmax(logits, top_k, renormalise, 16, Groups(8, 3, 1)),
            lambda ops: ops.route_sigmoid(logits, below, top_k, renormalise, 2.5, Groups(8, 4, 2)),
            lambda ops: ops.route_sigmoid(logits.round(), None, 1, renormalise, 1.0, Groups(32, 1, 2)),
        ]
    for route in ways:
        (weights, ids), (expected, expected_ids) = route(cpu), route(reference)
        assert torch.equal(ids, expected_ids)
        close(weights, expected)


@pytest.mark.usefixtures("kernels")
def test_of_equal_scores_the_smaller_ids_are_chosen() -> None:
    logits = torch.randint(0, 3, (40, 64)).float()
    for weights, ids in (cpu.route_softmax(logits, 8, True), cpu.route_sigmoid(logits, torch.zeros(64), 8, True)):
        assert torch.equal(ids, reference.route_softmax(logits, 8, True)[1])
        assert weights.isfinite().all()
    assert reference.route_sigmoid(logits * 0, None, 8, True)[1].tolist() == [list(range(8))] * 40


@pytest.mark.parametrize("width", [1, 5, 30000])
@pytest.mark.usefixtures("kernels")
def test_argmax_takes_the_first_of_the_largest(width: int) -> None:
    x = torch.randint(-40, 3, (5, width)).float()  # with many ties
    assert torch.equal(cpu.argmax(x), reference.argmax(x))


SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "all tokens": {"temperature": 0.7}, "hot": {"temperature": 1e30}}
SAMPLING |= {"cold": {"temperature": 1e-300}, "top-k": {"temperature": 1.3, "top_k": 20}}
SAMPLING |= {"top-k of all": {"temperature": 1.3, "top_k": 10**30}, "top-p": {"temperature": 0.7, "top_p": 0.9}}
SAMPLING |= {"nearly all": {"temperature": 2.0, "top_p": 0.999}, "no top-p": {"temperature": 2.0, "top_p": 0.0}}
SAMPLING |= {"min-p": {"temperature": 1.5, "min_p": 0.05}}
SAMPLING |= {"all filters": {"temperature": 1.1, "top_k": 300, "top_p": 0.8, "min_p": 0.01}}
SAMPLING |= {"penalties": {"presence_penalty": 1.5, "frequency_penalty": -0.7, "repetition_penalty": 1.3}}
SAMPLING |= {"drawn with penalties": {"temperature": 0.9, "frequency_penalty": 1.0, "logit_bias": {3: 9.0, 0: -100.0}}}


def choice(settings: dict[str, Any], row: int, width: int) -> Choice:
    generator = torch.Generator().manual_seed(row)
    ids = array("q", torch.randint(min(width, 50), (30,), generator=generator).tolist())
    return Choice(SamplingParams(**settings), 7 * row, ids, 11, 10 + row % 20)


@pytest.mark.parametrize("settings", SAMPLING)
@pytest.mark.usefixtures("kernels")
def test_sample(settings: str) -> None:
    """The token is the reference's, unless the number drawn is within rounding of the border between two tokens."""
    for width, rows in ((4, 24), (1000, 24), (33001, 5)):
        logits = torch.randn(rows, width) * 3
        choices = [choice(SAMPLING[settings], row, width) for row in range(rows)]
        chosen, expected = cpu.sample(logits, choices), reference.sample(logits, choices)
        for row in (chosen != expected).nonzero().flatten().tolist():
            assert choices[row].settings.temperature
            adjust(logits[row], choices[row])
            probabilities = filtered_probabilities(logits[row : row + 1], [choices[row].settings])[0].double()
            before = float(probabilities[: chosen[row]].sum())
            drawn = uniform(choices[row].seed, choices[row].position)
            assert before - 1e-5 <= drawn <= before + float(probabilities[chosen[row]]) + 1e-5
            assert probabilities[chosen[row]] > 0
        assert (chosen != expected).sum() <= 1


@pytest.mark.usefixtures("kernels")
def test_sample_of_equal_and_of_strange_logits() -> None:
    settings: list[dict[str, Any]] = [{"top_p": 0.5}, {"top_k": 2}, {"top_k": 3, "top_p": 0.25}, {"min_p": 1.0}]
    choices = [
        Choice(SamplingParams(temperature=1.0, **s), seed, array("q"), 0, 0) for s in settings for seed in range(100)
    ]
    tokens = cpu.sample(torch.zeros(400, 8), choices).view(4, 100)
    assert [sorted(set(row)) for row in tokens.tolist()] == [[0, 1, 2, 3], [*range(8)], [0, 1], [*range(8)]]
    rows = torch.tensor([[math.nan] * 3, [-math.inf] * 3, [0, math.inf, 1], [-math.inf, 0, math.nan]])
    assert cpu.sample(rows, choices[:4]).tolist() == [0, 0, 1, 1]


@pytest.mark.usefixtures("kernels")
def test_sample_obeys_a_grammar() -> None:
    """Tokens behind the end of the bits are not allowed either."""
    logits = torch.linspace(0, 1, 30).expand(64, 30).contiguous()
    bits = bytes([0b00010010, 0b10000000])  # tokens 1, 4 and 15
    for temperature, tokens in ((0.0, {15}), (50.0, {1, 4, 15})):
        wanted = SamplingParams(temperature=temperature)
        choices = [Choice(wanted, row, array("q"), 0, 0, bits) for row in range(64)]
        assert set(cpu.sample(logits, choices).tolist()) == tokens
        assert torch.equal(cpu.sample(logits, choices), reference.sample(logits, choices))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_signatures_are_the_interface(implementation: str) -> None:
    """An implementation has every op, with the parameters of `interface.py` in its order."""
    for name in NAMES:
        declared = list(inspect.signature(getattr(Ops, name)).parameters)[1:]
        assert list(inspect.signature(getattr(load_ops(implementation), name)).parameters) == declared


def test_impossible_shapes_and_sets_are_named() -> None:
    with pytest.raises(UserError, match="a matrix with 40 columns cannot be cut into groups of 32"):
        NativeMatrix(16, 40, FORMATS["q4"], CPU)
    with pytest.raises(UserError, match="an expert's 16 intermediate columns on this rank are no multiple of 32"):
        NativeExperts(2, 16, 64, FORMATS["q8"], CPU)
    with pytest.raises(UserError, match="head_dim: 513 is above 512"):
        cpu.kv_cache(1, 16, 1, 513, torch.float32, CPU)
    with pytest.raises(UserError, match="head_dim: 16, page_size: 5: the cpu keeps keys and values in pairs"):
        cpu.kv_cache(1, 5, 1, 16, torch.float32, CPU)
    with pytest.raises(UserError, match="instruction_set: sve is not a set of kernels; usable: generic"):
        engine.start(1, "sve")
    known = next(leaf.choices for leaf in leaves(Case) if leaf.path == "instruction_set")
    for name in set(known) - {"auto", *SETS}:
        with pytest.raises(UserError, match=f"instruction_set: {name} needs .*, which this CPU lacks; usable: generic"):
            engine.start(1, name)
    with pytest.raises(TypeError, match=r"torch.float64 cpu .* where torch.float32 on the cpu is needed"):
        cpu.rms_norm(torch.ones(2, 4, dtype=torch.float64), torch.ones(4), 1e-6)


def test_the_stub_is_fresh() -> None:
    """The committed signatures of the native module are those of the built one."""
    assert STUB.read_text() == native_stub(), "run .venv/bin/python -m umbra.tools.native_stub"

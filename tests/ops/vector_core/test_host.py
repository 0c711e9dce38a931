"""The host side of the vector-core ops, run on the twin's stand-in headers: shapes, tiling, workspace, refusals."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.ascend_c import Launch, TwinError, host
from umbra.ops.ascend.vector_core.planes import Planes, planes_of

pytestmark = pytest.mark.slow

Shape = tuple[int, ...]
Inputs = list[tuple[Shape, torch.dtype] | None]
HALF, BF16, INT, FLOAT, BYTE = torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.uint8
LAYOUT = ["sections", "groups", "planes", "lanes", "unit"]
FIELDS = ["tokens", "topK", "experts", "k", "n", "zeros", "pairs", "tiles", *LAYOUT, *(f"{name}2" for name in LAYOUT)]
FIELDS += ["s13", "z13", "w2", "s2", "z2"]  # of blocks in an arena
FIELDS += ["scored", "first", "sigmoid", "floatScores"]
FUSED, GEMV, UNPACK = "UmbraFusedMoeW4a16", "UmbraGemvW4a16", "UmbraUnpackW4a16"
SCORES, SLOTS = "UmbraFusedMoeScoresW4a16", "UmbraFusedMoeSlotsW4a16"
BATCH_MODE = 1  # all cores of a kernel start together: they wait for each other


def tiling(launch: Launch) -> dict[str, int]:
    assert len(launch.tiling) == -(-4 * len(FIELDS) // 8) * 8
    return dict(zip(FIELDS, struct.unpack_from(f"<{len(FIELDS)}I", launch.tiling), strict=True))


def laid(planes: Planes | None, which: str = "") -> dict[str, int]:
    """The fields of a layout; 0 if there is no second matrix."""
    return {name + which: getattr(planes, name) if planes else 0 for name in LAYOUT}


def matrix(rows: int, columns: int, planes: Planes, lead: Shape, dtype: torch.dtype, zeros: bool) -> Inputs:
    scales = (*lead, *planes.scales_shape(columns)), dtype
    return [((*lead, *planes.words_shape(columns)), BYTE), scales, scales if zeros else None]


def fused(
    tokens: int = 2,
    hidden: int = 256,
    inner: int = 96,
    group: int = 64,
    group2: int = 32,
    top_k: int = 3,
    experts: int = 5,
    zeros: bool = False,
    dtype: torch.dtype = BF16,
) -> Inputs:
    up, down = planes_of(hidden, group), planes_of(inner, group2, ordered=True)
    return [
        ((tokens, hidden), dtype),
        *matrix(hidden, 2 * inner, up, (experts,), dtype, zeros),
        *matrix(inner, hidden, down, (experts,), dtype, zeros),
        ((tokens, top_k), INT),
        ((tokens, top_k), dtype),
    ]


def scored(experts: int = 40, bias: bool = True, type: torch.dtype = FLOAT, tokens: int = 2, **sizes: Any) -> Inputs:
    bank = fused(tokens=tokens, **sizes)[:7]
    return [*bank, ((tokens, experts), type), ((experts,), FLOAT) if bias else None]


def gemv(
    tokens: int = 2, k: int = 256, n: int = 96, group: int = 128, zeros: bool = False, dtype: torch.dtype = BF16
) -> Inputs:
    return [((tokens, k), dtype), *matrix(k, n, planes_of(k, group), (), dtype, zeros)]


def unpack(
    k: int = 96, n: int = 64, group: int = 32, zeros: bool = False, dtype: torch.dtype = BF16, ordered: bool = True
) -> Inputs:
    return matrix(k, n, planes_of(k, group, ordered), (5,), dtype, zeros)


def slots() -> Inputs:
    return [((2, 256), BF16), ((9999,), BYTE), ((7,), INT), ((2, 3), INT), ((2, 3), BF16)]


GROUPS: dict[str, tuple[int, ...]] = {FUSED: (64, 32), SCORES: (3, True, 35, 64, 32), SLOTS: (96, 32, 32, 0)}
GROUPS |= {GEMV: (128,), UNPACK: (32, True, False, True)}


@pytest.mark.thorough
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("dtype", "key"), [(HALF, 1), (BF16, 2)])
def test_what_a_kernel_is_told(dtype: torch.dtype, key: int, zeros: bool) -> None:
    later = ("s13", "z13", "w2", "s2", "z2", "scored", "first", "sigmoid", "floatScores")
    same = dict(experts=5, zeros=int(zeros), tiles=0) | dict.fromkeys(later, 0)
    up, down, dense = planes_of(256, 64), planes_of(96, 32, ordered=True), planes_of(256, 128)
    two, one, none = laid(up) | laid(down, "2"), laid(dense) | laid(None, "2"), laid(down) | laid(None, "2")
    expected = {
        FUSED: (fused(zeros=zeros, dtype=dtype), (2, 256), two | dict(tokens=2, topK=3, k=256, n=96, pairs=1)),
        SCORES: (
            scored(zeros=zeros, dtype=dtype),
            (2, 256),
            two | dict(tokens=2, topK=3, k=256, n=96, pairs=1, scored=40, first=35, sigmoid=1, floatScores=1),
        ),
        GEMV: (gemv(zeros=zeros, dtype=dtype), (2, 96), one | dict(tokens=2, topK=1, experts=1, k=256, n=96, pairs=0)),
        UNPACK: (
            unpack(zeros=zeros, dtype=dtype),
            (5, 64, 96),
            none | dict(tokens=0, topK=0, k=96, n=64, pairs=0, tiles=1),
        ),
    }
    for op, (inputs, shape, fields) in expected.items():
        launch = host(op, inputs, cores=40, attributes=GROUPS[op])
        assert launch.outputs == {"y": (shape, dtype)}
        assert tiling(launch) == same | fields
        mode = 0 if op == UNPACK else BATCH_MODE  # its cores do not wait for each other
        assert (launch.key, launch.blocks, launch.schedule_mode) == (key, 40, mode)


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "key"), [(HALF, 3), (BF16, 4)])
def test_float_sums_are_a_key_and_change_nothing_else(dtype: torch.dtype, key: int) -> None:
    cases = (FUSED, fused(dtype=dtype)), (SCORES, scored(dtype=dtype)), (GEMV, gemv(dtype=dtype))
    for op, inputs in cases:
        without = host(op, inputs, attributes=GROUPS[op])
        assert host(op, inputs, attributes=[*GROUPS[op], True]) == replace(without, key=key)
        assert host(op, inputs, attributes=[*GROUPS[op], False]) == without


@given(k=st.integers(1, 256), group=st.sampled_from([32, 64, 128]), ordered=st.booleans())
def test_the_layout_is_that_of_python(k: int, group: int, ordered: bool) -> None:
    """For every number of rows: it holds each k once, in whole blocks of lanes."""
    rows = min(32 * k, 8192) // group * group
    if rows:
        planes = planes_of(rows, group, ordered)
        assert planes.order().sort().values.equal(torch.arange(rows))
        assert planes.lanes in range(16, 129, 16)
        assert planes.planes & (planes.planes - 1) == 0  # a power of two
        launch = host(UNPACK, unpack(rows, 8, group, ordered=ordered), attributes=[group, ordered, False, False])
        assert tiling(launch) == tiling(launch) | laid(planes)


def other(make: Callable[[], Inputs], index: int, shape: Shape, dtype: torch.dtype = BF16) -> Inputs:
    """With another input at `index`."""
    inputs = make()
    inputs[index] = (shape, dtype)
    return inputs


def widened(make: Callable[[], Inputs], index: int) -> Inputs:
    """With 16 values more in the last dimension of the input at `index`."""
    shape, dtype = make()[index]  # type: ignore[misc]
    return other(make, index, (*shape[:-1], shape[-1] + 16), dtype)


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "complaint"),
    [
        (GEMV, gemv(dtype=FLOAT), (128,), "no variant of the definition has these types"),
        (GEMV, other(gemv, 0, (256,)), (128,), r"input 0 must have 2 dimensions \(found 1\)"),
        (GEMV, other(gemv, 0, (9, 256)), (128,), r"there must be 8 tokens at most \(found 9\)"),
        (GEMV, other(gemv, 0, (2, 255)), (128,), r"K must be a multiple of 32 \(found 255\)"),
        (GEMV, gemv(), (256,), r"a group must be 32, 64 or 128 rows \(found 256\)"),
        (GEMV, gemv(), (), "the attribute group is required"),
        (GEMV, gemv(k=8224, group=32), (32,), r"K must be 8192 at most \(found 8224\)"),
        (GEMV, widened(gemv, 1), (128,), "w must have the planes, columns and lanes of its K and group"),
        (GEMV, widened(gemv, 2), (128,), r"scales must have a value for each column and group \(found 2304\)"),
        (FUSED, other(fused, 2, (4, 1, 192, 8)), (64, 32), r"as many experts, one or more \(found 4\)"),
        (FUSED, fused(tokens=8, top_k=33), (64, 32), r"256 pairs of a token and an expert at most \(found 264\)"),
        (FUSED, fused(inner=4128), (64, 32), r"I must be 4096 at most \(found 4128\)"),
        (FUSED, [*fused()[:4], *fused(experts=4)[4:]], (64, 32), "as many experts as w13"),
        (FUSED, [*fused(zeros=True)[:6], None, *fused()[7:]], (64, 32), r"must belong to both of w13 and w2"),
        (FUSED, other(fused, 7, (3, 3), INT), (64, 32), r"ids must have a row for each row of x \(found 3\)"),
        (SCORES, other(scored, 7, (3, 40), FLOAT), GROUPS[SCORES], r"scores must have a row .* \(found 3\)"),
        (SCORES, scored(513), GROUPS[SCORES], r"there must be 512 scores for a token at most \(found 513\)"),
        (SCORES, scored(), (9, True, 35, 64, 32), r"top_k must be 8 at most, and no more than scores \(found 9\)"),
        (SCORES, scored(), (3, True, 36, 64, 32), r"the experts after it must have scores \(found 36\)"),
        (SCORES, scored(), (3, False, 35, 64, 32), "a bias must be for sigmoids"),
        (SCORES, other(scored, 8, (41,), FLOAT), GROUPS[SCORES], r"a bias .* value for each score \(found 41\)"),
        (UNPACK, unpack(), (64, True, False, False), r"a group must divide its matrix's rows \(found 64\)"),
        (SLOTS, other(slots, 1, (3, 9), BYTE), GROUPS[SLOTS], r"input 1 must have 1 dimensions \(found 2\)"),
        (SLOTS, other(slots, 2, (8193,), INT), GROUPS[SLOTS], r"8192 experts at most \(found 8193\)"),
        (SLOTS, slots(), (80, 32, 32, 0), r"K must be a multiple of 32 \(found 80\)"),
        (SLOTS, slots(), (4128, 32, 32, 0), r"I must be 4096 at most \(found 4128\)"),
        (SLOTS, slots(), (96, 32, 64, 0), r"a group must divide its matrix's rows \(found 64\)"),
        (SLOTS, slots(), (96, 32, 32), "the attribute zeros is required"),
        (UNPACK, unpack(n=40), (32, True, False, True), r"N must be a multiple of 16 in tiles \(found 40\)"),
    ],
)
def test_refusals(op: str, inputs: Inputs, attributes: Sequence[int], complaint: str) -> None:
    with pytest.raises(TwinError, match=complaint):
        host(op, inputs, attributes=attributes)


def test_a_platform_without_vector_cores_is_refused() -> None:
    with pytest.raises(TwinError, match="the platform must have vector cores"):
        host(GEMV, gemv(), cores=0, attributes=[128])

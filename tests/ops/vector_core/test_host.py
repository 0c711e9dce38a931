"""The host side of the vector-core ops, run on the twin's stand-in headers: shapes, tiling, workspace, refusals."""

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.ascend_c import LIBRARY_WORKSPACE, Launch, TwinError, host

pytestmark = pytest.mark.slow

Shape = tuple[int, ...]
Inputs = list[tuple[Shape, torch.dtype] | None]
HALF, BF16, INT, FLOAT = torch.float16, torch.bfloat16, torch.int32, torch.float32
FIELDS = ["tokens", "topK", "experts", "k", "n", "group", "group2", "zeros", "cores", "parts"]
FIELDS += ["s13", "z13", "w2", "s2", "z2"]  # of blocks in an arena
FUSED, GEMV = "UmbraFusedMoeW4a16", "UmbraGemvW4a16"
BATCH_MODE = 1  # all cores of a kernel start together: they wait for each other


def tiling(launch: Launch) -> dict[str, int]:
    assert len(launch.tiling) == -(-4 * len(FIELDS) // 8) * 8
    return dict(zip(FIELDS, struct.unpack_from(f"<{len(FIELDS)}I", launch.tiling), strict=True))


def floats(launch: Launch) -> int:
    """Floats of the kernel's own part of the workspace."""
    left, rest = divmod(launch.workspace - LIBRARY_WORKSPACE, 4)
    assert rest == 0
    return left


def fused(
    tokens: int = 2, hidden: int = 256, inner: int = 96, group: int = 64, group2: int = 32, top_k: int = 3,
    experts: int = 5, zeros: bool = False, dtype: torch.dtype = BF16,
) -> Inputs:  # fmt: skip
    s13, s2 = ((experts, hidden // group, 2 * inner), dtype), ((experts, inner // group2, hidden), dtype)
    return [
        ((tokens, hidden), dtype),
        ((experts, hidden, 2 * inner // 8), INT), s13, s13 if zeros else None,
        ((experts, inner, hidden // 8), INT), s2, s2 if zeros else None,
        ((tokens, top_k), INT), ((tokens, top_k), dtype),
    ]  # fmt: skip


def gemv(
    tokens: int = 2, k: int = 256, n: int = 96, group: int = 128, zeros: bool = False, dtype: torch.dtype = BF16
) -> Inputs:
    scales = ((k // group, n), dtype)
    return [((tokens, k), dtype), ((k, n // 8), INT), scales, scales if zeros else None]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("dtype", "key"), [(HALF, 1), (BF16, 2)])
def test_what_a_kernel_is_told(dtype: torch.dtype, key: int, zeros: bool) -> None:
    same = dict(experts=5, k=256, n=96, zeros=int(zeros), cores=40, parts=2)  # K of 256 is two parts of 128 at most
    same |= dict(s13=0, z13=0, w2=0, s2=0, z2=0)
    expected = {
        FUSED: (fused(zeros=zeros, dtype=dtype), (2, 256), same | dict(tokens=2, topK=3, group=64, group2=32)),
        GEMV: (gemv(zeros=zeros, dtype=dtype), (2, 96), same | dict(tokens=2, topK=1, experts=1, group=128, group2=0)),
    }
    for op, (inputs, shape, fields) in expected.items():
        launch = host(op, inputs, cores=40)
        assert launch.outputs == {"y": (shape, dtype)}
        assert tiling(launch) == fields
        assert (launch.key, launch.blocks, launch.schedule_mode) == (key, 40, BATCH_MODE)


@pytest.mark.parametrize(("dtype", "key"), [(HALF, 3), (BF16, 4)])
def test_half_sums_are_a_key_and_change_nothing_else(dtype: torch.dtype, key: int) -> None:
    for op, inputs in ((FUSED, fused(dtype=dtype)), (GEMV, gemv(dtype=dtype))):
        assert host(op, inputs, attributes=[True]) == replace(host(op, inputs), key=key)
        assert host(op, inputs, attributes=[False]) == host(op, inputs)


# Qwen3-30B-A3B and -235B-A22B: whole on a rank, and over 8. MiniMax-M2: whole, over 8 and over 16.
@pytest.mark.parametrize(
    ("hidden", "inner", "parts"),
    [
        (2048, 768, 4), (2048, 96, 16), (4096, 1536, 2), (4096, 192, 16),
        (3072, 1536, 2), (3072, 192, 16), (3072, 96, 24),
    ],
)  # fmt: skip
def test_parts_and_workspace_of_real_models(hidden: int, inner: int, parts: int) -> None:
    launch = host(FUSED, fused(tokens=4, hidden=hidden, inner=inner, group=32, top_k=8), cores=48)
    assert tiling(launch)["parts"] == parts
    assert floats(launch) == 32 * inner * (2 * parts + 1) + 32 * hidden


@settings(deadline=None)  # the first call compiles
@given(
    cores=st.integers(1, 64), rows=st.integers(1, 250), blocks=st.integers(1, 64), words=st.integers(1, 600),
)  # fmt: skip
def test_parts_and_workspace(cores: int, rows: int, blocks: int, words: int) -> None:
    """K is split only while cores are idle, and not into parts below 128 rows."""
    k, n = 32 * blocks, 8 * words
    tiles = -(-n // 64)
    launch = host(GEMV, gemv(rows, k, n, group=32), cores)
    parts = tiling(launch)["parts"]
    assert parts == max(1, min(cores // tiles, k // 128))
    assert parts == 1 or parts * tiles <= cores
    assert floats(launch) == (rows * n * parts if parts > 1 else 0)


def test_one_part_of_a_fused_product_needs_no_room_for_parts() -> None:
    launch = host(FUSED, fused(inner=96), cores=2)
    assert (tiling(launch)["parts"], floats(launch)) == (1, 6 * 96 + 6 * 256)


def other(make: Callable[[], Inputs], place: int, shape: Shape, dtype: torch.dtype = BF16) -> Inputs:
    """With another input at `place`."""
    inputs = make()
    inputs[place] = (shape, dtype)
    return inputs


def without_z2() -> Inputs:
    inputs = fused(zeros=True)
    inputs[6] = None
    return inputs


@pytest.mark.parametrize(
    ("op", "inputs", "complaint"),
    [
        (GEMV, gemv(dtype=FLOAT), "no variant of the definition has these types"),
        (GEMV, other(gemv, 2, (2, 96), HALF), "no variant of the definition has these types"),
        (GEMV, other(gemv, 0, (256,)), r"input 0 must have 2 dimensions \(found 1\)"),
        (GEMV, other(gemv, 0, (0, 256)), r"there must be a token and an expert for it \(found 0\)"),
        (GEMV, other(gemv, 0, (2, 255)), r"x must have K columns \(found 255\)"),
        (GEMV, gemv(k=240, group=120), r"K must be a multiple of 32 \(found 240\)"),
        (GEMV, gemv(k=256, group=256), r"a group must be 32, 64 or 128 rows \(found 256\)"),
        (GEMV, gemv(k=256, group=16), r"a group must be 32, 64 or 128 rows \(found 16\)"),
        (GEMV, other(gemv, 2, (3, 96)), r"the rows of scales must divide K \(found 3\)"),
        (GEMV, other(gemv, 2, (0, 96)), r"the rows of scales must divide K \(found 0\)"),
        (GEMV, other(gemv, 2, (2, 100)), r"N, the columns of scales, must be 8 times those of w \(found 100\)"),
        (GEMV, other(gemv, 1, (256, 13), INT), r"N, the columns of scales, must be 8 times those of w \(found 96\)"),
        (GEMV, other(gemv, 3, (2, 88)), r"zeros must have as many values as scales, in the same shape \(found 176\)"),
        (FUSED, other(fused, 1, (256, 24), INT), r"input 1 must have 3 dimensions \(found 2\)"),
        (FUSED, other(fused, 2, (4, 4, 192)), r"as many experts, one or more \(found 4\)"),
        (FUSED, fused(top_k=0), r"there must be a token and an expert for it"),
        (FUSED, fused(tokens=37, top_k=7), r"256 pairs of a token and an expert at most \(found 259\)"),
        (FUSED, fused(experts=8193), r"8192 experts at most \(found 8193\)"),
        (FUSED, other(fused, 0, (2, 128)), r"x, w13 and w2 must agree in H, the rows of w13 \(found 256\)"),
        (FUSED, fused(inner=80, group2=40), r"K must be a multiple of 32 \(found 80\)"),
        (FUSED, [*fused()[:4], ((5, 64, 32), INT), ((5, 2, 256), BF16), *fused()[6:]], "two columns for each row"),
        (FUSED, [*fused()[:4], ((4, 96, 32), INT), ((4, 3, 256), BF16), *fused()[6:]], "as many experts as w13"),
        (FUSED, without_z2(), r"zero points must belong to both of w13 and w2 \(found 0\)"),
        (FUSED, other(fused, 7, (3, 3), INT), r"ids must have a row for each row of x \(found 3\)"),
        (FUSED, other(fused, 8, (2, 2), BF16), r"weights must have the shape of ids \(found 4\)"),
        (FUSED, other(fused, 8, (2, 3), FLOAT), "no variant of the definition has these types"),
    ],
)  # fmt: skip
def test_refusals(op: str, inputs: Inputs, complaint: str) -> None:
    with pytest.raises(TwinError, match=complaint):
        host(op, inputs)


def test_a_platform_without_vector_cores_is_refused() -> None:
    with pytest.raises(TwinError, match="the platform must have vector cores"):
        host(GEMV, gemv(), cores=0)

"""The kernels, unmodified, in the twin: their numbers, their traffic, and mistakes that must be found."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fakes.ascend_c import Library
from tests.fakes.ascend_c.launch import launch
from tests.ops.vector_core.weights import Mutation, Weight, distinct, random_weight, unnoticed
from tests.variants import thorough_after, thorough_but
from umbra.ops.ascend.vector_core import reference
from umbra.ops.ascend.vector_core.planes import planes_of
from umbra.ops.ascend.vector_core.signatures import InPlanes

pytestmark = pytest.mark.slow

HALF, BFLOAT = torch.float16, torch.bfloat16
DTYPES = thorough_but([HALF, BFLOAT], BFLOAT)  # of costly tests
BOUND = {HALF: 2e-3, BFLOAT: 1e-2}  # relative, of every row of y


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def worst_row(y: Tensor, expected: Tensor) -> float:
    """Largest relative error of a row; rows of zeros must be zeros."""
    y, expected = y.double().flatten(0, -2), expected.flatten(0, -2)
    norms = expected.norm(dim=-1)
    assert not y[norms == 0].count_nonzero()
    assert y.isfinite().all()
    return float(((y - expected).norm(dim=-1) / norms.clamp(min=1e-300)).max())


def random_matrix(k: int, n: int, group: int, dtype: torch.dtype, zeros: bool) -> Weight:
    (w,), (scales,), offsets = random_weight(1, k, n, group, dtype, zeros)
    return w, scales, None if offsets is None else offsets[0]


def gemv(
    rows: int,
    k: int,
    n: int,
    group: int,
    dtype: torch.dtype,
    zeros: bool,
    scale: float = 1.0,
    cores: int = 48,
    float_sums: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y, its exact value)"""
    weight = random_matrix(k, n, group, dtype, zeros)
    x = (torch.randn(rows, k) * scale).to(dtype)
    y, _ = launch("gemv", x, *weight, attributes=(group, float_sums), cores=cores)
    return y, reference.gemv_w4a16(x, InPlanes(*weight, group), precise=True)


def fused(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    groups: tuple[int, int],
    dtype: torch.dtype,
    zeros: bool,
    ids: Tensor | None = None,
    scale: float = 1.0,
    cores: int = 48,
    library: Library | None = None,
    float_sums: bool = False,
    largest: float = 0.0,
) -> tuple[Tensor, Tensor]:
    up = random_weight(experts, hidden, 2 * inner, groups[0], dtype, zeros)
    down = random_weight(experts, inner, hidden, groups[1], dtype, zeros, ordered=True)
    x = (torch.randn(tokens, hidden) * scale).to(dtype)
    if largest:
        x[:, -1] = largest
    ids = distinct(tokens, top_k, experts) if ids is None else ids
    weights = torch.rand(ids.shape).to(dtype)
    inputs = x, *up, *down, ids, weights
    y, _ = launch("fused_moe", *inputs, attributes=(*groups, float_sums), cores=cores, library=library)
    return y, reference.compute("fused_moe_w4a16", *inputs, *groups, precise=True)


SHAPES = [  # K, N; also more rows than the buffers hold, and two sections of K
    (32, 8),
    (96, 104),
    (192, 64),
    (320, 64),
    (768, 96),
    (1024, 768),
    (4096, 256),
    (96, 1288),
    (8192, 64),
]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_gemv(k: int, n: int, zeros: bool, dtype: torch.dtype) -> None:
    for group, rows in zip((32, 64, 128), (1, 3, 8), strict=True):
        if k % group == 0:
            for float_sums in (False, True):
                y, expected = gemv(rows, k, n, group, dtype, zeros, float_sums=float_sums)
                assert worst_row(y, expected) < BOUND[dtype], (group, rows, float_sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", thorough_but([False, True], True))
@pytest.mark.parametrize("groups", thorough_after(1, [((64, 32),), ((32, 32),), ((128, 64),)]))
def test_fused(groups: tuple[int, int], zeros: bool, dtype: torch.dtype) -> None:
    shapes = ((128, 128), (256, 96), (1024, 192), (512, 384))
    for (hidden, inner), (tokens, top_k) in zip(shapes, ((1, 8), (2, 3), (4, 2), (8, 2)), strict=True):
        if inner % groups[1] == 0:
            for float_sums in (False, True):
                y, expected = fused(tokens, top_k, 12, hidden, inner, groups, dtype, zeros, float_sums=float_sums)
                assert worst_row(y, expected) < BOUND[dtype], (hidden, inner, float_sums)


REAL = [  # hidden, inner, groups: of Qwen3-30B, of MiniMax-M2 over 16, of its AWQ over 8
    (2048, 768, (32, 32)),
    (3072, 96, (32, 32)),
    (3072, 192, (128, 64)),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("hidden", "inner", "groups"), REAL)
def test_real_widths(hidden: int, inner: int, groups: tuple[int, int]) -> None:
    """Two tokens that share an expert; zero points in groups of 64 and 128."""
    ids = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    y, expected = fused(2, 2, 2, hidden, inner, groups, BFLOAT, groups[0] > 32, ids)
    assert worst_row(y, expected) < BOUND[BFLOAT]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_sums_that_cancel_each_other(dtype: torch.dtype) -> None:
    """+1 and -1 in turns, such that the eight products of a run are equal, with noise, against equal weights: why there
    are float sums."""
    k, n, group = 2048, 256, 32
    planes = planes_of(k, group)
    runs = torch.arange(k) // planes.lanes // 8 % 2  # by place: planes 0 .. 7, then 8 .. 15
    x = torch.empty(4, k)
    x[:, planes.order()] = 1 - 2 * runs.float()
    x = (x + torch.randn(4, k) / 64).to(dtype)
    w = torch.full(planes.words_shape(n), 0x77, dtype=torch.uint8)
    scales = torch.full(planes.scales_shape(n), 0.01).to(dtype)
    expected = reference.gemv_w4a16(x, InPlanes(w, scales, None, group), precise=True)
    errors = [
        worst_row(launch("gemv", x, w, scales, None, attributes=(group, float_sums))[0], expected)
        for float_sums in (0, 1)
    ]
    assert errors[1] < BOUND[dtype] < errors[0]


@pytest.mark.thorough
def test_the_widest_tiles() -> None:
    """With few cores tiles have as many columns as the buffers hold."""
    y, expected = fused(2, 2, 4, 512, 256, (128, 128), BFLOAT, True, cores=2)
    assert worst_row(y, expected) < BOUND[BFLOAT]
    for k in (192, 512, 2048):
        y, expected = gemv(2, k, 512, 64, HALF, True, cores=2)
        assert worst_row(y, expected) < BOUND[HALF]


PATTERNS = {
    "all the same": torch.full((8, 8), 3),
    "twice by one token": torch.tensor([[5, 5, 1], [1, 5, 5]]),
    "invalid": torch.tensor([[-1, 0, 12, 11], [999, -7, 1 << 30, -(1 << 31)]]),
    "top thirty-two": torch.arange(12).repeat(22)[:256].view(8, 32),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_experts(name: str) -> None:
    ids = PATTERNS[name].int()
    tokens, top_k = ids.shape
    for zeros in (False, True):
        assert worst_row(*fused(tokens, top_k, 12, 128, 64, (32, 64), BFLOAT, zeros, ids)) < BOUND[BFLOAT]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_extreme_activations(scale: float, dtype: torch.dtype) -> None:
    """1e4 times 8 times 128 rows exceeds half; a row of small values beside a row of large ones keeps its precision."""
    for zeros in (False, True):
        assert worst_row(*gemv(4, 256, 128, 128, dtype, zeros, scale=scale * 0.05)) < BOUND[dtype]
    w, scales, _ = random_matrix(256, 128, 128, dtype, False)
    x = (torch.randn(3, 256) * torch.tensor([[1e4], [1e-2], [0.0]])).to(dtype)
    y, _ = launch("gemv", x, w, scales * 0.1, None, attributes=(128,))
    assert worst_row(y, reference.gemv_w4a16(x, InPlanes(w, scales * 0.1, None, 128), precise=True)) < BOUND[dtype]


@pytest.mark.thorough
def test_any_number_of_cores_gives_the_same_bits() -> None:
    """Each column is summed by one core, in an order that the number of cores does not change."""
    outs = []
    for cores in (48, 48, 40, 7, 1):
        torch.manual_seed(1)
        y, expected = fused(2, 4, 8, 512, 96, (32, 32), BFLOAT, True, cores=cores)
        assert worst_row(y, expected) < BOUND[BFLOAT]
        outs.append(y)
    assert all(torch.equal(y, outs[0]) for y in outs)


@pytest.mark.thorough
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("k", "n", "group", "ordered"), [(2048, 64, 32, False), (768, 96, 32, True), (192, 160, 64, True)]
)
def test_unpack(k: int, n: int, group: int, ordered: bool, zeros: bool, pairs: bool) -> None:
    """Every value is rounded once, so the bits are the reference's."""
    for dtype, cores in ((HALF, 48), (BFLOAT, 3)):
        weight = random_weight(3, k, n, group, dtype, zeros, ordered)
        expected = reference.unpack_w4a16(InPlanes(*weight, group), ordered, pairs)
        for tiles in (False, True):
            y, counts = launch("unpack", *weight, attributes=(group, ordered, pairs, tiles), cores=cores)
            assert torch.equal(y.flatten(), (reference.tiles(expected) if tiles else expected).flatten())
            assert counts.buffers["w"]["read"] == weight[0].nbytes
            assert counts.buffers["y"]["written"] == y.nbytes


HIDDEN, INNER, EXPERTS = 2048, 768, 128  # Qwen3-30B-A3B


@pytest.mark.thorough
@pytest.mark.parametrize(("rows", "k", "n"), [(1, HIDDEN, 2 * INNER), (8, INNER, HIDDEN)])
def test_gemv_reads_each_byte_of_its_weights_once(rows: int, k: int, n: int) -> None:
    """Up to as many rows as the buffers hold: 8192 values of x."""
    weight = random_matrix(k, n, 32, BFLOAT, True)
    _, counts = launch("gemv", torch.randn(rows, k).to(BFLOAT), *weight, attributes=(32,))
    read = {name: count["read"] for name, count in counts.buffers.items()}
    kept = planes_of(k, 32)
    scales = kept.sections * kept.kept * n * 2
    own = {"w": k * n // 2, "scales": scales, "zeros": scales}
    assert {name: read[name] for name in own} == own
    assert counts.buffers["y"] == {"read": 0, "written": rows * n * 2}
    assert counts.waits == 0


@pytest.mark.thorough
def test_little_goes_between_the_fused_products() -> None:
    tokens = 4
    up = random_weight(EXPERTS, HIDDEN, 2 * INNER, 32, BFLOAT, False)
    down = random_weight(EXPERTS, INNER, HIDDEN, 32, BFLOAT, False, ordered=True)
    ids = torch.arange(8 * tokens, dtype=torch.int32).view(tokens, 8)
    x, weights = torch.randn(tokens, HIDDEN).to(BFLOAT), torch.rand(tokens, 8).to(BFLOAT)
    y, counts = launch("fused_moe", x, *up, *down, ids, weights, attributes=(32, 32))
    read, chosen = {name: count["read"] for name, count in counts.buffers.items()}, len(ids.unique())
    assert (read["w13"], read["w2"]) == (chosen * HIDDEN * INNER, chosen * HIDDEN * INNER // 2)
    assert (read["s13"], read["s2"]) == (read["w13"] // 8, read["w2"] // 8)  # 2 bytes for 32 nibbles
    assert counts.buffers["y"]["written"] == y.nbytes
    assert counts.waits == 1
    work = [[core[phase]["repeats"]["Cast<half,int4b_t>"] for core in counts.cores] for phase in (0, 1)]
    assert max(work[0]) == min(work[0])  # each core has one tile of each expert
    assert max(work[1]) <= 1.06 * sum(work[1]) / 48  # 42 or 44 columns


PRODUCT, ROWS, FUSED, ROOM = "umbra_product.h", "umbra_rows.h", "umbra_fused.h", "umbra_room.h"
REPORT, WAIT = "AscendC::CrossCoreSetFlag<0, PIPE_MTE3>(kStored);", "AscendC::CrossCoreWaitFlag(kStored);"
AGAIN = REPORT.replace("kStored", "umbra::kStored")
ARRIVED = "Hand<HardEvent::MTE2_V>(room.pipe);\n        "
CONVERTED = "AscendC::Cast(rows, in, RoundMode::CAST_NONE, count * k);"
MISTAKES: dict[str, Mutation] = {  # the twin stops, or a number is wrong
    "cores do not wait for each other": (FUSED, WAIT, ";"),
    "no core reports that h is stored": (FUSED, REPORT, ";"),
    "one core reports twice": (FUSED, REPORT, AGAIN + "if (AscendC::GetBlockIdx() == 1) " + AGAIN),
    "the vector pipe reports": (FUSED, REPORT, REPORT.replace("MTE3", "V")),
    "no barrier between steps": (PRODUCT, "reduction.Step();\n        Barrier();", "reduction.Step();"),
    "a scalar is read before the copy has arrived": (ROOM, "Hand<HardEvent::MTE2_S>(pipe);", ";"),
    "rows are used before they have arrived": (ROWS, ARRIVED + CONVERTED, CONVERTED),
    "a tile too far": (PRODUCT, "route.begin + tile * route.width", "route.begin + tile * route.width + 8"),
    "a buffer too small": (ROOM, "pipe.InitBuffer(wordsBuf, 2 * kWords);", "pipe.InitBuffer(wordsBuf, kWords);"),
    "buffers too large": (
        ROOM,
        "pipe.InitBuffer(stream, depth, kMoved);",
        "pipe.InitBuffer(stream, depth, 2 * kMoved);",
    ),
    "sums that nobody began": (PRODUCT, "work.plane == 0 || !alone", "work.plane == 99"),
    "a section's sums begin again": (
        PRODUCT,
        "AscendC::Axpy(room.sums, room.last, static_cast<half>(1.0f), count);",
        "AscendC::Cast(room.sums, room.last, RoundMode::CAST_NONE, count);",
    ),
    "sums are overwritten": (PRODUCT, "while (pending.fresh && reduction.NeedsSums()) Pass();", ";"),
    "float sums of one plane": (
        PRODUCT,
        "AscendC::Axpy(room.sums, room.words[p * pitch], static_cast<half>(1.0f), work.width * lanes);",
        "AscendC::Axpy(room.sums, room.words[0], static_cast<half>(1.0f), work.width * lanes);",
    ),
    "float sums that nobody began": (
        PRODUCT,
        "if (next.fresh) AscendC::Duplicate(room.sums, 0.0f, work.width * lanes);",
        ";",
    ),
    "sums of eight planes": (PRODUCT, "w[5 * pitch]", "w[4 * pitch]"),
    "sums of four planes": (PRODUCT, "w[2 * pitch]", "w[pitch]"),
    "the last sum in half": (PRODUCT, "count >= 4 ? 3 * pitch : pitch", "pitch"),
    "lanes are folded in half": (PRODUCT, "w[from + f / 2]", "w[from]"),
    "lanes are folded in float": (PRODUCT, "room.sums[span * m.wide]", "room.sums[0]"),
    "half of the lanes of groups": (PRODUCT, "room.sums[kLanes]", "room.sums[0]"),
    "more than 64 groups": (PRODUCT, "m.kept > kLanes", "m.kept > 999"),
    "a second block of groups": (PRODUCT, "room.scaled[8]", "room.scaled[0]"),
    "the power of another row": (PRODUCT, "rows.Power(unit, r)", "rows.Power(unit, 0)"),
    "zero points in every block": (PRODUCT, "complete && matrix.hasZeros", "matrix.hasZeros"),
    "scales for zero points": (PRODUCT, "zeros ? task.scales[room.scalesBytes] : task.scales", "task.scales"),
    "sums of another section": (PRODUCT, "rows.SumsOfX(unit, r, work.section)", "rows.SumsOfX(unit, r, 0)"),
    "sums of groups without all lanes": (ROWS, "half >= m.wide", "half >= m.lanes"),
    "a row that is needed makes room": (ROWS, "if (at < slots) taken[at] = true;", ";"),
    "squares in another place": (ROWS, "(b + i) / m.planes * m.groups", "i / m.planes * m.groups"),
    "blocks in another place": (ROWS, "b / m.planes * m.wide", "0"),
    "planes in another place": (ROWS, "b % m.planes * m.lanes", "0"),
    "the largest value of some lanes": (ROWS, "left = Ceil(left, 8);", "left = Ceil(left, 16);"),
    "another row of h": (ROWS, "(unit.first + r - begin) * k", "(unit.first - begin) * k"),
    "powers of another window": (ROWS, "unit.first + r - begin / 8 * 8", "unit.first + r - begin"),
    "weights of another pair": (FUSED, "weights.of[pair[i]]", "weights.of[0]"),
    "the largest value of no tile": (FUSED, "AscendC::Max(powers, powers, in, pitch);", ";"),
    "another token": (FUSED, "unit.pair[r] / t.topK", "unit.pair[0] / t.topK"),
    "a tile is stored too early": (FUSED, "block.unit + 1 < units.count", "block.unit + 2 < units.count"),
    "rows are numbered by units": ("umbra_plan.h", "unit[u].first = rows;", "unit[u].first = next - 1;"),
}
SHARED = torch.tensor([[0, 2], [0, 1], [1, 2]], dtype=torch.int32)
CASES = [  # hidden, inner, ids, zeros, largest value of x
    (1024, 96, SHARED[:1], False, 1e5),
    (2048, 96, SHARED[:1], False, 0.0),
    (768, 768, SHARED[:2], True, 0.0),
    (4096, 64, SHARED, False, 0.0),
    (2048, 96, SHARED, True, 0.0),
    (64, 768, torch.arange(16, dtype=torch.int32).view(8, 2) % 3, False, 0.0),
]


def right(library: Library) -> bool:
    for float_sums, (hidden, inner, ids, zeros, largest) in product((False, True), CASES):
        y, expected = fused(
            len(ids),
            ids.shape[1],
            3,
            hidden,
            inner,
            (32, 32),
            BFLOAT,
            zeros,
            ids,
            cores=6,
            library=library,
            float_sums=float_sums,
            largest=largest,
        )
        errors = (y.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        if not errors.max() < BOUND[BFLOAT]:
            return False
    return True


@pytest.mark.thorough
def test_every_mistake_is_noticed(tmp_path: Path) -> None:
    assert unnoticed(tmp_path, "fused_moe", MISTAKES, right) == ["no mistake"]


UNPACKER = "umbra_unpack_w4a16.cpp"
UNPACKED_WRONG = [("column / kPairs % 2 * (m.n / 2)", "0")]
UNPACKED_WRONG += [("AscendC::Add(floats[p * plane], floats[p * plane], zeroOf, plane);", ";")]
UNPACKED_WRONG += [("source[lane]", "source[0]")]
UNPACKED_WRONG += [("kept[ScalesBytes()].template ReinterpretCast<T>()", "kept.template ReinterpretCast<T>()")]
UNPACKED_WRONG += [("p * m.lanes + lane", "lane"), ("tiles ? at * kPitch : at", "at")]
UNPACKED_WRONG += [("(work.section * m.planes + work.plane) * m.lanes", "work.plane * m.lanes")]
UNPACKED_WRONG += [("row * kTileRows", "row"), ("m.n * kTileRows", "columns * kTileRows"), ("tiles ? kPitch : 1", "1")]
UNPACKED_WRONG += [("kPitch - columns", "0")]


def unpacks(library: Library) -> bool:
    weight = random_weight(2, 768, 32, 32, BFLOAT, True)
    expected = reference.unpack_w4a16(InPlanes(*weight, 32), False, True)
    rows, tiles = (
        launch("unpack", *weight, attributes=(32, False, True, tiles), cores=3, library=library)[0].flatten()
        for tiles in (False, True)
    )
    return torch.equal(rows, expected.flatten()) and torch.equal(tiles, reference.tiles(expected).flatten())


@pytest.mark.thorough
def test_every_mistake_of_unpack_is_noticed(tmp_path: Path) -> None:
    mistakes = {right: (UNPACKER, right, wrong) for right, wrong in UNPACKED_WRONG}
    assert unnoticed(tmp_path, "unpack", mistakes, unpacks) == ["no mistake"]

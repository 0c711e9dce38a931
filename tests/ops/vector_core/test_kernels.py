"""The kernels, unmodified, in the twin: their numbers, their traffic, and mistakes that the twin must find."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops.ascend.vector_core import reference
from tests.fakes.ascend_c import TwinError
from tests.ops.vector_core.launch import KERNELS, distinct, launch, mutated, random_weight

pytestmark = pytest.mark.slow

HALF, BFLOAT = torch.float16, torch.bfloat16
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


def random_matrix(k: int, n: int, group: int, dtype: torch.dtype, zeros: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """w (K, N / 8), scales and perhaps zeros (K / G, N)."""
    (w,), (scales,), offsets = random_weight(1, k, n, group, dtype, zeros)
    return w, scales, None if offsets is None else offsets[0]


def gemv(rows: int, k: int, n: int, group: int, dtype: torch.dtype, zeros: bool, scale: float = 1.0, cores: int = 48,
         half_sums: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, its exact value)"""
    weight = random_matrix(k, n, group, dtype, zeros)
    x = (torch.randn(rows, k) * scale).to(dtype)
    y, _ = launch("gemv", x, *weight, cores=cores, half_sums=half_sums)
    return y, reference.gemv_w4a16(x, *weight, precise=True)


def fused(tokens: int, top_k: int, experts: int, hidden: int, inner: int, groups: tuple[int, int], dtype: torch.dtype,
          zeros: bool, ids: Tensor | None = None, scale: float = 1.0, cores: int = 48,
          folder: Path = KERNELS, half_sums: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    up = random_weight(experts, hidden, 2 * inner, groups[0], dtype, zeros)
    down = random_weight(experts, inner, hidden, groups[1], dtype, zeros)
    x = (torch.randn(tokens, hidden) * scale).to(dtype)
    ids = distinct(tokens, top_k, experts) if ids is None else ids
    weights = torch.rand(ids.shape).to(dtype)
    y, _ = launch("fused_moe", x, *up, *down, ids, weights, cores=cores, folder=folder, half_sums=half_sums)
    return y, reference.fused_moe_w4a16(x, *up, *down, ids, weights, precise=True)


SHAPES = [(32, 8), (96, 104), (192, 64), (256, 320), (768, 96), (1024, 768)]  # K, N


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_gemv(k: int, n: int, zeros: bool, dtype: torch.dtype) -> None:
    for group, rows in zip((32, 64, 128), (1, 3, 8), strict=True):
        if k % group == 0:
            y, expected = gemv(rows, k, n, group, dtype, zeros)
            assert worst_row(y, expected) < BOUND[dtype], (group, rows)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("groups", [(32, 32), (64, 32), (128, 64), (64, 64), (128, 128)])
def test_fused(groups: tuple[int, int], zeros: bool, dtype: torch.dtype) -> None:
    shapes = ((128, 128), (256, 96), (1024, 192), (512, 384))
    for (hidden, inner), (tokens, top_k) in zip(shapes, ((1, 8), (2, 3), (4, 2), (8, 2)), strict=True):
        if inner % groups[1] == 0:
            y, expected = fused(tokens, top_k, 12, hidden, inner, groups, dtype, zeros)
            assert worst_row(y, expected) < BOUND[dtype], (hidden, inner)


@pytest.mark.parametrize(("inner", "group2"), [(192, 64), (96, 32)])
def test_fused_in_the_widths_of_minimax_m2(inner: int, group2: int) -> None:
    """Over eight and sixteen ranks, with groups of 128 as in its AWQ checkpoints."""
    y, expected = fused(2, 2, 4, 3072, inner, (128, group2), BFLOAT, True)
    assert worst_row(y, expected) < BOUND[BFLOAT]


@pytest.mark.parametrize(("ranks", "group", "zeros"), [(8, 32, False), (8, 64, True), (16, 32, True)])
def test_minimax_m2(ranks: int, group: int, zeros: bool) -> None:
    """One rank's part of 16 experts (1536 columns over the ranks), of qkv and of the attention's output."""
    hidden, heads, kv_heads = 3072, 48 // ranks, max(8 // ranks, 1)
    assert worst_row(*fused(4, 8, 16, hidden, 1536 // ranks, (group, group), BFLOAT, zeros)) < BOUND[BFLOAT]
    for k, n in ((hidden, (heads + 2 * kv_heads) * 128), (heads * 128, hidden)):
        assert worst_row(*gemv(4, k, n, group, BFLOAT, zeros)) < BOUND[BFLOAT]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_dense(tokens: int, dtype: torch.dtype) -> None:
    for k, n, group, zeros in ((4096, 256, 128, True), (96, 1288, 32, False), (512, 2048, 64, True)):
        y, expected = gemv(tokens, k, n, group, dtype, zeros)
        assert worst_row(y, expected) < BOUND[dtype]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("zeros", [False, True])
def test_half_sums(zeros: bool, dtype: torch.dtype) -> None:
    """Random values, whose sums do not cancel each other, stay within the bounds."""
    for k, n, group, rows in ((32, 8, 32, 1), (192, 64, 64, 3), (1024, 768, 128, 8)):
        y, expected = gemv(rows, k, n, group, dtype, zeros, half_sums=True)
        assert worst_row(y, expected) < BOUND[dtype], (k, n)
    for hidden, inner, groups, tokens in ((256, 96, (32, 32), 1), (1024, 192, (64, 32), 8), (512, 384, (128, 128), 4)):
        y, expected = fused(tokens, 2, 12, hidden, inner, groups, dtype, zeros, half_sums=True)
        assert worst_row(y, expected) < BOUND[dtype], (hidden, inner)
    y, expected = gemv(4, 256, 128, 128, dtype, zeros, scale=500, half_sums=True)
    assert worst_row(y, expected) < BOUND[dtype]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_sums_that_cancel_each_other(dtype: torch.dtype) -> None:
    """+1 and -1 in turns of eight rows, with noise, against equal weights: why half sums are a switch."""
    k, n, group = 2048, 256, 32
    turns = torch.tensor([1.0, -1.0]).repeat_interleave(8).repeat(k // 16)
    x = (turns + torch.randn(4, k) / 64).to(dtype)
    w = torch.full((k, n // 8), 0x77777777, dtype=torch.int32)
    scales = torch.full((k // group, n), 0.01).to(dtype)
    expected = reference.gemv_w4a16(x, w, scales, None, precise=True)
    errors = [worst_row(launch("gemv", x, w, scales, None, half_sums=half)[0], expected) for half in (False, True)]
    assert errors[0] < BOUND[dtype] < errors[1]


@pytest.mark.parametrize("half_sums", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_widest_tiles_in_groups_of_128(zeros: bool, half_sums: bool) -> None:
    """With few cores tiles have 256 columns; with float sums a block is then half of a group of 128."""
    y, expected = fused(2, 2, 4, 512, 256, (128, 128), BFLOAT, zeros, cores=2, half_sums=half_sums)
    assert worst_row(y, expected) < BOUND[BFLOAT]
    y, expected = gemv(2, 512, 256, 128, HALF, zeros, cores=2, half_sums=half_sums)
    assert worst_row(y, expected) < BOUND[HALF]


PATTERNS = {
    "all the same": torch.full((8, 8), 3),
    "each token the same eight": torch.arange(8).repeat(8, 1),
    "twice by one token": torch.tensor([[5, 5, 1], [1, 5, 5]]),
    "invalid": torch.tensor([[-1, 0, 12, 11], [999, -7, 1 << 30, -(1 << 31)]]),
    "nobody": torch.full((2, 4), -1),
    "top one": torch.tensor([[4], [4], [2]]),
    "top thirty-two": torch.arange(12).repeat(22)[:256].view(8, 32),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_experts(name: str) -> None:
    ids = PATTERNS[name].int()
    tokens, top_k = ids.shape
    for zeros in (False, True):
        assert worst_row(*fused(tokens, top_k, 12, 128, 64, (32, 64), BFLOAT, zeros, ids)) < BOUND[BFLOAT]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_extreme_activations(scale: float, dtype: torch.dtype) -> None:
    """1e4 times 8 times 128 rows exceeds half; a row of small values beside a row of large ones keeps its precision."""
    for zeros in (False, True):
        assert worst_row(*gemv(4, 256, 128, 128, dtype, zeros, scale=scale * 0.05)) < BOUND[dtype]
    w, scales, _ = random_matrix(256, 128, 128, dtype, False)
    x = torch.randn(3, 256) * torch.tensor([[1e4], [1e-2], [0.0]])
    y, _ = launch("gemv", x.to(dtype), w, scales * 0.1, None)
    expected = reference.gemv_w4a16(x.to(dtype), w, scales * 0.1, None, precise=True)
    assert worst_row(y, expected) < BOUND[dtype]


def test_extreme_activations_of_the_whole_block() -> None:
    """Gate and up exceed half by far between the products."""
    assert worst_row(*fused(2, 4, 6, 256, 128, (32, 32), BFLOAT, True, scale=1e4)) < BOUND[BFLOAT]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_degenerate_scales(dtype: torch.dtype) -> None:
    w, scales, zeros = random_weight(3, 256, 128, 64, dtype, True)
    scales[0] = 0
    scales[1, :2] = torch.finfo(dtype).tiny
    scales[2, 1] = 8
    x = torch.randn(1, 256).to(dtype)
    assert zeros is not None
    for weight in zip(w, scales, zeros, strict=True):
        y, _ = launch("gemv", x, *weight)
        assert worst_row(y, reference.gemv_w4a16(x, *weight, precise=True)) < BOUND[dtype]


def test_ids_point_into_a_bank_of_slots() -> None:
    ids = torch.tensor([[4095, 17], [2048, 4095]], dtype=torch.int32)
    assert worst_row(*fused(2, 2, 4096, 64, 32, (32, 32), HALF, False, ids)) < BOUND[HALF]


@pytest.mark.parametrize("cores", [1, 7, 40, 48])
def test_any_number_of_cores_gives_close_and_each_the_same_bits(cores: int) -> None:
    first = []
    for _ in range(2):
        torch.manual_seed(1)
        y, expected = fused(2, 4, 8, 512, 96, (32, 32), BFLOAT, True, cores=cores)
        assert worst_row(y, expected) < BOUND[BFLOAT]
        first.append(y)
    assert torch.equal(*first)


HIDDEN, INNER, EXPERTS = 2048, 768, 128  # Qwen3-30B-A3B


@pytest.mark.parametrize(("rows", "k", "n"), [(1, HIDDEN, 2 * INNER), (8, INNER, HIDDEN), (8, HIDDEN, 2 * INNER)])
def test_gemv_reads_each_byte_of_its_weights_once(rows: int, k: int, n: int) -> None:
    weight = random_matrix(k, n, 32, BFLOAT, True)
    _, counts = launch("gemv", torch.randn(rows, k).to(BFLOAT), *weight)
    read = {name: count["read"] for name, count in counts.buffers.items()}
    own = {"w": k * n // 2, "scales": k // 32 * n * 2, "zeros": k // 32 * n * 2}
    assert {name: read[name] for name in own} == own
    assert counts.buffers["y"] == {"read": 0, "written": rows * n * 2}


@pytest.mark.parametrize("tokens", [1, 8])
def test_little_goes_between_the_fused_products(tokens: int) -> None:
    up, down = (
        random_weight(EXPERTS, HIDDEN, 2 * INNER, 32, BFLOAT, False),
        random_weight(EXPERTS, INNER, HIDDEN, 32, BFLOAT, False),
    )
    ids = distinct(tokens, 8, EXPERTS)
    x, weights = torch.randn(tokens, HIDDEN).to(BFLOAT), torch.rand(tokens, 8).to(BFLOAT)
    y, counts = launch("fused_moe", x, *up, *down, ids, weights)
    read, chosen = {name: count["read"] for name, count in counts.buffers.items()}, len(ids.unique())
    assert (read["w13"], read["w2"]) == (chosen * HIDDEN * INNER, chosen * HIDDEN * INNER // 2)
    assert (read["s13"], read["s2"]) == (read["w13"] // 8, read["w2"] // 8)  # 2 bytes for 32 nibbles
    between = counts.buffers["workspace"]
    assert between["read"] + between["written"] <= 0.02 * (read["w13"] + read["w2"])
    assert counts.buffers["y"]["written"] == y.nbytes
    assert counts.sync_alls == 2
    assert min(core["mte2"]["bytes"] for core in counts.per_core()) > 0  # all 48 have work


MISTAKES = {
    # what, in which file, becomes what: what the twin says
    "cores do not wait for each other": (
        "umbra_room.h", "    AscendC::SyncAll<true>();\n", "", "same phase|never written",
    ),
    "a barrier between dependent instructions": (
        "umbra_product.h", "kSummed / 2), kSummed});\n            AscendC::PipeBarrier<PIPE_V>();",
        "kSummed / 2), kSummed});", "PipeBarrier",
    ),
    "a scalar read before the copy has arrived": (
        "umbra_room.h", "        Hand<HardEvent::MTE2_S>(pipe);\n", "", "S runs after an unfinished MTE2",
    ),
    "a tile one column too far": (
        "umbra_product.h", "m.column = tile * split.width;", "m.column = tile * split.width + 8;",
        "outside|never written",
    ),
    "a buffer too small": (
        "umbra_room.h", "pipe.InitBuffer(weightsBuf, kBlock * sizeof(half));", "pipe.InitBuffer(weightsBuf, kBlock);",
        "outside its buffer",
    ),
    "more buffers than there is room for": ("umbra_room.h", "kDepth = 2", "kDepth = 3", "more than the UB"),
    "a tensor kept after it was given back": (
        "umbra_product.h", "        LocalTensor<int8_t> in = room.stream.template DeQue<int8_t>();\n",
        "        LocalTensor<int8_t> in = room.stream.template DeQue<int8_t>();\n        room.stream.FreeTensor(in);\n",
        "free|Free",
    ),
    "a sum that nobody began": ("umbra_product.h", "if (m.index == 0)", "if (m.index == 99)", "never written"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(tmp_path: Path, mistake: str) -> None:
    file, right, wrong, said = MISTAKES[mistake]
    folder = mutated(tmp_path, file, right, wrong)
    with pytest.raises(TwinError, match=said):
        fused(1, 8, 12, 1024, 128, (32, 32), BFLOAT, False, folder=folder)


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("umbra_product.h", "(m.index + m.shift) % m.moves", "m.shift % m.moves"),
        ("umbra_finish.h", "weights[d.unit.pair[r]], d.pitch", "weights[d.unit.pair[0]], d.pitch"),
        ("umbra_product.h", "row / bank.group * bank.n", "(row / bank.group + 1) % bank.group * bank.n"),
    ],
)
def test_a_wrong_number_is_seen(tmp_path: Path, file: str, right: str, wrong: str) -> None:
    """Mutations that break no rule of the twin, but give wrong numbers."""
    folder = mutated(tmp_path, file, right, wrong)
    ids = torch.tensor([[1, 2], [2, 1]], dtype=torch.int32)
    assert worst_row(*fused(2, 2, 12, 2048, 128, (32, 32), BFLOAT, False, ids, cores=2, folder=folder)) > BOUND[BFLOAT]

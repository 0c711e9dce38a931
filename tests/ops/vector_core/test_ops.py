"""The ops of the vector cores without a device: what their Meta functions refuse, and that the reference computes the
dense product of the same values."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from umbra.ops.ascend.vector_core import reference, schemas
from umbra.ops.ascend.vector_core.planes import planes_of
from umbra.ops.ascend.vector_core.signatures import CALLS
from umbra.ops.ascend.weights import AscendExperts, AscendMatrix, signed
from umbra.ops.formats import Format
from umbra.ops.formats.quantised import Quantised

SLOTS, SCORES, TILES = "fused_moe_slots_w4a16", "fused_moe_scores_w4a16", "unpack_tiles_w4a16"
T, K, N, E, TOP = 3, 128, 64, 4, 2  # for fused_moe_w4a16: K is H, N is I


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def words(k: int, n: int, *lead: int, ordered: bool = False) -> Tensor:
    return empty(*lead, *planes_of(k, 32, ordered).words_shape(n), dtype=torch.uint8)


def kept(k: int, n: int, *lead: int, ordered: bool = False) -> Tensor:
    return empty(*lead, *planes_of(k, 32, ordered).scales_shape(n))


def good(op: str) -> dict[str, Any]:
    ids, weights = empty(T, TOP, dtype=torch.int32), empty(T, TOP)
    if op == "gemv_w4a16":
        return dict(x=empty(T, K), w=words(K, N), scales=kept(K, N), zeros=None, group=32)
    if op in ("unpack_w4a16", TILES):
        tiled = dict(bank=empty(E, N, K)) if op == TILES else {}
        return dict(w=words(K, N, E), scales=kept(K, N, E), zeros=None, group=32, ordered=False, pairs=True) | tiled
    if op == SLOTS:
        arena, places = empty(9999, dtype=torch.uint8), empty(E, dtype=torch.int32)
        sizes = dict(inner=N, group=64, group2=32, zeros=True)
        return dict(x=empty(T, K), arena=arena, places=places, ids=ids, weights=weights, **sizes)
    w2, s2 = words(N, K, E, ordered=True), kept(N, K, E, ordered=True)
    bank: dict[str, Tensor | None] = dict(
        x=empty(T, K), w13=words(K, 2 * N, E), s13=kept(K, 2 * N, E), z13=None, w2=w2, s2=s2, z2=s2
    )
    if op == SCORES:
        scores, bias = empty(T, 40, dtype=torch.float32), empty(40, dtype=torch.float32)
        choice = dict(scores=scores, bias=bias, top_k=TOP, sigmoid=True, first_expert=36)
        return dict(**bank, **choice, group=32, group2=32)
    return dict(**bank, ids=ids, weights=weights, group=32, group2=32)


SHAPES = {"gemv_w4a16": (T, N), "fused_moe_w4a16": (T, K), "unpack_w4a16": (E, N, K), SLOTS: (T, K), SCORES: (T, K)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", SHAPES)
def test_shapes_and_types(op: str, dtype: torch.dtype) -> None:
    given = {n: t.to(dtype) if isinstance(t, Tensor) and t.dtype == torch.float16 else t for n, t in good(op).items()}
    out = getattr(torch.ops.umbra, op)(**given)
    assert (out.shape, out.dtype, out.device.type) == (SHAPES[op], dtype, "meta")


def test_tiles_are_written_to_the_bank() -> None:
    assert getattr(torch.ops.umbra, TILES)(**good(TILES)) is None


@pytest.mark.parametrize(
    ("op", "name", "wrong", "complaint"),
    [
        ("gemv_w4a16", "x", empty(T, K, dtype=torch.float32), r"x: torch\.float32: must be float16 or bfloat16"),
        ("gemv_w4a16", "x", empty(9, K), r"x: \(9, 128\): must be \(tokens, K\) with 8 tokens at most"),
        ("gemv_w4a16", "x", empty(T, 80), r"x: K of 80: must be a multiple of 32"),
        ("gemv_w4a16", "x", empty(T, 8224), r"x: K of 8224: must be 8192 at most"),
        ("gemv_w4a16", "group", 96, "group: 96: must be 32, 64 or 128, and divide 128"),
        ("gemv_w4a16", "w", words(K, N).char(), r"w: torch\.int8: must be uint8, two nibbles in a byte"),
        ("gemv_w4a16", "scales", kept(K, N).bfloat16(), r"scales: torch\.bfloat16: must be the type of x"),
        ("gemv_w4a16", "scales", empty(8, N), r"scales: \(8, 64\): must be \(1, 64, 8\): groups of 32"),
        ("gemv_w4a16", "zeros", empty(2, N), r"zeros: \(2, 64\) torch\.float16: must be as scales, \(1, 64, 8\)"),
        ("fused_moe_w4a16", "s13", kept(K, 2 * N, 2), r"s13: \(2, 1, 128, 8\): must be \(4, 1, 128, 8\)"),
        ("fused_moe_w4a16", "ids", empty(5, TOP, dtype=torch.int32), r"ids: \(5, 2\): must be \(3, k\)"),
        ("fused_moe_w4a16", "w2", words(K, K, E), r"w2: \(4, 1, 128, 64\): must be \(E, 1, N, 32\) for K of 64"),
        ("fused_moe_w4a16", "group2", 128, "group2: 128: must be 32, 64 or 128, and divide 64"),
        ("fused_moe_w4a16", "weights", empty(T, 4), r"weights: \(3, 4\): must be \(3, 2\)"),
        ("unpack_w4a16", "w", words(K, 40, E), r"s?: \(4, 1, 64, 8\): must be \(4, 1, 40, 8\)"),
        (TILES, "bank", empty(E, K, N), r"bank: \(4, 128, 64\) torch\.float16: must be \(4, 64, 128\) torch\.float16"),
        (SLOTS, "arena", empty(3, 9, dtype=torch.uint8), r"arena: \(3, 9\) torch\.uint8: must have one dimension"),
        (SLOTS, "places", empty(E, dtype=torch.int64), r"places: .* one dimension, of torch\.int32"),
        (SCORES, "scores", empty(T, 40, dtype=torch.bfloat16), r"scores: torch\.bfloat16: must be torch\.float16"),
        (SCORES, "scores", empty(T, 513), r"scores: \(3, 513\): must be of 512 experts at most"),
        (SCORES, "top_k", 9, "top_k: 9: must be 1 to 8"),
        (SCORES, "first_expert", 37, "first_expert: 37: this and the 3 after it must be among the 40"),
        (SCORES, "sigmoid", False, r"bias: \(40,\) torch\.float32: must be .*, for sigmoids only"),
        (SLOTS, "inner", 4128, "inner: 4128: must be a multiple of 32, 4096 at most"),
        (SLOTS, "group2", 128, "group2: 128: must be 32, 64 or 128, and divide 64"),
    ],
)
def test_what_does_not_belong_together_is_named(op: str, name: str, wrong: Any, complaint: str) -> None:
    with pytest.raises((TypeError, RuntimeError), match=complaint) as raised:
        getattr(torch.ops.umbra, op)(**good(op) | {name: wrong})
    assert "\n" not in str(raised.value)


def test_halves_that_are_not_of_the_same_experts_are_named() -> None:
    given = good("fused_moe_w4a16") | dict(w2=words(N, K, 2), s2=kept(N, K, 2), z2=None)
    with pytest.raises(RuntimeError, match=r"w2: \(2, 1, 128, 32\) with w13 \(4, 1, 128, 64\): must have as many"):
        torch.ops.umbra.fused_moe_w4a16(**given)


def stored(experts: int, zeros: bool, group: int) -> tuple[AscendExperts, AscendMatrix]:
    """Experts and a matrix of random values."""
    format, cpu = Format("q4", group, zeros), torch.device("cpu")
    mixture = AscendExperts(experts, N, K, format, torch.float16, cpu, in_planes=True)
    matrix = AscendMatrix(N, K, format, torch.float16, cpu, in_planes=True)
    matrix.fill(0, torch.randn(N // 2, K))
    matrix.fill(N // 2, torch.randn(N // 2, K))
    for expert in range(experts):
        for which in ("gate", "up", "down"):
            mixture.fill(expert, which, torch.randn((K, N) if which == "down" else (N, K)))
    return mixture, matrix


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64])
def test_the_reference_is_the_dense_product(group: int, zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product is that of the values that the loader was given, rounded to 4 bits, in their order."""
    torch.manual_seed(group)
    given: list[Tensor] = []

    def rounded(part: Tensor | Quantised, format: Format) -> tuple[Tensor, Tensor, Tensor]:
        nibbles, scales, offsets = signed(part, format)
        scales = scales.half()
        given.append(((nibbles.unflatten(1, (-1, group)) + offsets[..., None]) * scales[..., None].double()).flatten(1))
        return nibbles, scales, offsets

    monkeypatch.setattr("umbra.ops.ascend.weights.signed", rounded)
    monkeypatch.setattr("umbra.ops.ascend.weights.in_order", lambda part, order: part[order])
    experts, matrix = stored(E, zeros, group)
    order = planes_of(N, group, ordered=True).order()
    dense, parts = torch.cat(given[:2]), given[2:]
    gates, ups = (torch.empty(E, N, K, dtype=torch.float64) for _ in range(2))
    for expert in range(E):
        gates[expert, order], ups[expert, order] = parts[3 * expert : 3 * expert + 2]
    downs = torch.stack(parts[2::3])
    x, weights = torch.randn(T, K).half(), torch.rand(T, TOP)
    ids = torch.tensor([[0, -1], [3, E], [2, 2]], dtype=torch.int32)

    here = ((ids >= 0) & (ids < E))[..., None]
    chosen = ids.clamp(0, E - 1).long()
    gate, up = (torch.einsum("th,tkih->tki", x.double(), part[chosen]) * here for part in (gates, ups))
    moe = (torch.einsum("tki,tkhi->tkh", silu(gate) * up, downs[chosen]) * weights[..., None]).sum(1)

    w13, w2 = experts.w13, experts.w2
    planes = w13.data, w13.scales, w13.offsets, w2.data, w2.scales, w2.offsets
    calls: dict[str, tuple[tuple[Any, ...], Tensor]] = {
        "gemv_w4a16": ((x, matrix.data, matrix.scales, matrix.offsets, group), x.double() @ dense.T),
        "fused_moe_w4a16": ((x, *planes, ids, weights, group, group), moe),
    }
    for name, (arguments, expected) in calls.items():
        exact, once = reference.compute(name, *arguments, precise=True), reference.compute(name, *arguments)
        assert (exact.dtype, once.dtype) == (torch.float64, torch.float16), name
        torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-9, msg=name)
        torch.testing.assert_close(once.double(), expected, rtol=1e-3, atol=1e-2, msg=name)
    values = reference.compute("unpack_w4a16", *planes[:3], group, False, True)
    back = torch.empty_like(gates)
    back[..., planes_of(K, group).order()] = values[:, :N].double()
    torch.testing.assert_close(back, gates[:, order], rtol=1e-3, atol=0)


def test_more_is_not_declared_than_has_a_reference() -> None:
    assert {*CALLS} == {*SHAPES, TILES} == {*reference.OPS}
    declared = {name for name in dir(schemas) if name.endswith("_w4a16")}
    assert declared == {*CALLS}

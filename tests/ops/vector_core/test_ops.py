"""The ops of the vector cores without a device: what their Meta functions refuse, and that the reference computes the
dense product of the same values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from ops.ascend.vector_core import reference, schemas
from ops.ascend.weights import pack, quantise

SLOTS = "fused_moe_slots_w4a16"
T, K, N, E, TOP = 3, 128, 64, 4, 2  # for fused_moe_w4a16: K is H, N is I


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def words(*shape: int) -> Tensor:
    return empty(*shape[:-1], shape[-1] // 8, dtype=torch.int32)


def good(op: str) -> dict[str, Any]:
    ids, weights = empty(T, TOP, dtype=torch.int32), empty(T, TOP)
    if op == "gemv_w4a16":
        return dict(x=empty(T, K), w=words(K, N), scales=empty(K // 32, N), zeros=None)
    if op == SLOTS:
        arena, places = empty(9999, dtype=torch.uint8), empty(E, dtype=torch.int32)
        sizes = dict(inner=N, group=64, group2=32, zeros=True)
        return dict(x=empty(T, K), arena=arena, places=places, ids=ids, weights=weights, **sizes)
    return dict(
        x=empty(T, K), w13=words(E, K, 2 * N), s13=empty(E, 1, 2 * N), z13=None, w2=words(E, N, K),
        s2=empty(E, 2, K), z2=empty(E, 2, K), ids=ids, weights=weights,
    )  # fmt: skip


SHAPES = {
    "gemv_w4a16": (T, N),
    "fused_moe_w4a16": (T, K),
    SLOTS: (T, K),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", SHAPES)
def test_shapes_and_types(op: str, dtype: torch.dtype) -> None:
    given = {n: t.to(dtype) if isinstance(t, Tensor) and t.dtype == torch.float16 else t for n, t in good(op).items()}
    out = getattr(torch.ops.umbra, op)(**given)
    assert (out.shape, out.dtype, out.device.type) == (SHAPES[op], dtype, "meta")


@pytest.mark.parametrize(
    ("op", "name", "wrong", "complaint"),
    [
        ("gemv_w4a16", "x", empty(T, K, dtype=torch.float32), r"x: torch\.float32: must be float16 or bfloat16"),
        ("gemv_w4a16", "x", empty(K), r"x: \(128,\): must be \(tokens, K\)"),
        ("gemv_w4a16", "x", empty(9, K), r"x: \(9, 128\): must be \(tokens, K\) with 8 tokens at most"),
        ("gemv_w4a16", "x", empty(T, 80), r"x: K of 80: must be a multiple of 32"),
        ("gemv_w4a16", "x", empty(T, 160), r"w: \(128, 8\): must be \(K, N / 8\) with K of 160"),
        ("gemv_w4a16", "w", empty(K, 8, dtype=torch.int8), r"w: torch\.int8: must be int32, words of 8 nibbles"),
        ("gemv_w4a16", "w", words(E, K, N), r"w: \(4, 128, 8\): must be \(K, N / 8\)"),
        ("gemv_w4a16", "scales", empty(4, N, dtype=torch.bfloat16), r"scales: torch\.bfloat16: must be the type of x"),
        ("gemv_w4a16", "scales", empty(8, N), r"scales: \(8, 64\): must be one of \[\(4, 64\), \(2, 64\), \(1, 64\)\]"),
        ("gemv_w4a16", "zeros", empty(2, N), r"zeros: \(2, 64\) torch\.float16: must be as scales, \(4, 64\)"),
        ("fused_moe_w4a16", "w13", words(K, N), r"w13: \(128, 8\): must be \(E, K, N / 8\)"),
        ("fused_moe_w4a16", "s13", empty(2, 2, 2 * N), r"s13: \(2, 2, 128\): must be one of \[\(4, 4, 128\)"),
        ("fused_moe_w4a16", "z13", empty(E, 1, 2 * N, dtype=torch.int32), r"z13: .* torch\.int32: must be as"),
        ("fused_moe_w4a16", "ids", empty(T, TOP, dtype=torch.int64), r"ids: torch\.int64: must be torch\.int32"),
        ("fused_moe_w4a16", "ids", empty(5, TOP, dtype=torch.int32), r"ids: \(5, 2\): must be \(3, k\)"),
        ("fused_moe_w4a16", "x", empty(9, K), r"x: \(9, 128\): .* 8 tokens at most"),
        ("fused_moe_w4a16", "w2", words(E, K, K), r"w2: \(4, 128, 16\): must be \(E, K, N / 8\) with K of 64"),
        ("fused_moe_w4a16", "weights", words(T, TOP), r"weights: torch\.int32: must be torch\.float16"),
        ("fused_moe_w4a16", "weights", empty(T, 4), r"weights: \(3, 4\): must be \(3, 2\)"),
        (SLOTS, "x", empty(9, K), r"x: \(9, 128\): .* 8 tokens at most"),
        (SLOTS, "arena", empty(3, 9, dtype=torch.uint8), r"arena: \(3, 9\) torch\.uint8: must have one dimension"),
        (SLOTS, "arena", empty(9), r"arena: \(9,\) torch\.float16: must have one dimension, of torch\.uint8"),
        (SLOTS, "places", empty(E, dtype=torch.int64), r"places: .* one dimension, of torch\.int32"),
        (SLOTS, "inner", 48, "inner: 48: must be a multiple of 32"),
        (SLOTS, "group", 256, "group: 256: must be 32, 64 or 128, and divide 128"),
        (SLOTS, "group2", 128, "group2: 128: must be 32, 64 or 128, and divide 64"),
        (SLOTS, "ids", empty(5, TOP, dtype=torch.int32), r"ids: \(5, 2\): must be \(3, k\)"),
        (SLOTS, "weights", empty(T, TOP).float(), r"weights: torch\.float32: must be torch\.float16"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together_is_named(op: str, name: str, wrong: Any, complaint: str) -> None:
    with pytest.raises((TypeError, RuntimeError), match=complaint) as raised:
        getattr(torch.ops.umbra, op)(**good(op) | {name: wrong})
    assert "\n" not in str(raised.value)


def test_halves_that_are_not_of_the_same_experts_are_named() -> None:
    given = good("fused_moe_w4a16") | dict(w2=words(2, N, K), s2=empty(2, 2, K), z2=None)
    with pytest.raises(RuntimeError, match=r"w2: \(2, 64, 16\) beside w13 \(4, 128, 16\): must be"):
        torch.ops.umbra.fused_moe_w4a16(**given)


def matrices(inputs: int, outputs: int, group: int, zeros: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(words, scales, zeros) of E random matrices, and the values (E, K, N) that they hold."""
    kept = []
    for _ in range(E):
        nibbles, scales, offsets = quantise(torch.randn(outputs, inputs), group, zeros)
        scales = scales.half()
        values = (nibbles.unflatten(1, (-1, group)) + offsets[..., None]) * scales[..., None].double()
        kept.append((pack(nibbles.T), scales.T, offsets.half().T, values.flatten(1).T))
    w, scales, offsets, values = (torch.stack(parts) for parts in zip(*kept, strict=True))
    return w, scales, offsets if zeros else None, values


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64])
def test_the_reference_is_the_dense_product(group: int, zeros: bool) -> None:
    torch.manual_seed(group)
    w13, s13, z13, wide = matrices(K, 2 * N, group, zeros)
    w2, s2, z2, tall = matrices(N, K, 32, zeros)
    x, weights = torch.randn(T, K).half(), torch.rand(T, TOP)
    ids = torch.tensor([[0, -1], [3, E], [2, 2]], dtype=torch.int32)

    here = ((ids >= 0) & (ids < E))[..., None]
    chosen = ids.clamp(0, E - 1).long()
    rows = torch.einsum("th,tkhi->tki", x.double(), wide[chosen]) * here
    inner = silu(rows[..., :N]) * rows[..., N:]
    moe = (torch.einsum("tki,tkih->tkh", inner, tall[chosen]) * weights[..., None]).sum(1)

    calls: dict[str, tuple[Callable[..., Tensor], tuple[Tensor | None, ...], Tensor]] = {
        "gemv": (reference.gemv_w4a16, (x, w13[1], s13[1], None if z13 is None else z13[1]), x.double() @ wide[1]),
        "fused": (reference.fused_moe_w4a16, (x, w13, s13, z13, w2, s2, z2, ids, weights), moe),
    }
    for name, (op, given, expected) in calls.items():
        exact, rounded = op(*given, precise=True), op(*given)
        assert (exact.dtype, rounded.dtype) == (torch.float64, torch.float16), name
        torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-9, msg=name)
        torch.testing.assert_close(rounded.double(), expected, rtol=1e-3, atol=1e-2, msg=name)


def test_more_is_not_declared_than_has_a_reference() -> None:
    declared = {name for name in dir(schemas) if name.endswith("_w4a16")}
    assert declared == SHAPES.keys() == {name for name in dir(reference) if name.endswith("_w4a16")}

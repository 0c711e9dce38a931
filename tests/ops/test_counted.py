"""The counts of each op of a step, to the value: bytes, products, kernels and messages. tests/ascend/test_shapes.py
compares the tensors with those of Ascend's ops."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from umbra.ops.ascend.counted import AscendCosts
from umbra.ops.ascend.layout import AscendLayout
from umbra.ops.counted import Collective, CountedExchange, CountedOps, Done, OpCosts
from umbra.ops.cpu.layout import CpuLayout
from umbra.ops.formats import FORMATS, Format
from umbra.ops.interface import Heads, Ops, Paged, Recurrent, Rounded
from umbra.ops.specs import SPECS

BF16, META = torch.bfloat16, torch.device("meta")
PAGE = 128


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=META)


def counted(experts: int = 128) -> CountedOps:
    """Ascend's, in a layer that occurs seven times."""
    ops = CountedOps(AscendLayout(BF16), BF16, PAGE, experts, AscendCosts)
    ops.notes.multiple = 7
    return ops


def heads(kv_heads: int, width: int = 2) -> Heads:
    angle = zeros(3, width)
    return Heads(kv_heads, 1e-6, zeros(width), zeros(width), angle, angle)


def test_every_op_of_a_step_has_a_spec() -> None:
    stores = {
        "matrix",
        "stack",
        "expert_matrices",
        "head_matrices",
        "table",
        "fill_table",
        "kv_cache",
        "latent_cache",
        "row_cache",
    }
    others = {"vector_type", "paging", "rounding_norm", "latent_prolog", "argmax", "sample"}
    assert {name for name in vars(Ops) if not name.startswith("_")} == {*SPECS, *stores, *others}


def test_ops_on_rows() -> None:
    ops = counted()
    x, y = zeros(3, 10), zeros(3, 4)
    rows = ops.embedding(zeros(5, dtype=torch.int64), zeros(20, 10), None)
    assert (rows.shape, rows.dtype) == ((5, 10), BF16)
    assert ops.rms_norm(x, y, 1e-6).shape == x.shape
    assert [t.shape for t in ops.add_rms_norm(x, x, x, 1e-6)] == [x.shape] * 2
    assert ops.rope(x, y, x, x) == (x, y)
    q = ops.norm_rope_write(zeros(3, 12), heads(1), x, x, x, None)
    assert q.shape == (3, 4, 2)  # of six heads, one each has keys and values
    assert [(t.shape, t.dtype) for t in ops.route_softmax(x, 2, True)] == [((3, 2), BF16), ((3, 2), torch.int32)]
    assert [t.shape for t in ops.route_sigmoid(x, None, 4, True)] == [(3, 4)] * 2
    ops.write_kv(x, y, x, x, x)
    assert ops.silu_mul(x).shape == (3, 5)
    assert [ops.gelu_mul(x).shape, ops.gelu_mul(x, x).shape] == [(3, 5), (3, 10)]
    totals: list[Tensor] = []
    parts = [x, x[:, :4]]
    normed = ops.split_rms_norm(parts, parts, (10, 4), 1e-6, lambda t: totals.append(t) or t)  # type: ignore[func-returns-value]
    assert [t.shape for t in normed] == [(3, 10), (3, 4)]
    assert [(t.numel(), t.dtype) for t in totals] == [(6, torch.float32)]
    assert ops.notes.done == [
        Done("embedding", 7, 1, rows=200),
        Done("rms_norm", 7, 1, rows=120),
        Done("add_rms_norm", 7, 1, rows=240),
        Done("rope", 7, 1, rows=2 * 60 + 2 * 24),
        Done("norm_rope_write", 7, 1, rows=2 * 72),
        Done("route", 7, 1, rows=60),
        Done("route", 7, 1, rows=60),
        Done("write_kv", 7, 2, rows=2 * 60 + 2 * 24),
        Done("silu_mul", 7, 1, rows=3 * 10 * 2 + 3 * 5 * 2),
        Done("gelu_mul", 7, 1, rows=3 * 10 * 2 + 3 * 5 * 2),
        Done("gelu_mul", 7, 1, rows=3 * 3 * 10 * 2),
        Done("split_rms_norm", 7, 6, rows=2 * 3 * 14 * 2),
    ]


def test_activations_on_a_host_are_floats() -> None:
    ops = CountedOps(CpuLayout(BF16), torch.float32, PAGE, 128)
    out = ops.embedding(zeros(5, dtype=torch.int64), zeros(20, 10), None)
    assert out.dtype == torch.float32
    assert ops.notes.done == [Done("embedding", 1, 1, rows=400)]


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_products_of_a_matrix(kind: str) -> None:
    ops = counted()
    weight = ops.matrix(6, 10, FORMATS[kind], META)
    out = ops.linear(zeros(3, 10), weight, None)
    assert (out.shape, out.dtype) == ((3, 6), getattr(torch, kind))
    rows = 2 * (30 + 18)
    assert ops.notes.done == [Done("linear", 7, 1, weights=weight.nbytes, rows=rows, macs=180)]


def test_four_bits_are_unpacked_where_no_kernel_takes_the_columns() -> None:
    ops = CountedOps(AscendLayout(BF16), BF16, PAGE, 128, AscendCosts)
    for columns in (8192, 16384):
        ops.linear(zeros(3, columns), ops.matrix(8, columns, Format("q4", 32), META), None)
    assert [(done.plain, done.few) for done in ops.notes.done] == [(False, True), (False, False)]


def test_products_by_int8_read_a_byte_a_weight() -> None:
    ops = counted()
    weight = ops.matrix(64, 32, Format("w8a8", 32), META)
    assert ops.linear(zeros(3, 32), weight, None).dtype == BF16
    weights, rows = 64 * 32 + 4 * 64, 2 * 3 * (32 + 64)
    assert ops.notes.done == [Done("linear by int8", 7, 2, weights=weights, rows=rows, macs=3 * 64 * 32)]
    norm, x = ops.rounding_norm(weight), zeros(3, 32)
    assert norm
    rounded, _ = norm(x, x, x[0], 1e-6, None)
    assert isinstance(rounded, Rounded)
    assert rounded.linear(weight, None).shape == (3, 64)
    assert [(done.name, done.kernels) for done in ops.notes.done[1:]] == [
        ("add_rms_norm", 1),
        ("linear of rounded rows", 1),
    ]
    assert ops.rounding_norm(ops.matrix(64, 32, FORMATS["bfloat16"], META)) is None


def test_attention_sees_what_is_cached_and_what_came_before_in_the_step() -> None:
    ops = counted()
    cache = ops.kv_cache(5, PAGE, 2, 2, BF16, META)  # of five pages, with four values of a token
    q = zeros(5, 2, 8)
    assert ops.attention(q, cache, cache, Paged(q, q, (0, 2, 5), (2, 10)), 1.0).shape == q.shape
    pairs = (1 + 2) + (8 + 9 + 10)
    token_bytes = 2 * 4 * 2  # bytes of a token's keys and values
    assert ops.notes.done == [Done("attention", 7, 1, rows=2 * 160, cached=token_bytes * 12, macs=2 * pairs * 2 * 8)]
    host = CountedOps(CpuLayout(BF16), torch.float32, PAGE, 128)
    latents = (host.latent_cache(0, 5, PAGE, 8, 4, BF16, META),)  # which all heads share, read once for keys and values
    assert host.latent_attention(q, q[..., :4], latents, Paged(q, q, (0, 2, 5), (2, 10)), 1.0).shape == q.shape
    read, macs = 2 * (8 + 4) * 12, pairs * 2 * (8 + 4 + 8)
    assert host.notes.done == [Done("latent_attention", 1, 1, rows=4 * 200, cached=read, macs=macs)]


@pytest.mark.parametrize(
    ("layout", "dtype", "costs", "kernels"),
    [(AscendLayout, BF16, AscendCosts, 5), (CpuLayout, torch.float32, OpCosts, 1)],
    ids=["ascend", "cpu"],
)
def test_a_mixture_reads_the_experts_that_its_tokens_are_expected_to_use(
    layout: Any, dtype: torch.dtype, costs: type[OpCosts], kernels: int
) -> None:
    ops = CountedOps(layout(BF16), dtype, PAGE, 8, costs)
    experts = ops.expert_matrices(4, 32, 64, FORMATS["bfloat16"], META)
    x = zeros(3, 64, dtype=dtype)
    assert ops.moe(x, zeros(3, 2), zeros(3, 2, dtype=torch.int32), experts, 0).shape == x.shape
    share = 1 - (1 - 2 / 8) ** 3
    pairs = 3 * 2 * 4 / 8
    [done] = ops.notes.done
    assert done.weights == pytest.approx(share * experts.nbytes)
    rows = dtype.itemsize * pairs * (4 * 64 + 4 * 32)
    assert done == Done("moe", 1, kernels, done.weights, 0.0, rows, 3 * pairs * 64 * 32, True)


@pytest.mark.parametrize(("physical", "kernels"), [(None, 6), (object(), 8)])
def test_rows_are_exchanged_with_all_ranks(physical: Any, kernels: int) -> None:
    ops = counted(experts=8)
    exchange = CountedExchange(ops, 4, 5)
    experts = ops.expert_matrices(2, 32, 64, FORMATS["bfloat16"], META)
    assert [exchange.takes(rows, experts) for rows in (0, 1, 5, 6)] == [False, True, True, False]
    assert not exchange.uneven
    x = zeros(3, 64)
    assert exchange.mixture(x, x, zeros(3, 2, dtype=torch.int32), experts, physical).shape == x.shape
    assert ops.notes.messages == [Collective(kind, "world", 4, 2 * 3 * 64 * 2, 7) for kind in ("dispatch", "combine")]
    [done] = ops.notes.done
    assert (done.name, done.kernels, done.times) == ("exchanged moe", kernels, 7)
    assert done.weights == pytest.approx(experts.nbytes * (1 - (1 - 2 / 8) ** 12))


def test_a_state_is_read_and_written_for_each_sequence() -> None:
    ops, floats = counted(), partial(zeros, dtype=torch.float32)
    starts, table = zeros(4, dtype=torch.int64), zeros(3, dtype=torch.int32)  # of three sequences
    places = Recurrent(starts, *[table] * (len(Recurrent._fields) - 1))
    qkv, a = zeros(5, 2 * 2 * 8 + 4 * 16), zeros(5, 4)
    conv, delta = floats(9, 3, 96), floats(9, 4, 8, 16)
    assert ops.causal_conv(zeros(5, 160)[:, :96], floats(4, 96), conv, places).shape == qkv.shape
    y = ops.gated_delta_rule(qkv, a, a, floats(4), floats(4), delta, floats(9, 0, 88), places)
    assert ops.gated_rms_norm(y, y, zeros(16), 1e-6).shape == y.shape == (5, 4, 16)
    assert ops.sigmoid_mul(a, a) is a
    rows = 5 * 96 * 2
    assert ops.notes.done == [
        Done("causal_conv", 7, 9, rows=2 * rows, cached=2 * 3 * 4 * 3 * 96, macs=5 * 4 * 96),
        Done("gated_delta_rule", 7, 22, rows=rows + 5 * (4 + 4 + 64) * 2, cached=2 * 3 * 4 * 512, macs=5 * 4 * 512),
        Done("gated_rms_norm", 7, 3, rows=3 * 5 * 64 * 2),
        Done("sigmoid_mul", 7, 2, rows=3 * 5 * 4 * 2),
    ]

"""What each op of a step is noted as: bytes, products, kernels and messages, to the value."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from errors import UserError
from executor.config.load import load_case
from executor.planning.cluster.hardware import Device, Hardware, Host, Links
from executor.planning.cluster.times import Placing, Times, _shadow, collective_seconds, step_times
from executor.planning.cluster.work import Done, Message, NotedExchange, NotedGroup, NotedOps, Notes, Work


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device="meta")


def noted(name: str = "qwen3_30b_a3b_bf16_tp8", experts: int = 128) -> tuple[NotedOps, Notes]:
    notes = Notes()
    notes.multiple = 7
    return NotedOps(load_case(name), experts, notes), notes


def test_ops_on_rows() -> None:
    ops, notes = noted()
    x, y = zeros(3, 10), zeros(3, 4)
    found: list[Any] = [
        ops.embedding(torch.zeros(5, dtype=torch.int64, device="meta"), zeros(20, 10), None),
        ops.rms_norm(x, y, 1e-6),
        ops.add_rms_norm(x, y, x, 1e-6),
        ops.rope(x, y, x, x),
        ops.norm_rope_write(zeros(3, 12), zeros(2), None, None, None, None, 1),
        ops.route_softmax(x, 2, True),
        ops.route_sigmoid(x, None, 4, True),
    ]
    assert found[0].shape == (5, 10)
    assert found[0].dtype == torch.bfloat16
    assert found[1] is x
    assert found[2] == found[3] == (x, y)
    assert found[4].shape == (3, 4, 2)  # of six heads, one each has keys and values
    assert [(t.shape, t.dtype) for t in found[5]] == [((3, 2), torch.bfloat16), ((3, 2), torch.int32)]
    assert [t.shape for t in found[6]] == [(3, 4)] * 2
    ops.write_kv(x, y, x, x, x)
    assert notes.done == [
        Done("embedding", 7, 1, rows=200),
        Done("rms_norm", 7, 1, rows=120),
        Done("add_rms_norm", 7, 1, rows=240),
        Done("rope", 7, 1, rows=2 * 60 + 2 * 24),
        Done("norm_rope_write", 7, 1, rows=2 * 72),
        Done("route", 7, 1, rows=60),
        Done("route", 7, 1, rows=60),
        Done("write_kv", 7, 2, rows=2 * 60 + 2 * 24),
    ]


def test_activations_on_a_host_are_floats() -> None:
    ops, notes = noted("qwen3_30b_a3b_q4_cpu")
    out = ops.embedding(torch.zeros(5, dtype=torch.int64, device="meta"), zeros(20, 10), None)
    assert out.dtype == torch.float32
    assert notes.done == [Done("embedding", 7, 1, rows=400)]
    q = ops.norm_rope_write(zeros(3, 24), zeros(2), None, None, None, None, 3)
    assert q.shape == (3, 6, 2)


def test_products_of_a_matrix() -> None:
    ops, notes = noted()
    weight = SimpleNamespace(rows=6, columns=10, storages=[zeros(6, 10), zeros(6)])
    assert ops.linear(zeros(3, 10), weight, None).shape == (3, 6)
    rows = 2 * (30 + 18)
    assert notes.done == [Done("linear", 7, 1, weights=2 * 66.0, rows=rows, macs=180, tokens=3)]


def test_attention_sees_what_is_cached_and_what_came_before_in_the_step() -> None:
    ops, notes = noted()
    size = ops.page_size
    cache = zeros(5, size, 4)  # of five pages, with four values of a token
    q = zeros(5, 2, 8)
    assert ops.attention(q, cache, cache, q, (0, 2, 5), (2, 10), 1.0) is q
    pairs = (1 + 2) + (8 + 9 + 10)
    each = 2 * 4 * 2  # bytes of a token's keys and values
    assert notes.done == [Done("attention", 7, 1, rows=2 * 160, cached=each * 12, macs=2 * pairs * 2 * 8)]


@pytest.mark.parametrize(("name", "kernels"), [("qwen3_30b_a3b_bf16_tp8", 5), ("qwen3_30b_a3b_q4_cpu", 1)])
def test_a_mixture_reads_the_experts_that_its_tokens_are_expected_to_use(name: str, kernels: int) -> None:
    ops, notes = noted(name, experts=8)
    experts = SimpleNamespace(count=4, inner=6, storages=[zeros(100), zeros(20)])
    x = zeros(3, 10)
    assert ops.moe(x, x, zeros(3, 2), experts, 0) is x
    share = 1 - (1 - 2 / 8) ** 3
    pairs = 3 * 2 * 4 / 8
    [done] = notes.done
    assert done.weights == pytest.approx(share * 240)
    assert done == Done("moe", 7, kernels, done.weights, 0.0, 2 * pairs * (4 * 10 + 4 * 6), 3 * pairs * 60, 3, True)


@pytest.mark.parametrize(("slots", "kernels"), [(None, 6), (object(), 8)])
def test_rows_are_exchanged_with_all_ranks(slots: object, kernels: int) -> None:
    ops, notes = noted(experts=8)
    exchange = NotedExchange(ops, 4, 5)
    assert [exchange.takes(rows, None) for rows in (0, 1, 5, 6)] == [False, True, True, False]
    assert not exchange.uneven
    x = zeros(3, 10)
    experts = SimpleNamespace(count=2, inner=6, storages=[zeros(100)])
    assert exchange.mixture(x, x, zeros(3, 2), experts, slots) is x
    assert notes.messages == [Message(kind, "world", 4, 2 * 60, 7) for kind in ("dispatch", "combine")]
    [done] = notes.done
    assert (done.name, done.kernels, done.tokens, done.times) == ("exchanged moe", kernels, 12, 7)
    assert done.weights == pytest.approx(200 * (1 - (1 - 2 / 8) ** 12))


def test_collectives_are_noted_and_have_their_shapes() -> None:
    notes = Notes()
    group, alone = NotedGroup(0, 4, None, "attn_tp", notes), NotedGroup(0, 1, None, "own", notes)
    x = zeros(8, 2)
    assert group.all_reduce(x) is x
    assert alone.all_reduce(x) is x
    assert group._gather(x).shape == (4, 8, 2)
    assert group._sum_parts(x).shape == (2, 2)
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    assert notes.messages == [Message(kind, "attn_tp", 4, 32, 1) for kind in kinds]


def test_totals_of_a_step() -> None:
    done = (Done("a", 2, 3, weights=5.0, tokens=1), Done("b", 1, 1, weights=0.5))
    work = Work(done, ())
    assert [work.total(what) for what in ("weights", "kernels", "tokens", "rows")] == [10.5, 7.0, 2.0, 0.0]


LINKS = Links(devices=8, gbps=1.0, collective_us=10.0, peer_us=2.0, exchange_us=40.0)
HARDWARE = Hardware(
    node=LINKS,
    device=Device(
        read_gbps=2.0, read_fraction=0.5, attention_fraction=0.25, tflops=0.004, multiply_fraction=0.5,
        quantised_tflops=0.001, unpack_gbps=0.25, launch_us=5.0, attention_us=10.0, step_us=100.0,
    ),
    host=Host(read_gbps=0.5, tflops=0.001, copy_gbps=0.1, handover_us=10.0),
)  # fmt: skip


def parts(
    *done: Done, messages: tuple[Message, ...] = (), hardware: Hardware = HARDWARE, **placing: Any
) -> dict[str, float]:
    """In microseconds, without those that are zero."""
    placed = dataclasses.replace(Placing({"world": 4}, False), **placing)
    found = step_times(Work(done, messages), placed, hardware).parts
    return {part: 1e6 * seconds for part, seconds in found.items() if seconds}


def test_times_of_kernels_that_read_and_multiply() -> None:
    """A thousand bytes are read in a microsecond, and a thousand multiply-adds are done in one."""
    linear = Done("linear", 2, 3, weights=4000.0, rows=1000.0, macs=7000.0, tokens=2)
    found = {"weights": 8.0, "activations": 2.0, "products": 4.0, "launches": 30.0, "host": 100.0}
    assert parts(linear) == pytest.approx(found)
    attention = Done("attention", 2, 3, cached=1000.0, rows=500.0)
    assert parts(attention) == pytest.approx({"KV": 4.0, "activations": 1.0, "launches": 40.0, "host": 100.0})


def test_quantised_weights_are_unpacked_where_that_is_quicker() -> None:
    """Kernels for few rows need two microseconds for a thousand multiply-adds; unpacking takes four for 1000 bytes."""
    few = Done("linear", 1, 1, weights=1000.0, macs=2000.0, tokens=2)
    assert parts(few, quantised=True) == pytest.approx({"weights": 1, "products": 3, "launches": 5, "host": 100})
    more = Done("linear", 1, 1, weights=1000.0, macs=2001.0, tokens=2)
    assert parts(more, quantised=True) == pytest.approx({"weights": 4, "launches": 5, "host": 100})
    many = Done("linear", 1, 1, weights=1000.0, macs=9000.0, tokens=2)
    assert parts(many, quantised=True) == pytest.approx({"weights": 4, "products": 5, "launches": 5, "host": 100})
    plain = Done("norm", 1, 1, weights=1000.0, macs=9000.0)
    assert parts(plain, quantised=True) == parts(plain)


def test_experts_that_are_not_resident_are_computed_by_the_host_or_copied() -> None:
    moe = Done("moe", 2, 1, weights=8000.0, macs=100.0, tokens=1, mixture=True)
    alone = dataclasses.replace(HARDWARE, host=Host())  # of which nothing is known
    assert "shadow experts" not in parts(moe, hardware=alone)
    with pytest.raises(UserError, match=r"host\.copy_gbps is missing"):
        parts(moe, hardware=alone, resident=0.9)
    host = parts(moe, resident=0.75)  # 10 us and 2000 bytes at 2 us each thousand, beside 6 us of the device
    assert host["shadow experts"] == pytest.approx(2 * (10 + 4 - 6))
    assert host["weights"] == pytest.approx(2 * 6)
    shared = parts(moe, resident=0.75, sharing=4)  # 26 us; copies take 20, beside 6
    assert shared["shadow experts"] == pytest.approx(2 * (20 - 6))
    assert parts(moe, resident=0.0)["shadow experts"] == pytest.approx(2 * (10 + 16))
    busy = Done("moe", 1, 1, weights=400.0, macs=20_000.0, tokens=1, mixture=True)
    assert parts(busy, resident=0.5)["shadow experts"] == pytest.approx(20 - 10)  # all products on the device
    assert 1e6 * _shadow(busy, 0.5, 3, HARDWARE) == pytest.approx(10 + 3 * 20)
    assert 1e6 * _shadow(moe, 0.5, 3, HARDWARE) == pytest.approx(10 + 3 * 8)
    assert parts(Done("norm", 1, 1, weights=4000.0), resident=0.5)["weights"] == 4


def test_times_of_messages() -> None:
    def seconds(kind: str, nbytes: int, ranks: int) -> tuple[float, str]:
        took, how = collective_seconds(Message(kind, "world", ranks, nbytes, 1), 4, HARDWARE)
        return round(1e6 * took, 6), how

    assert seconds("all_reduce", 1000, 4) == (14 + 3, "one shot")
    assert seconds("all_reduce", 9333, 4) == (41.999, "one shot")
    assert seconds("all_reduce", 9334, 4) == (42.001, "two shots")
    assert seconds("all_gather", 1000, 2) == (10 + 1, "mesh")
    assert seconds("reduce_scatter", 1000, 4) == (14 + 0.75, "mesh")
    assert seconds("combine", 1000, 4) == (14 + 0.75 + 40, "pairwise")
    message = Message("all_gather", "world", 4, 1000, 3)
    assert parts(messages=(message, message)) == pytest.approx({"collectives": 6 * 17, "host": 100})
    assert Times({"KV": 1.5, "host": 2.0}).total == 3.5

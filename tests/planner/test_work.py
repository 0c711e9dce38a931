"""What the work of a step takes: messages, and times of kernels and collectives, to the value."""

import dataclasses
from typing import Any

import pytest
import torch

from ops.counted import Done, Message, Notes
from planner.machine import Device, Hardware, Host, Links
from planner.times import Placing, Times, _shadow, collective_seconds, step_times
from planner.work import NotedGroup, Work
from umbra.errors import UserError


def test_collectives_are_noted_and_have_their_shapes() -> None:
    notes = Notes()
    group, alone = NotedGroup(0, 4, None, "attn_tp", notes), NotedGroup(0, 1, None, "own", notes)
    x = torch.zeros(8, 2, dtype=torch.bfloat16, device="meta")
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

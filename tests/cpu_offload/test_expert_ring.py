"""Which missing experts of a long step are copied to the device, and in which order: splits and the ring of groups."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from umbra.cpu_offload.costs import Costs, Line
from umbra.cpu_offload.expert_ring import SURE, ExpertRing, Link, group_count, group_size
from umbra.cpu_offload.prefill_split import split

LAYERS, EXPERTS, GROUPS, EACH = 3, 12, 3, 2
NONE = np.zeros(EXPERTS, np.bool_)
# Like V4-Flash on an A3 die: a copy of .495 ms; the CPU takes .094 for an expert and .01 for each of its pairs.
COSTS = Costs(0.1, Line(0.0, 0.0, 0.001), Line(0.0, 0.094, 0.01), 0.0, 0.495, 1, (1, 1), 0.0)


def test_link_device_and_cpu_end_together() -> None:
    parts = split(np.full(256, 12), np.zeros(256, np.bool_), COSTS, 4)
    cpu = 0.094 + 12 * 0.01
    assert len(parts.copied) == pytest.approx(256 * cpu / (cpu + 0.495), abs=1)  # the equal ends
    assert parts.ms == pytest.approx(0.1 + 0.495 * len(parts.copied), abs=0.5)


@pytest.mark.parametrize("slip", [0.0, 0.4, 1.0])
def test_a_split_is_the_best_and_copies_experts_of_most_pairs(slip: float) -> None:
    choose = np.random.default_rng(0)
    for _ in range(30):
        pairs, here = choose.integers(0, 60, EXPERTS), choose.random(EXPERTS) < 0.3
        copy, shadow = choose.random() / 2, Line(0.1, *choose.random(2) / 9)
        costs = Costs(0.1, Line(0.01, 0.02, 0.003), shadow, slip, copy, 1, (1, 1), 0.0)
        begun, lead = int(choose.integers(0, 6)), choose.random()
        parts = split(pairs, here, costs, EACH, begun, lead)
        assert {*parts.copied, *parts.computed} == set(np.flatnonzero((pairs > 0) & ~here))
        assert list(pairs[parts.copied + parts.computed]) == sorted(pairs[(pairs > 0) & ~here])[::-1]
        for n in range(len(parts.copied + parts.computed) + 1):
            copied, left = (parts.copied + parts.computed)[:n], (parts.copied + parts.computed)[n:]
            on_device = [*copied, *np.flatnonzero((pairs > 0) & here)]
            groups = (len(on_device) > n) + -(-n // EACH)
            device = costs.device.ms(len(on_device), pairs[on_device].sum(), groups)
            cpu = costs.shadow.ms(len(left), pairs[left].sum(), bool(left))
            link = max(n * costs.copy, (begun + n) * costs.copy - lead)
            assert parts.ms <= costs.layer_ms(float(device), float(cpu), link) + 1e-9
    dear = Costs(0.1, Line(0, 0, 0), Line(0, 0.01, 0), slip, 100.0, 1, (1, 1), 0.0)
    assert split(np.ones(EXPERTS), NONE, dear, EACH).copied == []


class Recorded(Link):
    """Says what was asked of it, and checks that no group is written to while it may be read."""

    def __init__(self) -> None:
        super().__init__(GROUPS, EACH)
        self.calls: list[Any] = []
        self.reading: set[int] = set()

    def begin(self, group: int, layer: int, experts: Sequence[int]) -> None:
        assert group not in self.reading
        assert 0 < len(experts) <= EACH
        self.calls.append((layer, *experts))

    def ready(self, group: int) -> None:
        self.reading.add(group)

    def release(self, group: int) -> None:
        self.reading.remove(group)

    def drain(self) -> None:
        self.calls.append("drain")


def ring_of(copy: float = 0.0) -> tuple[ExpertRing, Recorded]:
    link = Recorded()
    costs = Costs(0.0, Line(0, 0, 0), Line(0, 1.0, 0.1), 0.0, copy, 1, (1, 1), 0.0)
    return ExpertRing(link, LAYERS, EXPERTS, 3, costs), link


def test_copies_run_ahead_in_the_order_of_layers_and_of_expected_tokens() -> None:
    ring, link = ring_of()
    resident = np.arange(EXPERTS) < 9
    few = int(SURE * EXPERTS / 3)  # at even traffic
    ring.begin(few - 1, np.tile(resident, (LAYERS, 1)))
    assert not link.calls  # it waits for the routing
    pairs = np.arange(EXPERTS)
    assert ring.plan(0, pairs) == []
    assert link.calls == [(0, 11, 10), (0, 9)]
    assert [experts for _, experts in ring.groups(0)] == [[11, 10], [9]]
    ring.end()
    link.calls.clear()
    ring.begin(few, np.tile(resident, (LAYERS, 1)))
    assert link.calls == [(0, 11, 10), (0, 9), (1, 9, 10)]  # layer 0 in the order of its last routing
    link.calls.clear()
    assert ring.plan(0, pairs) == []
    assert [experts for _, experts in ring.groups(0)] == [[11, 10], [9]]
    assert link.calls == [(1, 11), (2, 9, 10)]  # into the released groups
    ring.end()
    assert link.calls[-1] == "drain"


def test_the_device_begins_with_what_the_link_had_time_for() -> None:
    ring, link = ring_of(0.1)
    ring.begin(100, np.zeros((LAYERS, EXPERTS), np.bool_))
    ring.lead = 0.45  # of three groups of two copies
    pairs = np.full(EXPERTS, 9)
    pairs[:2] = 0
    assert ring.plan(0, pairs) == []
    groups, first = ring.order(0)
    assert (groups, first) == ([[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]], 1)  # the first group has no tokens
    assert [experts for _, experts in ring.groups(0, first)] == groups[:1]
    assert not link.reading
    assert link.calls[-1] == (0, 8, 9)
    assert [experts for _, experts in ring.groups(0)] == groups[1:]


def test_wrong_guesses_and_groups_that_later_layers_hold() -> None:
    ring, _ = ring_of()
    missing = np.zeros((LAYERS, EXPERTS), np.bool_)
    ring.begin(100, missing)
    pairs = np.zeros(EXPERTS, np.int64)
    pairs[[0, 1, 9]] = 1, 0, 5  # 2 .. 5 were copied and are not used
    assert ring.plan(0, pairs) == []
    assert [experts for _, experts in ring.groups(0)] == [[0, 1], [9]]
    assert ring.plan(2, pairs) == []  # layer 1 was left out
    assert [experts for _, experts in ring.groups(2)] == [[9, 0]]
    ring.begin(100, missing)
    ring.plan(0, pairs)
    list(ring.groups(0))  # groups hold layer 1
    assert sorted(ring.plan(0, pairs)) == [0, 9]  # a layer that comes again finds no group
    assert list(ring.groups(0)) == []
    assert ring.plan(1, pairs) == []


def test_any_order_of_routing_computes_each_used_expert_once() -> None:
    choose = np.random.default_rng(0)
    for _ in range(50):
        ring, link = ring_of(choose.random())
        for tokens in (1, 30, 200):
            resident = choose.random((LAYERS, EXPERTS)) < choose.random()
            ring.begin(tokens, resident)
            for layer in range(LAYERS):
                pairs = choose.integers(0, 9, EXPERTS) * (choose.random(EXPERTS) < choose.random())
                done = ring.plan(layer, pairs) + [e for _, experts in ring.groups(layer) for e in experts if pairs[e]]
                assert sorted(done) == np.flatnonzero((pairs > 0) & ~resident[layer]).tolist()
            assert not link.reading
            ring.end()


def test_the_size_of_a_group_and_of_a_ring() -> None:
    assert [group_size(size << 20, 256) for size in (0, 1, 20, 100)] == [8, 8, 5, 4]
    assert group_size(1, 3) == 3
    assert [group_count(tokens, 13 << 20, 256) for tokens in (0, 8192, 32768, 1 << 20)] == [4, 4, 11, 16]
    assert group_count(1 << 20, 1, 8) == 4

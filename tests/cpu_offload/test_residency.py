"""The residency policy: the rules of every swap, what it learns, and when it does nothing; and the other policies."""

import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.variants import thorough_but
from umbra.cpu_offload.policy.residency import ResidencyPolicy, ResidencySettings, Swap
from umbra.tools.benchmarks import offload_policy
from umbra.tools.benchmarks.cache_policies import (
    PolicyRun,
    by_prompt,
    lfu,
    lru,
    lru_by_layer,
    optimum,
    residency,
    static,
)
from umbra.tools.benchmarks.published_traces import MODELS, statistics_of, trace_of
from umbra.tools.benchmarks.routing_traces import KINDS, Trace, load_trace, made_up

pytestmark = pytest.mark.slow

DEFAULT, DEAR = (
    ResidencySettings(),
    ResidencySettings(swap_cost=1.0),
)  # copies that are nearly free, and that cost a miss
# .venv/bin/umbra bench offload_policy --only demo --steps 16000 --record tests/data/demo_routing.npz
DEMO = Path(__file__).parents[1] / "data" / "demo_routing.npz"


@functools.cache
def small(kind: str, steps: int, seed: int = 0) -> Trace:
    return made_up(kind, steps, layers=8, experts=32, k=4, seed=seed)


def demo(steps: int) -> Trace:
    trace = load_trace(DEMO)
    assert trace.tokens is not None
    return Trace("demo", trace.ids[:steps], trace.experts, trace.tokens[:steps])


def late(run: PolicyRun) -> tuple[float, float]:
    """Hit rate and copies a step in the second half."""
    half = len(run.uses) // 2
    return run.hits[half:].sum() / run.uses[half:].sum(), float(run.copies[half:].mean())


@given(st.data())
def test_rules_of_every_swap(data: st.DataObject) -> None:
    layers, experts = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
    chosen = ResidencySettings(data.draw(st.integers(0, 6)), data.draw(st.sampled_from([0, 0.02, 0.2, 1.0])))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    slots = data.draw(st.integers(0, layers * experts))
    policy, twin = (ResidencyPolicy(layers, experts, chosen) for _ in range(2))
    resident = np.zeros((layers, experts), bool)
    popular = random.random((layers, experts)) * 3
    believing = data.draw(st.booleans())  # so that many swaps are done at once
    for _ in range(data.draw(st.integers(1, 40))):
        if random.random() < 0.1:  # the KV cache takes or gives slots
            slots = int(random.integers(0, layers * experts + 1))
            for layer, expert in policy.coldest(resident, max(0, int(resident.sum()) - slots)):
                assert resident[layer, expert]
                resident[layer, expert] = False
            popular = random.random((layers, experts)) * 3
        counts = random.poisson(popular * (random.random() < 0.9))
        free = slots - int(resident.sum())
        for one in (policy, twin):
            one.observe(counts)
            one.trust = 1.0 if believing else one.trust
        under_way = int(random.integers(3))
        swaps = policy.swaps(resident, free, under_way)
        assert swaps == twin.swaps(resident, free, under_way)
        assert len(swaps) <= max(0, chosen.max_swaps - under_way)
        come = [(s.layer, s.expert_in) for s in swaps]
        go = [s.expert_out for s in swaps if s.expert_out]
        assert len({*come, *go}) == len(come) + len(go)
        assert not any(resident[id] for id in come)
        assert all(resident[id] for id in go)
        for id in go:
            resident[id] = False
        for id in come:
            resident[id] = True
        assert resident.sum() <= slots
        assert 0 <= policy.trust <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen", thorough_but([DEFAULT, DEAR], DEFAULT), ids=["default", "dear"])
def test_at_least_lru(kind: str, chosen: ResidencySettings) -> None:
    trace = small(kind, 1500)
    for budget in (8, 2):
        ours, *theirs = (p(trace, trace.size // budget).measured()[0] for p in (residency(chosen), lru, lru_by_layer))
        assert ours > max(theirs) - (0.005 if kind == "uniform" else 0)  # all policies are equal there but for chance


@pytest.mark.parametrize("chosen", [DEFAULT, DEAR], ids=["default", "dear"])
def test_uniform_traffic_moves_nothing(chosen: ResidencySettings) -> None:
    runs = [residency(chosen)(small("uniform", 1500, seed), 64) for seed in range(3)]
    assert sum(run.copies.sum() for run in runs) <= 3 * 64 + 300  # the slots are filled once; LRU copies 24 a step
    for run in runs:
        assert late(run)[0] == pytest.approx(0.25, abs=0.015)


@pytest.mark.parametrize("chosen", [DEFAULT, DEAR], ids=["default", "dear"])
def test_stationary_traffic_stays_put_at_the_best_placement(chosen: ResidencySettings) -> None:
    trace = small("Zipf", 2500)
    hits, copies = late(residency(chosen)(trace, 64))
    counts = np.bincount(trace.places()[1250:].ravel(), minlength=trace.size)
    assert hits > 0.97 * np.sort(counts)[-64:].sum() / counts.sum()
    assert copies < 0.05


def test_trust_returns_when_there_is_something_to_gain() -> None:
    traffic = np.concatenate([small("uniform", 1000).ids, small("Zipf", 2000).ids])
    run = residency(DEAR)(Trace("", traffic, 32), 64)
    assert run.copies[100:1000].sum() <= 9
    assert run.copies[1000:].sum() > 20
    assert late(run)[0] > 0.5  # 0.25 without a swap


def test_free_slots_take_the_most_used_first_and_the_coldest_leave_first() -> None:
    policy, counts = ResidencyPolicy(2, 4, ResidencySettings(max_swaps=3)), np.array([[5, 1, 0, 0], [0, 9, 2, 0]])
    policy.observe(counts)
    policy.observe(counts)
    nobody = np.zeros((2, 4), bool)
    assert policy.swaps(nobody, 8) == [Swap(0, 0, None), Swap(1, 1, None), Swap(1, 2, None)]
    assert policy.swaps(nobody, 1) == [Swap(1, 1, None)]
    assert policy.coldest(counts > 0, 2) == [(0, 1), (1, 2)]
    assert policy.coldest(nobody, 2) == []


class Known:
    """A forecast that is given."""

    def __init__(self, coming: list[float], lasting: list[float]):
        self.coming, self.lasting, self.decoded = np.array(coming), np.array(lasting), 0


def known(trust: float, max_swaps: int = 2) -> ResidencyPolicy:
    """Four experts worth 4, 3, 1 and 0.5 misses in the two intervals of the horizon."""
    policy = ResidencyPolicy(2, 2, ResidencySettings(max_swaps, swap_cost=0.1))
    policy.forecast = Known([3, 2, 1, 0], [1, 1, 0, 0.5])  # type: ignore[assignment]
    policy.trust = trust
    return policy


LAST = np.array([[False, False], [True, True]])  # the two of least worth are resident


def test_the_best_come_for_the_worst_if_their_gain_counts() -> None:
    """Gains are 3.5 and 2, of which `trust` counts; the cost itself is no gain."""
    first, second = Swap(0, 0, (1, 1)), Swap(0, 1, (1, 0))
    assert known(1.0).swaps(LAST, 0) == [first, second]
    assert known(1.0, 1).swaps(LAST, 0) == [first]
    assert known(1.0, 0).swaps(LAST, 0) == []
    assert known(0.05).swaps(LAST, 0) == [first]
    assert known(0.02).swaps(LAST, 0) == []
    assert known(1.0).swaps(LAST, 1) == [Swap(0, 0, None), Swap(0, 1, (1, 1))]
    assert known(1.0).swaps(~LAST, 0) == []
    assert known(1.0).swaps(np.zeros((2, 2), bool), 0) == []
    assert known(1.0).swaps(np.ones((2, 2), bool), 0) == []
    three = np.array([[False, True], [True, True]])
    assert known(1.0).swaps(three, 0) == [first]  # as many as come


@pytest.mark.parametrize("budget", thorough_but(offload_policy.BUDGETS, 12.5))
def test_nine_tenths_of_the_optimum_on_the_demo_model(budget: float) -> None:
    trace = demo(6000)
    ours, best, *others = (
        policy(trace, int(trace.size * budget / 100)).measured()[0]
        for policy in (residency(DEFAULT, link=40), optimum, lru, lfu, static)
    )
    assert ours >= 0.9 * best
    assert ours >= max(others)


@pytest.mark.parametrize("sequences", thorough_but([1, 4], 4))
def test_prompts_place_the_first_experts(sequences: int) -> None:
    trace = demo(8192).requests(sequences)
    slots = trace.size // 4
    warm, cold, rule = (p(trace, slots) for p in (residency(DEFAULT), residency(DEFAULT, warm=False), by_prompt))
    assert warm.hits[:100].sum() > 1.01 * cold.hits[:100].sum()
    assert warm.hits.sum() > max(0.99 * cold.hits.sum(), rule.hits.sum())


@pytest.mark.thorough
def test_what_is_published_of_v4_flash_holds_and_its_rule_is_beaten() -> None:
    model = MODELS[0]
    trace = trace_of(model)
    assert all(here == pytest.approx(value, abs=0.03) for *_, value, here in statistics_of(model, trace))
    ours, rule, frequent = (
        p(trace, trace.size * 28 // 100) for p in (residency(ResidencySettings(15), link=15), by_prompt, lfu)
    )
    assert offload_policy.speed(ours.measured()[0]) > 25
    assert ours.measured()[0] > max(rule.measured()[0], frequent.measured()[0])

"""Placements of experts over ranks: what holds for all of them, and that they even out what routers do."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ops.parallel.placement import Held, _packed, first_placement, imbalance, moves, next_placement, slots_for


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """(experts, ranks, slots of each)"""
    experts, ranks = draw(st.integers(1, 24)), draw(st.integers(1, 12))
    return experts, ranks, draw(st.integers(-(-experts // ranks), experts))


def routed(experts: int, seed: int, skew: float = 1.0) -> np.ndarray:
    """Tokens of each expert; some have none."""
    choose = np.random.default_rng(seed)
    return choose.poisson(20 * np.exp(choose.normal(0, skew, experts)))


def check(held: Held, experts: int, ranks: int, slots: int) -> None:
    own = held.reshape(ranks, slots)
    assert set(held.tolist()) == set(range(experts))
    assert all(len(set(row)) == slots for row in own.tolist())  # no rank has two copies of an expert


@settings(deadline=None, max_examples=60)
@given(sizes(), st.integers(0, 999))
def test_every_placement_can_be_reached_and_used(size: tuple[int, int, int], seed: int) -> None:
    experts, ranks, slots = size
    before = first_placement(*size)
    check(before, *size)
    for step in range(3):
        counts = routed(experts, seed + step)
        after = next_placement(counts, ranks, before)
        check(after, *size)
        assert np.array_equal(after, next_placement(counts, ranks, before))
        assert imbalance(counts, after, ranks) <= imbalance(counts, before, ranks)
        moved = before.copy()
        for source, to in moves(before, after, ranks):
            assert source // slots != to // slots
            moved[to] = before[source]
        assert np.array_equal(moved, after)
        uses = np.zeros(ranks * slots, int)
        for rank in range(ranks):
            table = slots_for(rank, ranks, after)
            assert np.array_equal(after[table], np.arange(experts))
            uses[table] += 1
        copies = np.bincount(after)[after]  # of the expert in each slot
        assert ((uses == ranks // copies) | (uses == -(-ranks // copies))).all()  # equal shares of the ranks
        before = after


def test_hot_experts_get_copies_on_different_ranks() -> None:
    counts = np.array([80, 10, 10, 10, 10, 10, 10, 20])
    held = next_placement(counts, 4, first_placement(8, 4, 3))
    assert np.bincount(held).tolist() == [4, 1, 1, 1, 1, 1, 1, 2]
    assert imbalance(counts, held, 4) < 1.1


@pytest.mark.parametrize("slots", [8, 9])
def test_ranks_are_evened_out_and_stay_so(slots: int) -> None:
    """Of 128 experts on 16 ranks. What another interval of the same routing has is not worth moves."""
    counts, later = 50 * routed(128, 5), 50 * routed(128, 5) + np.random.default_rng(1).poisson(40, 128)
    first = first_placement(128, 16, slots)
    held = next_placement(counts, 16, first)
    assert imbalance(counts, first, 16) > 1.4
    assert imbalance(counts, held, 16) < 1.08
    assert next_placement(later, 16, held) is held


def test_few_experts_move_if_one_grows_hot() -> None:
    counts = 50 * routed(128, 5)
    held = next_placement(counts, 16, first_placement(128, 16, 9))
    counts[np.argmin(counts)] += counts.sum() // 10
    after = next_placement(counts, 16, held)
    assert imbalance(counts, held, 16) > 1.5
    assert imbalance(counts, after, 16) < 1.05
    assert 0 < len(moves(held, after, 16)) < 144 // 2


@pytest.mark.parametrize(("ranks", "slots", "experts", "seed"), [(2, 95, 187, 6), (2, 80, 155, 37), (2, 72, 140, 30)])
def test_a_full_rank_makes_room(ranks: int, slots: int, experts: int, seed: int) -> None:
    """Experts that stay where they are may fill a rank so far that only the one with a copy has room for the next."""
    choose = np.random.default_rng(seed)
    before = _packed(choose.permutation(experts) + 1, ranks, slots, None)
    counts = np.full(experts, 10)
    after = _packed(counts, ranks, slots, before)
    check(after, experts, ranks, slots)
    assert imbalance(counts, after, ranks) < 1.05
    assert (after == before).mean() > 0.8

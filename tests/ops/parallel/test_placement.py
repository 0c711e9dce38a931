"""Placements of experts over ranks: what holds for all of them, and that they even out what routers do."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from umbra.ops.parallel.placement import Placement, first_placement, imbalance, moves, next_placement, physical_for


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """(experts, ranks, physical experts of each)"""
    experts, ranks = draw(st.integers(1, 24)), draw(st.integers(1, 12))
    return experts, ranks, draw(st.integers(-(-experts // ranks), experts))


def routed(experts: int, seed: int, skew: float = 1.0) -> np.ndarray:
    """Tokens of each expert; some have none."""
    choose = np.random.default_rng(seed)
    return choose.poisson(20 * np.exp(choose.normal(0, skew, experts)))


def check(held: Placement, experts: int, ranks: int, per_rank: int) -> None:
    own = held.reshape(ranks, per_rank)
    assert set(held.tolist()) == set(range(experts))
    assert all(len(set(row)) == per_rank for row in own.tolist())  # no rank has two copies of an expert


@given(sizes(), st.integers(0, 999))
def test_every_placement_can_be_reached_and_used(size: tuple[int, int, int], seed: int) -> None:
    experts, ranks, per_rank = size
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
            assert source // per_rank != to // per_rank
            moved[to] = before[source]
        assert np.array_equal(moved, after)
        uses = np.zeros(ranks * per_rank, int)
        for rank in range(ranks):
            table = physical_for(rank, ranks, after)
            assert np.array_equal(after[table], np.arange(experts))
            uses[table] += 1
        copies = np.bincount(after)[after]  # of the expert that each is
        assert ((uses == ranks // copies) | (uses == -(-ranks // copies))).all()  # equal shares of the ranks
        before = after


def test_hot_experts_get_copies_on_different_ranks() -> None:
    counts = np.array([80, 10, 10, 10, 10, 10, 10, 20])
    held = next_placement(counts, 4, first_placement(8, 4, 3))
    assert np.bincount(held).tolist() == [4, 1, 1, 1, 1, 1, 1, 2]
    assert imbalance(counts, held, 4) < 1.1


def test_the_first_placement_is_always_the_same() -> None:
    """Packed weights that were kept depend on it."""
    assert first_placement(4, 2, 3).tolist() == [0, 1, 2, 0, 1, 3]
    assert first_placement(4, 2, 2).tolist() == [0, 2, 1, 3]
    assert first_placement(5, 3, 2).tolist() == [1, 4, 0, 2, 0, 3]


def test_experts_move_where_the_busiest_rank_is_relieved_by_a_twentieth() -> None:
    before = np.array([0, 1, 2, 3])
    slightly, clearly = np.array([58, 46, 54, 42]), np.array([60, 46, 54, 40])
    assert next_placement(slightly, 2, before) is before
    assert next_placement(clearly, 2, before).tolist() == [0, 3, 2, 1]


def test_imbalance_is_the_busiest_ranks_part_of_the_mean() -> None:
    held = np.array([0, 1, 0, 2])  # half of the tokens of expert 0 are on each rank
    assert imbalance(np.array([40, 10, 30]), held, 2) == 50 / 40
    assert imbalance(np.array([40, 10, 10]), held, 2) == 1.0
    assert imbalance(np.array([0, 0, 0]), held, 2) == 1.0

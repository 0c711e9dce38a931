"""The model of placed experts: its routing is as uneven as published, and its figures follow from rows and experts."""

import numpy as np
import pytest

from planner.benchmarks.expert_placement import Model, in_order, model_of, published, rows_of


def test_routing_is_as_uneven_as_published() -> None:
    in_order, placed = (line.split("imbalance ")[1].split(", published ") for line in published(1.1))
    assert float(in_order[0]) == pytest.approx(float(in_order[1]), rel=0.05)
    assert float(placed[0]) == pytest.approx(float(placed[1]), rel=0.1)


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(64, 32)


def test_a_step_waits_for_the_busiest_rank(model: Model) -> None:
    """More rows on one rank, or more of its experts used, take longer."""
    pairs, even = 64 * 32 * 8.0, np.full((64, 2), 128)
    few = even.copy()
    few[:, 1], few[:, 0] = 0, 256
    uneven = even.copy()
    uneven[5] *= 4
    assert in_order(128, 64, 2).tolist() == list(range(128))
    assert model.seconds(few, pairs) < model.seconds(even, pairs) < model.seconds(uneven, pairs)


def test_placed_experts_even_the_ranks_out() -> None:
    first, moved, copies, more = rows_of(64, 32, 1.1, 94)
    assert [row["slots"] for row in (first, moved, copies, more)] == [2, 2, 3, 4]
    assert first["imbalance"] > moved["imbalance"] > 2 > copies["imbalance"]
    assert first["gain"] == 1
    assert copies["gain"] > more["gain"] > 1  # further copies are only read

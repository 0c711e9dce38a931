"""How many pages experts are left, decided from made-up counts, and what is counted of experts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpu_offload.history import Step
from executor.engine.expert_totals import ExpertTotals
from executor.engine.shares import Shares

HERE = np.array([[True, False, False, True], [False, True, False, False]])  # of two layers with four experts


class Rank:
    """Two groups of 64 pages; the margin is 4 pages, which are 2 of 8 experts."""

    def __init__(self, pages: int = 64) -> None:
        self.now = 10.0
        self.caches = [
            SimpleNamespace(pool=SimpleNamespace(pages=pages), last_hits=0, missed_hits=0, most_dropped=32)
            for _ in range(2)
        ]
        self.offload = SimpleNamespace(
            here=HERE,
            settings=SimpleNamespace(interval=2),
            arena=SimpleNamespace(extent_slots=3, extent_frames=5),
            residency=SimpleNamespace(
                forecast=SimpleNamespace(lasting=np.array([8.0, 1.0, 5.0, 2.0, -3.0, 4.0, 7.0, 0.5]))
            ),
        )
        self.experts = SimpleNamespace(steps=0, prompt_steps=0, prompt_tokens=0, miss_s=0.1, offload=self.offload)
        self.asked: list[tuple[float, float]] = []
        given: Any = self.caches, self.experts, self.prompt_step_s, lambda: self.now
        self.shares = Shares(*given)
        self.moves: list[tuple[float, ...]] = []

    def prompt_step_s(self, tokens: float, share: float) -> float:
        self.asked.append((tokens, share))
        return (1 - share) ** 2


def test_half_of_the_pages_are_left_to_experts_at_first() -> None:
    assert (Rank().shares.margin, Rank().shares.expert_pages) == (4, 32)
    assert (Rank(15).shares.margin, Rank(15).shares.expert_pages) == (1, 7)


def test_a_decision_weighs_what_was_counted_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    shares = rank.shares
    monkeypatch.setattr(shares, "move", lambda *worths: rank.moves.append(worths))
    monkeypatch.setattr(shares, "experts_at_margin", lambda: (3.0, 2.0))
    monkeypatch.setattr(shares, "prompts_at_margin", lambda tokens: (tokens / 100, tokens / 200))
    rank.caches[0].last_hits, rank.caches[1].last_hits = 2, 4
    rank.caches[0].missed_hits, rank.caches[1].missed_hits = 5, 3
    rank.experts.steps, rank.experts.prompt_steps, rank.experts.prompt_tokens = 10, 2, 100
    rank.now = 10.99
    shares.decide(0.2)
    assert rank.moves == []
    rank.now = 12.0  # 3 pages found, 4 missed, 5 steps, 1 step with prompts and 50 tokens a second, a twentieth of each
    shares.decide(0.2)
    assert rank.moves == [pytest.approx((0.15 * 0.2, 0.2 * 4 / 32 * 0.2, 3 * 0.025 + 0.05 * 0.5, 2 * 0.025 + 0.0125))]
    rank.now = 13.0  # nothing came since
    shares.decide(0.2)
    assert rank.moves[1] == pytest.approx([0.95 * worth for worth in rank.moves[0]])


def test_steps_without_prompts_weigh_what_decode_steps_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    monkeypatch.setattr(rank.shares, "move", lambda *worths: rank.moves.append(worths))
    rank.experts.steps, rank.now = 40, 11.0
    rank.shares.decide(0.2)
    assert rank.moves == [pytest.approx((0.0, 0.0, (3.5 + 2.5) * 2.0 * 0.1, (1.0 + 2.0) * 2.0 * 0.1))]
    assert rank.asked == []


@pytest.mark.parametrize(
    ("worths", "pages"),
    [  # of prefixes that go and that come, of experts that come and that go
        ((1.0, 0.0, 2.0, 0.0), 36),
        ((1.0, 0.0, 1.5, 0.0), 32),  # not clearly more
        ((0.0, 1.6, 0.0, 1.0), 28),
        ((0.0, 1.5, 0.0, 1.0), 32),
        ((1.0, 0.5, 2.0, 0.0), 28),  # as much as the other way
        ((1.0, 0.5, 2.1, 0.0), 36),
        ((1.0, 0.0, 0.0, 1.0), 32),
        ((0.0, 0.0, 0.0, 0.0), 32),
    ],
)
def test_the_share_moves_where_it_is_worth_clearly_more(worths: tuple[float, ...], pages: int) -> None:
    shares = Rank().shares
    shares.move(*worths)
    assert shares.expert_pages == pages


def test_the_share_stays_within_all_pages() -> None:
    shares = Rank().shares
    found = []
    for pages, worths in ((62, (0, 0, 1, 0)), (64, (0, 0, 1, 0)), (2, (0, 1, 0, 0)), (0, (0, 1, 0, 0))):
        shares.expert_pages = pages
        shares.move(*worths)
        found.append(shares.expert_pages)
    assert found == [64, 64, 0, 0]


def test_experts_at_the_margin_are_the_most_used_outside_and_the_least_used_inside() -> None:
    rank = Rank()
    assert rank.shares.margin_experts == 2  # 4 * 3 / 5, of which a part is of no use
    assert rank.shares.experts_at_margin() == ((5.0 + 7.0) / 2, (2.0 + 4.0) / 2)
    rank.offload.here = ~HERE
    assert rank.shares.experts_at_margin() == ((8.0 + 4.0) / 2, 0.5 / 2)  # nothing is used less than never
    rank.offload.arena.extent_slots = 1
    assert rank.shares.margin_experts == 1  # though 4 / 5
    assert rank.shares.experts_at_margin() == (4.0, 0.0)
    rank.offload.here, rank.offload.arena.extent_slots = np.array([[False] * 4, [True] * 4]), 10
    rank.offload.residency.forecast.lasting[:4] = -1
    assert rank.shares.experts_at_margin() == (0.0, (4.0 + 7.0 + 0.5) / 2)


def test_prompts_at_the_margin_take_longer_with_fewer_experts() -> None:
    rank = Rank()
    assert rank.shares.prompts_at_margin(50.0) == pytest.approx((0.625**2 - 0.375**2, 0.875**2 - 0.625**2))
    assert rank.asked == [(50.0, 0.125), (50.0, 0.375), (50.0, 0.625)]
    for filled, shares in ((True, [0.75, 1.0, 1.0]), (False, [0.0, 0.0, 0.25])):
        rank.offload.here, rank.asked = np.full((2, 4), filled), []
        rank.shares.prompts_at_margin(1.0)
        assert [share for _, share in rank.asked] == shares
    rank.offload.here = HERE
    rank.shares.prompt_step_s = lambda tokens, share: share  # where more experts only cost time
    assert rank.shares.prompts_at_margin(1.0) == (0.0, 0.0)


def step(hits: list[int], misses: list[int], times: list[list[int]]) -> Step:
    none = np.zeros((2, 1), np.uint8)
    return Step(0, 9, np.array(hits), np.array(misses), np.array(times), none, 4, 0, 0, 0)


def test_totals_are_sums_of_steps_that_are_forgotten_then() -> None:
    forgotten: list[int] = []
    offload: Any = SimpleNamespace(history=SimpleNamespace(steps=[]), forget=lambda: forgotten.append(1))
    totals = ExpertTotals(offload)
    assert totals.miss_s == 0.0
    offload.history.steps = [
        step([3, 1], [1, 2], [[0, 900_000_000, 500_000_000, 750_000_000], [0, 0, 900, 100]]),  # waits below 0 are none
        step([2, 2], [1, 0], [[10, 1_000_000_010, 0, 0], [0, 0, 0, 0]]),  # a device that does not tell
    ]
    totals.collect()
    assert (totals.steps, totals.hits, totals.misses, len(forgotten)) == (2, 8, 4, 1)
    assert totals.exposed_s == pytest.approx(1.25)
    assert totals.miss_s == pytest.approx(1.25 / 4)
    totals.collect()
    assert (totals.steps, totals.hits, totals.misses) == (4, 16, 8)
    assert totals.exposed_s == pytest.approx(2.5)
    for tokens in (0, 5, 7, 0):
        totals.prefilled(tokens)
    assert (totals.prompt_steps, totals.prompt_tokens) == (2, 12)
    totals.restart()
    counts = (totals.steps, totals.hits, totals.misses, totals.exposed_s, totals.prompt_steps, totals.prompt_tokens)
    assert counts == (0, 0, 0, 0.0, 0, 0)
    totals.exposed_s = 3.0
    assert totals.miss_s == 3.0  # waited for, although nothing was missed

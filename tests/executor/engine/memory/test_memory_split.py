"""The number of pages that experts are left, and the counts of experts."""

from typing import Any

import numpy as np
import pytest

from tests.fakes.shadow_experts import FakeShadowExperts
from umbra.executor.engine.memory.expert_totals import ExpertTotals
from umbra.executor.engine.memory.memory_split import MemorySplit
from umbra.executor.engine.memory.pages import PagePool
from umbra.executor.engine.memory.prefixes import PageCache

HERE = np.array([[True, False, False, True], [False, True, False, False]])
LASTING = [8.0, 1.0, 5.0, 2.0, -3.0, 4.0, 7.0, 0.5]


class Rank:
    """Two groups of 64 pages; the margin is 4 pages, which are 2 of 8 experts."""

    def __init__(self, pages: int = 64) -> None:
        self.now = 10.0
        self.caches = [PageCache(PagePool(pages, 4)) for _ in range(2)]
        shadows: Any = FakeShadowExperts(HERE, LASTING)
        self.experts = ExpertTotals(shadows)
        self.experts.misses, self.experts.exposed_s = 10, 1.0  # a decode step waits 0.1 s for a miss
        self.memory_split = MemorySplit(
            self.caches, self.experts, lambda tokens, share: (1 - share) ** 2, lambda: self.now
        )

    def second(self, hits: int = 0, missed: int = 0, steps: int = 0, prompts: int = 0) -> int:
        """A second with so many pages found at the margin and missed, and steps. -> the pages left to experts then"""
        self.now += 1
        self.caches[0].last_hits += hits
        self.caches[1].missed_hits += missed
        self.experts.steps += steps
        for _ in range(prompts):
            self.experts.prefilled(100)
        self.memory_split.decide(prefill_s=0.2)
        return self.memory_split.expert_pages


@pytest.mark.parametrize(
    ("counted", "pages"),
    [
        ({"steps": 5}, 36),  # experts that would come are used 6 times a step, those that would go 3 times
        ({"prompts": 1}, 36),
        ({"missed": 5}, 28),
        ({"hits": 9, "steps": 5}, 36),  # 9 * 0.2 s are saved by pages that would go, 5 * 6 * 0.1 s by experts
        ({"missed": 99, "steps": 1}, 28),  # 99 * 4 / 32 * 0.2 s against 3 * 0.1 s
    ],
)
def test_the_share_moves_where_it_is_worth_clearly_more(counted: dict[str, int], pages: int) -> None:
    assert Rank().second(**counted) == pages


def test_the_share_moves_once_a_second_and_stays_within_all_pages() -> None:
    rank = Rank()
    rank.experts.steps += 5
    rank.now += 0.9
    rank.memory_split.decide(0.2)
    assert rank.memory_split.expert_pages == 32
    assert [rank.second(steps=5) for _ in range(10)][-2:] == [64] * 2
    rank = Rank()
    assert [rank.second(missed=5) for _ in range(10)][-2:] == [0] * 2

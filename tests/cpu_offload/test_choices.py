"""The planner's choices from made-up costs, and the reasons that it prints."""

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from tests.cpu_offload.test_planner import COSTS, SHAPE
from umbra.cpu_offload.costs import Costs, Line
from umbra.cpu_offload.planner.choices import (
    COPYING,
    GAIN,
    MOST_SWAPS,
    ArenaSplit,
    ExplainedChoice,
    choose_slots,
    choose_streaming,
    choose_swaps,
    choose_threads,
    divisions,
)
from umbra.cpu_offload.planner.model import Planner


def planner(**costs: Any) -> Planner:
    return Planner(SHAPE, dataclasses.replace(COSTS, **costs))


def test_streaming_is_as_long_as_its_longest_side() -> None:
    used, pairs = round(SHAPE.used(100)), 800
    shadow = 0.04 + 0.02 * used / 2 + 0.001 * pairs / 2
    assert planner(copy=100.0).stream_ms(100, 0.5) == pytest.approx(0.01 + shadow)
    missing = (0.04 + used / 2 * (0.02 + 0.001 * pairs / used)) / (0.052 + 0.02 + 0.001 * pairs / used)  # equal ends
    assert planner().stream_ms(100, 0.5) == pytest.approx(0.01 + 0.052 * missing, rel=0.05)
    device = 0.002 * (1 + used / 2 / 8) + 0.001 * used + 0.0002 * pairs
    slow = planner(copy=0.0, shadow=Line(1e3, 0, 0))  # not even one expert
    assert slow.stream_ms(100, 0.5) == pytest.approx(0.01 + device, rel=0.05)
    assert planner(whole=Line(1, 2, 3)).stream_ms(100, 0.5) == pytest.approx(0.01 + 1 + 2 * SHAPE.used(100) + 3 * pairs)


def test_a_cheap_copy_streams_earlier() -> None:
    slow = Line(0.04, 0.002, 0.02)  # most of the CPU's time goes with the pairs
    values = [choose_streaming(planner(copy=c, shadow=slow), 0.5, 4, 4096).value for c in (0.001, 1.5, 4.0, 8.0)]
    assert values[0] == 5  # anything longer than a decode step
    assert all(a < b for a, b in pairwise(values))
    assert choose_streaming(planner(copy=1e3, shadow=slow), 0.5, 4, 4096).value == 0
    for value, copy in zip(values[1:], (1.5, 4.0, 8.0), strict=True):
        one = planner(copy=copy, shadow=slow)
        assert one.stream_ms(value, 0.5) < GAIN * one.layer_ms(value, 0.5)
        assert one.stream_ms(value // 2, 0.5) >= GAIN * one.layer_ms(value // 2, 0.5)


def test_nothing_is_streamed_where_nothing_is_missing_or_the_cpu_is_as_fast() -> None:
    assert choose_streaming(planner(copy=0.0), 1.0, 4, 4096).value == 0
    assert choose_streaming(planner(copy=0.01, shadow=Line(0, 1e-4, 1e-5)), 0.5, 4, 4096).value == 0
    assert choose_streaming(planner(copy=0.0), 0.5, 8, 8) == ExplainedChoice(0, "no prefill has more than 8 tokens")
    assert choose_streaming(planner(copy=0.0), 0.5, 8, 9).value == 9


def test_threads_are_tried_within_the_cores() -> None:
    assert divisions(2, 2, False, 0) == [(1, 1), (2, 1)]
    assert divisions(16, 16, False, 0) == [(8, 8), (12, 4), (15, 1), (16, 1)]
    assert divisions(16, 8, False, 0) == [(8, 1), (8, 4), (8, 8)]  # more do not read faster
    assert divisions(16, 5, True, 0) == [(5, 1), (5, 4), (5, 8)]
    assert divisions(16, 16, False, 3) == [(13, 3), (16, 3)]
    assert divisions(1, 1, False, 0) == [(1, 1)]
    assert divisions(2, 1, True, 1) == [(1, 1)]


def costs_of(device: int, shadow: int, device_ms: float, shadow_ms: float) -> Costs:
    """Each side's time divided by its threads."""
    sides: dict[str, Any] = {"device": Line(0, device_ms / device, 0), "shadow": Line(0, shadow_ms / shadow, 0)}
    return dataclasses.replace(COSTS, threads=(device, shadow), **sides)


@pytest.mark.parametrize(
    ("device_ms", "shadow_ms", "hit", "wanted"),
    [(0.01, 0.01, 0.5, (8, 8)), (0.1, 0.001, 0.5, (15, 1)), (0.01, 0.01, 0.9, (12, 4)), (0.01, 0.01, 0.98, (15, 1))],
)
def test_threads_go_where_the_longer_side_is(
    device_ms: float, shadow_ms: float, hit: float, wanted: tuple[int, int]
) -> None:
    tried = {
        threads: Planner(SHAPE, costs_of(*threads, device_ms, shadow_ms)) for threads in ((8, 8), (12, 4), (15, 1))
    }
    chosen = choose_threads(tried, 1, hit)
    assert chosen.value == wanted
    assert f"{tried[wanted].step_ms(1, hit):.3f} ms a step" in chosen.why
    assert chosen.why.count(" + ") == 3
    assert choose_threads({(3, 2): planner()}, 1, hit) == ExplainedChoice((3, 2), "no other was tried")


SPLIT = ArenaSplit(frames=200, extent_frames=4, extent_slots=8, longest=20, sequences=8, experts=640)


def test_misses_that_are_dear_want_slots_and_cheap_ones_sequences() -> None:
    none = Line(0, 0, 0)
    dear = Planner(SHAPE, dataclasses.replace(COSTS, device=none, shadow=Line(0.0, 1.0, 1.0)))
    cheap = Planner(SHAPE, dataclasses.replace(COSTS, device=none, shadow=Line(0, 0, 0)), rest=1.0)
    assert choose_slots(dear, SPLIT).value == SPLIT.slots(20)
    assert choose_slots(cheap, SPLIT).value == SPLIT.slots(160)
    why = choose_slots(cheap, SPLIT).why
    assert why.startswith("80 of 640: 0.138 ms a token with 8 sequence(s) at once; with 1: 1.100")
    with_hits = dataclasses.replace(SPLIT, curve=((SPLIT.slots(160) / 640, 1.0),))
    assert choose_slots(dear, with_hits).value == SPLIT.slots(160)  # so few hit as often as all
    one_by_one = dataclasses.replace(SPLIT, sequences=1)
    assert choose_slots(dear, one_by_one).value == SPLIT.slots(20)
    assert "with 1:" not in choose_slots(dear, one_by_one).why


def test_slow_copies_get_a_small_budget() -> None:
    step = planner().step_ms(4, 0.5)
    budgets = [choose_swaps(planner(copy=step / n / COPYING), 4, 0.5, 1).value for n in (1000.5, 10.5, 2.5, 0.1)]
    assert budgets == [MOST_SWAPS, 10, 2, 1]
    assert choose_swaps(planner(copy=step / 2.5 / COPYING), 4, 0.5, 3).value == 7
    longer = dataclasses.replace(planner(copy=step / 2.5 / COPYING), rest=step)
    assert choose_swaps(longer, 4, 0.5, 1).value == 5
    assert choose_swaps(planner(copy=0.0), 4, 0.5, 1).why.endswith("at most 32")

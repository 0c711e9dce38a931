"""What users see under steady traffic, and how layouts are listed and compared, of layouts whose step times are made
up."""

from types import SimpleNamespace
from typing import Any

import pytest

from planner.cluster import Cluster, Load, Search, Targets
from planner.layouts import Sizes, divisors, sizes_of, spans_of
from planner.machine import Hardware
from planner.plan import ClusterPlan, Found, frontier, lines_of, lines_of_layout, parts_of, row_of, slower_in, why_not
from planner.rates import Point, point, points, under_load, within_targets
from planner.times import PARTS, Times

SIZES = Sizes(3, 8, 2, 4, "none", 1.0)


def layout(most: int = 10, prefill: float = 0.5, cluster: Cluster | None = None, **parts: float) -> Any:
    """A step of n sequences takes (10 + n) ms, of which n are `KV`, beside `parts` in seconds."""

    def decode(sequences: int) -> Times:
        return Times(dict.fromkeys(PARTS, 0.0) | {"weights": 0.01, "KV": sequences * 1e-3} | parts)

    cluster = cluster or Cluster(load=Load(rate=1.0, prompt_tokens=100, output_tokens=50))
    return SimpleNamespace(
        sizes=SIZES,
        cluster=cluster,
        decode=decode,
        prefill=Times(dict.fromkeys(PARTS, 0.0) | {"weights": prefill}),
        most_sequences=most,
    )


def at(rate: float, ttft_ms: float = 1e9, tpot_ms: float = 1e9) -> Cluster:
    return Cluster(load=Load(rate=rate, prompt_tokens=100, output_tokens=50), targets=Targets(ttft_ms, tpot_ms))


def test_a_point_has_the_figures_of_littles_law() -> None:
    """Four groups of two sequences: each group's two take 50 steps of 12 ms and two prefills of half a second."""
    found = point(layout(), 2)
    rate = 4 * 2 / (50 * 0.012 + 2 * 0.5)  # five requests a second of a replica
    busy = rate * 0.5 / 4
    assert rate == pytest.approx(5.0)
    assert found.sequences == 2
    assert found.rate == pytest.approx(15.0)
    assert found.tpot == pytest.approx(0.012 / (1 - busy)) == pytest.approx(0.032)
    assert found.ttft == pytest.approx(0.5 * (1 + 0.625 / 2 / 0.375))
    assert found.tokens_per_device == pytest.approx(5.0 * 50 / 8)


@pytest.mark.parametrize(
    ("most", "counts"),
    [
        (1, [1]),
        (2, [1, 2]),
        (7, [1, 2, 3, 4, 5, 6, 7]),
        (9, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (11, [1, 2, 3, 4, 5, 6, 7, 8, 10, 11]),
        (40, [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 27, 33, 40]),
    ],
)
def test_points_from_one_sequence_to_as_many_as_fit(most: int, counts: list[int]) -> None:
    assert [found.sequences for found in points(layout(most))] == counts
    assert points(layout(most))[-1] == point(layout(most), most)


@pytest.mark.parametrize("most", [1, 2, 7, 10])
def test_the_fewest_sequences_that_keep_up(most: int) -> None:
    rates = [point(layout(), count).rate for count in range(1, most + 1)]
    for count, rate in enumerate(rates, 1):
        assert under_load(layout(most, cluster=at(rate))) == point(layout(), count)  # just as fast as they come
        assert under_load(layout(most, cluster=at(rate * 0.999))) == point(layout(), count)
    assert under_load(layout(most, cluster=at(rates[-1] * 1.001))) is None


@pytest.mark.parametrize("most", [1, 2, 7, 10])
def test_the_most_sequences_within_the_targets(most: int) -> None:
    made = [point(layout(), count) for count in range(1, most + 1)]
    for best, beyond in zip(made, [*made[1:], None], strict=True):
        just = at(1.0, best.ttft * 1e3, best.tpot * 1e3)
        assert within_targets(layout(most, cluster=just)) == best
        if beyond:
            slow = at(1.0, 1e9, beyond.tpot * 1e3 * 0.9999)
            late = at(1.0, beyond.ttft * 1e3 * 0.9999, 1e9)
            assert within_targets(layout(most, cluster=slow)) == best
            assert within_targets(layout(most, cluster=late)) == best
    first = made[0]
    assert within_targets(layout(most, cluster=at(1.0, first.ttft * 999, 1e9))) is None
    assert within_targets(layout(most, cluster=at(1.0, 1e9, first.tpot * 999))) is None


def test_divisors_of_a_number() -> None:
    assert [divisors(number) for number in (1, 2, 7, 12)] == [[1], [1, 2], [1, 7], [1, 2, 3, 4, 6, 12]]


def test_every_way_to_divide_the_devices() -> None:
    cluster = Cluster(devices=4, search=Search(methods=("none", "q4"), resident=(0.5, 1.0), worlds=(2,)))
    found = list(sizes_of(cluster))
    assert found[:4] == [
        Sizes(2, 2, 1, 1, "none", 0.5),
        Sizes(2, 2, 1, 1, "none", 1.0),
        Sizes(2, 2, 1, 2, "none", 0.5),
        Sizes(2, 2, 1, 2, "none", 1.0),
    ]
    assert found[4] == Sizes(2, 2, 2, 1, "none", 0.5)
    assert found[8] == Sizes(2, 2, 1, 1, "q4", 0.5)
    assert len(set(found)) == len(found) == 16
    worlds = [(s.replicas, s.world) for s in sizes_of(Cluster(devices=4, search=Search()))]
    assert list(dict.fromkeys(worlds)) == [(4, 1), (2, 2), (1, 4)]
    assert (SIZES.attn_dp, SIZES.moe_ep) == (4, 2)
    assert spans_of(8, 2) == {"world": 8, "attn_dp": 8, "attn_tp": 2, "embed_tp": 2, "lmhead_tp": 2}


def test_parts_are_named_from_the_largest_on() -> None:
    times = Times(dict.fromkeys(PARTS, 0.0) | {"KV": 2.5e-3, "weights": 0.01, "host": 1e-5, "launches": 0.99e-5})
    assert parts_of(times) == "weights 10.00, KV 2.50, host 0.01"


def test_a_layout_in_lines() -> None:
    found = Found(layout(), Point(2, 15.0, 0.032, 0.9, 1.0), Point(4, 18.126, 0.05, 1.0, 23.45))
    assert lines_of_layout(found) == [
        "  3 x 8: attention tp 2 dp 4, experts tp 4 ep 2",
        "    at the load: 32.00 ms a token, first after 900 ms, 2 sequences a group; 10 fit",
        "    most within the targets: 18.13 requests/s, 23.4 tokens/s a device",
        "    a token of one sequence      11.00 ms: weights 10.00, KV 1.00",
        "    a token of 2 a group         12.00 ms: weights 10.00, KV 2.00",
        "    prefill of a prompt         500.00 ms: weights 500.00",
    ]  # fmt: skip
    assert lines_of_layout(Found(layout(), found.load, None))[2] == "    most within the targets: none"


def test_a_row_of_a_layout() -> None:
    row = row_of(Found(layout(), Point(2, 15.0, 0.032, 0.9, 1.0), Point(4, 18.0, 0.05, 1.0, 23.5)))
    parts = row.pop("parts_ms")
    assert parts == dict.fromkeys(PARTS, 0.0) | {"weights": 10.0, "KV": 2.0}
    assert row == {
        "replicas": 3, "world": 8, "attn_tp": 2, "attn_dp": 4, "moe_tp": 4, "moe_ep": 2, "method": "none",
        "resident": 1.0, "sequences": 2, "most_sequences": 10, "tpot_ms": 32.0, "ttft_ms": 900.0, "most_rate": 18.0,
        "tokens_per_device": 23.5,
    }  # fmt: skip
    none = row_of(Found(layout(), Point(2, 15.0, 0.032, 0.9, 1.0), None))
    assert (none["most_rate"], none["tokens_per_device"]) == (0.0, 0.0)


def test_what_another_layout_is_slower_in() -> None:
    load = Point(2, 15.0, 0.032, 0.9, 1.0)
    best = Found(layout(), load, None)
    worse = Found(layout(collectives=0.004, host=0.003), load, None)
    assert slower_in(worse, best) == "collectives 4.00 ms for 0.00"
    assert slower_in(Found(layout(prefill=0.7), load, None), best) == "prefill 700 ms for 500"


def test_why_the_others_are_not_the_best() -> None:
    def found(tpot: float, ttft: float, rate: float) -> Found:
        return Found(layout(), Point(2, 15.0, tpot, ttft, 1.0), Point(2, rate, tpot, ttft, 1.0))

    made = [found(0.01 * n, 0.1, 10.0) for n in (5, 1, 2, 3, 4)] + [found(0.02, 9.0, 1.0)]
    cluster = at(1.0, 1000.0, 50.0)
    refused = [(SIZES, reason) for reason in ("b", "a", "a", "c", "d", "e", "f", "g", "h")]
    plan = ClusterPlan(cluster, Hardware(), made, [layout(most=3)], refused)
    assert plan.in_time == made[:5]  # one takes just as long as it may
    assert plan.quickest == [made[1], made[2], made[3]]
    assert plan.cheapest == [made[0], made[1], made[2]]
    lines = why_not(plan)
    assert lines[:3] == ["6 layouts keep up, 1 do not, 9 are refused:", "     2 x a", "     1 x b"]
    assert [line.strip()[:4] for line in lines[1:7]] == ["2 x ", *["1 x "] * 5]
    assert lines[7] == f"  {SIZES}: cannot keep up: 3 sequences a group fit"
    assert lines[8] == f"others, beside {SIZES}:"
    assert lines[9:] == [
        f"  {SIZES}: 20.00 ms a token, first after 9000 ms, too late: prefill 500 ms for 500",
        f"  {SIZES}: 40.00 ms a token, first after 100 ms: prefill 500 ms for 500",
    ]


def test_a_frontier_of_points_that_share_a_side() -> None:
    def at_(tpot: float, tokens: float) -> Point:
        return Point(1, 1.0, tpot, 1.0, tokens)

    slow, quick, same, less, more = at_(3, 9), at_(1, 5), at_(1, 4), at_(2, 5), at_(2, 6)
    assert frontier([slow, less, same, more, quick]) == [quick, more, slow]
    assert frontier([]) == []


def test_a_plan_without_a_layout_in_time_names_the_quickest() -> None:
    late = [Found(layout(), Point(2, 15.0, tpot, 0.1, 1.0), None) for tpot in (0.09, 0.08)]
    plan = ClusterPlan(at(1.0, 1000.0, 50.0), Hardware(), late, [], [])
    assert (plan.quickest, plan.cheapest) == ([], [])
    lines = why_not(plan)
    assert lines[0] == "2 layouts keep up, 0 do not, 0 are refused:"
    assert lines[1] == f"others, beside {SIZES}:"
    assert [line.split(": ")[2][:8] for line in lines[2:]] == ["80.00 ms", "90.00 ms"]
    text = lines_of(plan)
    assert text[4:9] == [
        "", "best for latency: no layout meets both targets at this load",
        "", "best for cost: no layout meets both targets at this load", "",
    ]  # fmt: skip
    assert text[9:] == lines
    assert why_not(ClusterPlan(plan.cluster, Hardware(), [], [layout()], []))[1:] == [
        f"  {SIZES}: cannot keep up: 10 sequences a group fit"
    ]


def test_layouts_that_never_meet_the_targets_with_more_are_the_dearest() -> None:
    load = Point(2, 15.0, 0.01, 0.1, 1.0)
    never, some, most = (
        Found(layout(), load, Point(2, rate, 0.01, 0.1, 1.0) if rate else None) for rate in (None, 0.5, 3.0)
    )
    assert ClusterPlan(at(1.0), Hardware(), [never, some, most], [], []).cheapest == [most, some, never]
    just = Found(layout(), Point(2, 15.0, 0.01, 1.0, 1.0), None)
    assert ClusterPlan(at(1.0, 1000.0, 10.0), Hardware(), [just], [], []).in_time == [just]

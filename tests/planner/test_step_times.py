"""The step times of a simulation, with a layout whose times are straight lines, the clock of its copies, and what it
sums up."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from planner.cluster import Targets
from planner.simulation import steps as module
from planner.simulation.experts import INTERVAL, Clock, Copies, SimulatedExperts, SimulatedLayer, Sizes, Steps, uses_of
from planner.simulation.replica import Sample
from planner.simulation.run import Outcome, Served
from planner.simulation.steps import StepTimes
from planner.simulation.summary import BUCKETS, memory_of, summary_of, times_of
from planner.times import PARTS, Times
from umbra.errors import UserError

LONGEST = 1000


@dataclasses.dataclass(frozen=True)
class Placed:
    resident: float


def stepping(monkeypatch: pytest.MonkeyPatch) -> StepTimes:
    """A decode step of n sequences with c cached tokens takes n + c / 100 seconds, a prefill of t tokens t squared and
    c, and a share s of resident experts adds 1 - s, for which devices wait."""

    def work(kind: str) -> Any:
        return lambda count, cached: (kind, count, cached)

    def step_times(work: Any, placing: Placed, hardware: str) -> Times:
        kind, count, cached = work
        assert hardware == "hardware"
        own = count + cached / 100 if kind == "decode" else count * count + cached
        waits = (1 - placing.resident) * (count if kind == "decode" else 1)
        return Times(dict.fromkeys(PARTS, 0.0) | {"KV": own, "shadow experts": waits})

    monkeypatch.setattr(module, "step_times", step_times)
    counted = SimpleNamespace(decode=work("decode"), prefill=work("prefill"))
    layout: Any = SimpleNamespace(counted=counted, placing=Placed(1.0), hardware="hardware")
    return StepTimes(layout, LONGEST)


def step(*sequences: tuple[int, int, int, bool], decode: bool = False) -> Any:
    """Of sequences (group, new tokens, cached tokens, whether it decodes)."""
    names = ("group", "new_tokens", "cached", "decoding")
    made = [SimpleNamespace(**dict(zip(names, each, strict=True))) for each in sequences]
    return SimpleNamespace(sequences=made, decode=decode)


def test_a_decode_step_waits_for_the_fullest_group(monkeypatch: pytest.MonkeyPatch) -> None:
    times = stepping(monkeypatch)
    assert times.decode(3, 50.0, 1.0) == pytest.approx(3.5)
    assert times.decode(3, 50.0, 0.25) == pytest.approx(5.75)
    of = step((0, 1, 100, True), (0, 1, 300, True), (1, 1, 600, True), decode=True)
    # two sequences in a group, and 600 cached tokens, as if spread over two
    assert times.seconds(of, 2, 1.0) == pytest.approx(2 + 3.0)
    seconds, exposed = times.decode_steps(of, 2, 0.5, 1)
    assert seconds == pytest.approx([6.0])
    assert exposed == 1.0
    rounded, _ = times.decode_steps(of, 2, 0.5 + 0.4 / 64, 1)
    assert rounded == seconds


def test_decode_steps_in_a_row_get_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    times = stepping(monkeypatch)
    same = step((0, 1, 100, True), (0, 1, 300, True), (1, 1, 100, True), decode=True)
    seconds, exposed = times.decode_steps(same, 2, 0.75, 3)
    assert seconds == pytest.approx([2.5 + (400 + 2 * i) / 200 for i in range(3)])
    assert exposed == pytest.approx(1.5)
    # the group with two sequences has more cached tokens from the fourth step on
    other = step((0, 1, 40, True), (0, 1, 43, True), (1, 1, 86, True), decode=True)
    seconds, exposed = times.decode_steps(other, 2, 1.0, 6)
    assert seconds == pytest.approx([2 + max(83 + 2 * i, 86 + i) / 200 for i in range(6)])
    assert exposed == 0


def test_prefills_are_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    times = stepping(monkeypatch)
    assert times.prefill(64, 0, 1.0) == 64**2
    assert times.prefill(96, 0, 1.0) == (64**2 + 128**2) / 2
    assert times.prefill(16, 0, 1.0) == 1 + (64**2 - 1) / 4  # below, from one token on
    assert times.prefill(64, 1023, 1.0) == 64**2
    assert times.prefill(64, 1024, 1.0) == 64**2 + 1024
    assert times.prompt_step_s(64.9, 0.5) == pytest.approx(64**2 + 0.5)
    assert times.prompt_step_s(0.0, 0.505) == pytest.approx(1 + (64**2 - 1) / 64 + 0.495)
    assert times.prompt_step_s(64, 1.0) == 64**2


def test_a_step_of_prompts_has_the_time_of_the_busiest_group(monkeypatch: pytest.MonkeyPatch) -> None:
    times = stepping(monkeypatch)
    of = step((0, 60, 2048, False), (1, 64, 0, False), (1, 63, 1024, False), (1, 1, 700, True), (1, 0, 100, True))
    # group 1: 128 tokens, prompts with up to 1024 cached, and 800 cached tokens of those that decode
    assert times.seconds(of, 2, 0.5) == pytest.approx(128**2 + 1024 + 0.5 + 8)
    alone = step((0, 64, 0, False))
    assert times.seconds(alone, 1, 1.0) == 64**2


def test_copies_follow_each_other_in_the_time_of_the_simulation() -> None:
    clock = Clock()
    copies: Any = Copies(clock, 2.0)
    assert (copies.staging_bytes, clock.now) == (0, 0.0)
    clock.now = 10.0
    assert [copies.copy(None, 0), copies.copy(None, 0)] == [0, 1]
    assert list(copies.ends) == [12.0, 14.0]
    clock.now = 11.9
    assert not copies.done(0)
    clock.now = 12.0
    assert copies.done(0)
    assert not copies.done(1)
    assert copies.copy(None, 0) == 2  # behind the one under way
    clock.now = 20.0
    assert copies.done(2)
    assert (copies.ended, len(copies.ends)) == (3, 0)
    assert copies.copy(None, 0) == 3
    assert list(copies.ends) == [22.0]
    memory = torch.empty(0)
    copies.open(memory, 0, lambda layer: None)
    assert copies.memory is memory


def test_steps_and_layers_of_a_simulation() -> None:
    steps = Steps()
    assert (steps.steps, steps.count_step(), steps.count_step(), steps.steps) == (0, 1, 2, 2)
    layer = SimulatedLayer(3, 10)
    assert layer.counts is None
    counts = torch.ones(3)
    layer.share(counts, counts)
    assert layer.counts is counts


def test_made_up_uses_are_shares_of_their_layer() -> None:
    uses = uses_of(np.random.default_rng(3), 1.5, 4, 6)
    drawn = np.exp(np.random.default_rng(3).normal(0, 1.5, (4, 6)))
    np.testing.assert_allclose(uses, drawn / drawn.sum(1, keepdims=True))
    np.testing.assert_allclose(uses_of(np.random.default_rng(3), 0.0, 2, 4), 0.25)


SIZES = Sizes(2, 4, 8, 3, 130, 50, 16, 50 * 60 + 49, 0.5, 3)


def test_resident_experts_are_a_share_of_those_that_are_used() -> None:
    made = SimulatedExperts(SIZES, 4, 1.0, 7)
    assert made.pairs == 1.5
    assert not made.elastic
    assert SimulatedExperts(SIZES, None, 1.0, 7).elastic
    np.testing.assert_array_equal(made.uses, uses_of(np.random.default_rng([7, 3]), 1.0, 2, 4))
    used = 1 - np.exp(-15 * made.uses.reshape(-1))
    np.testing.assert_allclose(made._chances(10), used / used.sum())
    published: Any = np.array([[1, 0, 0, 1], [0, 0, 1, 0]], bool)
    made.offload.published = published
    assert made.share(10) == pytest.approx(used[[0, 3, 6]].sum() / used.sum())
    for tokens, coarse in ((127, 127), (129, 128), (131, 130), (255, 254), (256, 256), (259, 256), (1027, 1024)):
        assert made.share(tokens) == pytest.approx(float(made._chances(coarse) @ published.reshape(-1)), rel=1e-12)


def test_the_memory_of_a_simulated_rank() -> None:
    fixed, elastic = SimulatedExperts(SIZES, 4, 1.0, 7), SimulatedExperts(SIZES, None, 1.0, 7)
    for made, mode, slots in ((fixed, "fixed", 4), (elastic, "elastic", 0)):
        settings, arena = made.offload.settings, made.offload.arena
        assert (settings.mode, settings.start_layer, settings.slots) == (mode, 0, slots)
        assert (settings.interval, settings.max_swaps) == (INTERVAL, 3)
        assert (arena.frames, arena.frame_bytes, arena.slot_bytes) == (60, 50, 130)
        assert [layer.count for layer in made.offload.layers] == [4, 4]


def test_experts_begin_at_the_time_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = SimulatedExperts(SIZES, None, 1.0, 7)
    done: Any = []
    monkeypatch.setattr(made.offload, "begin", lambda: done.append(made.clock.now))
    made.begin(5.0)
    assert done == [5.0]
    monkeypatch.setattr(made.offload, "end", lambda decode: None)
    monkeypatch.setattr(made.offload.balance, "step", lambda: done.append("step"))
    made.end(4, 2, 0.0)
    assert done[1:] == ["step"] * 3
    fixed: Any = SimulatedExperts(SIZES, 4, 1.0, 7)
    monkeypatch.setattr(fixed.offload, "end", lambda decode: None)
    monkeypatch.setattr(fixed.offload.balance, "step", lambda: done.append("of fixed"))
    fixed.end(4, 2, 0.0)
    assert len(done) == 4


def test_the_end_of_steps_is_noted() -> None:
    made: Any = SimulatedExperts(SIZES, 4, 1.0, 7)
    ended: Any = []
    made.offload.started = lambda *given: ended.append(given)
    made.offload.end = lambda decode: ended.append(decode)
    assert made.alike() == INTERVAL
    made.end(3, 5, 0.25)
    assert ended == [([5], [5]), True]
    assert (made.offload.step_number, made.routed) == (2, 15)
    assert made.offload.times[:, 2].tolist() == [1, 1]
    assert made.offload.times[:, 3].tolist() == [1 + 0.25 * 1e9 / 2] * 2
    assert made.alike() == INTERVAL - 2
    made.end(2, 0, 0.0)
    assert ended[2:] == [([0], [0]), False]
    assert (made.offload.step_number, made.routed) == (2, 15)
    assert made.offload.times[:, 3].tolist() == [1, 1]
    before = made.offload.counts.clone() if hasattr(made.offload.counts, "clone") else made.offload.counts.copy()
    made.end(INTERVAL - 2, 4, 0.0)  # the last step before a decision
    assert made.routed == 0
    assert int((made.offload.counts - before).sum()) > 0
    made.offload.copies = [object()]
    assert made.alike() == 1


def served(at: float, first: float, last: float, output: int = 3, prompt: int = 10, restarts: int = 0) -> Served:
    return Served(at, prompt, output, first, last, restarts)


def replica(**facts: Any) -> Any:
    return SimpleNamespace(
        **{"busy": 1.0, "preemptions": 0, "found": 0, "steps": 1, "totals": None, "samples": []} | facts
    )


def test_times_of_requests() -> None:
    first, each = times_of([served(1.0, 3.0, 7.0, 5), served(2.0, 2.5, 2.5, 1)])
    assert (first.tolist(), each.tolist()) == ([2.0, 0.5], [1.0, 0.0])


def test_what_a_simulation_found() -> None:
    requests = {
        0: served(10.0, 11.0, 13.0, prompt=30),
        1: served(10.0, 12.0, 13.0, restarts=2),
        2: served(40.0, 40.5, 42.5, prompt=20),
        3: served(58.0, 60.0, 64.0, restarts=1),
        4: Served(59.0, 10, 3),  # never ended
    }
    totals = [SimpleNamespace(hits=30, misses=10), SimpleNamespace(hits=30, misses=30)]
    replicas = [
        replica(busy=30.0, preemptions=2, found=14, steps=7, totals=totals[0]),
        replica(busy=6.0, preemptions=3, steps=5, totals=totals[1]),
    ]
    outcome = Outcome(requests, replicas, 70.0, 4, 6)
    found = summary_of(outcome, Targets(ttft_ms=1000.0, tpot_ms=1000.0), 2.0)
    assert {name: found.facts[name] for name in list(found.facts)[:13]} == pytest.approx({
        "requests": 5, "refused": 6, "in time": 2 / 5, "goodput, requests/s": 2 / 60, "output tokens/s": 12 / 60,
        "seconds": 60.0, "busy": 36 / 60 / 2, "preemptions": 5, "failures": 4, "restarted requests": 2,
        "prompt tokens found": 14 / 70, "steps": 12, "experts hit": 0.6,
    })  # fmt: skip
    slower = summary_of(outcome, Targets(ttft_ms=2000.0, tpot_ms=500.0), 2.0)
    assert slower.facts["in time"] == 1 / 5
    assert found.facts["TTFT p50, ms"] == pytest.approx(1500.0)
    assert found.facts["TPOT p50, ms"] == pytest.approx(1000.0)
    assert found.facts["TPOT p99, ms"] == pytest.approx(1000 + 0.97 * 1000)
    width = 48 / BUCKETS
    assert found.hours[0] == pytest.approx((10 + width / 2) / 2)
    assert found.hours[-1] == pytest.approx((58 - width / 2) / 2)
    rates = found.lines["requests/s"]
    assert (rates[0], rates[60], rates[-1], rates.sum()) == pytest.approx((2 / width, 1 / width, 1 / width, 4 / width))
    in_time = found.lines["in time"]
    assert (in_time[0], in_time[60], in_time[-1]) == (0.5, 1.0, 0.0)
    assert np.isnan(in_time[1])
    assert found.lines["TTFT p50, ms"][[0, 60, -1]].tolist() == [1500, 500, 2000]
    assert found.lines["TPOT p90, ms"][0] == pytest.approx(500 + 0.9 * 500)
    assert np.isnan(found.lines["TTFT p50, ms"][1])
    with pytest.raises(UserError, match=r"^simulation: no request ended$"):
        summary_of(Outcome({4: requests[4]}, replicas), Targets())
    one = summary_of(Outcome({0: requests[0]}, [replica()], 13.0), Targets())
    assert "experts hit" not in one.facts
    assert one.facts["seconds"] == 3.0
    assert summary_of(Outcome({0: requests[0]}, [replica()], 10.0), Targets()).facts["seconds"] == 1e-9


def test_hits_of_experts_that_were_never_asked_for() -> None:
    none = [replica(totals=SimpleNamespace(hits=0, misses=0))]
    assert summary_of(Outcome({0: served(1.0, 2.0, 3.0)}, none, 5.0), Targets()).facts["experts hit"] == 0
    once = [replica(totals=SimpleNamespace(hits=1, misses=0))]
    assert summary_of(Outcome({0: served(1.0, 2.0, 3.0)}, once, 5.0), Targets()).facts["experts hit"] == 1
    some = [*none, replica()]
    assert "experts hit" not in summary_of(Outcome({0: served(1.0, 2.0, 3.0)}, some, 5.0), Targets()).facts


def test_memory_is_that_of_the_looks_in_each_part() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    samples = [Sample(1.0, 1, 2, 3, 4), Sample(1.5, 3, 4, 3, 0), Sample(5.0, 9, 9, 9, 9)]
    found: Any = memory_of(samples, edges)
    np.testing.assert_allclose(found, np.array([[0.0] * 4, [0.2, 0.3, 0.3, 0.2], [0.2, 0.3, 0.3, 0.2]]))
    assert not memory_of([], edges).any()

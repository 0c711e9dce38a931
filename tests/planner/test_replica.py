"""How many equal steps a simulated replica takes together, where it cuts them, and what it loses; and the simulator's
failures and fronts, with replicas that are made up."""

import heapq
import itertools
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpu_offload.planner.choices import COPYING, MOST_SWAPS
from executor.config.load import load_case
from executor.engine.batch_limits import Limits
from executor.engine.pages import PagePool
from planner.cluster import Load, Simulation
from planner.simulation import replica as module
from planner.simulation import run as simulating
from planner.simulation.experts import INTERVAL, Sizes
from planner.simulation.replica import COLLECT_S, SAMPLE_S, Certain, Replica, Run, Sample, sampling_of
from planner.simulation.router import GONE, Router
from planner.simulation.run import FAIL, LOSE_NODE, RETURN, STEP, Outcome, Served, Simulator
from planner.simulation.traffic import Arrival
from planner.times import GIGA
from umbra.errors import UserError

SIZE = 4  # tokens of a page


def sequence(longest: int, tokens: int, promised: int, group: int = 0, cached: int = 0, blocks: int = 0) -> Any:
    return SimpleNamespace(
        longest=longest, ids=[0] * tokens, promised=promised, group=group, cached=cached, blocks=[None] * blocks
    )


def alike(*sequences: Any, pages: int = 10, committed: int = 10, experts: Any = None) -> int:
    replica: Any = Replica.__new__(Replica)
    replica.limits, replica.experts = SimpleNamespace(page_size=SIZE), experts
    groups = [[s for s in sequences if s.group == group] for group in range(2)]
    replica.scheduler = SimpleNamespace(
        by_group=lambda given: groups, pools=[SimpleNamespace(pages=pages)] * 2, committed=lambda group: committed
    )
    return int(replica._alike(SimpleNamespace(sequences=sequences)))


def test_steps_are_alike_up_to_the_end_of_a_sequence() -> None:
    assert alike(sequence(20, 5, 5), sequence(12, 5, 5)) == 7
    assert alike(sequence(20, 5, 5), sequence(6, 5, 5)) == 1


def test_steps_are_alike_while_the_promised_pages_suffice() -> None:
    """Beside the next token, which has its place already."""
    assert alike(sequence(30, 5, 3)) == 1 + 7
    assert alike(sequence(13, 5, 3)) == 8
    assert alike(sequence(30, 5, 3), sequence(30, 5, 2)) == 1 + 3
    assert alike(sequence(30, 8, 2)) == 1


def test_spare_pages_are_shared_by_the_sequences_of_a_group() -> None:
    assert alike(sequence(90, 5, 3), pages=15) == 1 + 5 * SIZE
    assert alike(sequence(90, 5, 3), sequence(90, 5, 3), pages=15) == 1 + 2 * SIZE
    assert alike(sequence(90, 5, 4), sequence(90, 5, 4), pages=12) == 1 + 11  # those promised are more
    assert alike(sequence(90, 5, 3), sequence(90, 5, 3, group=1), pages=15) == 1 + 5 * SIZE
    assert alike(sequence(20, 5, 3), pages=15) == 15


def experts(number: int, free: int) -> Any:
    return SimpleNamespace(alike=lambda: number, offload=SimpleNamespace(arena=SimpleNamespace(free_frames=free)))


def test_steps_end_when_experts_are_decided_about_or_may_leave() -> None:
    one = sequence(20, 5, 9, cached=4, blocks=1)
    assert alike(one, experts=experts(6, 3)) == 6
    assert alike(one, experts=experts(99, 5)) == 15
    assert alike(one, experts=experts(9, 2)) == 1  # three more pages are taken in nine steps
    assert alike(one, experts=experts(9, 3)) == 1
    assert alike(one, experts=experts(9, 4)) == 9
    assert alike(one, one, experts=experts(4, 3)) == 4
    assert alike(one, one, experts=experts(4, 2)) == 1
    roomy = sequence(20, 5, 9, cached=4, blocks=8)
    assert alike(one, roomy, experts=experts(4, 2)) == 4


def running(*ends: float, exposed: float = 0.0) -> Any:
    replica: Any = Replica.__new__(Replica)
    replica.run = Run(SimpleNamespace(), 1.0, list(ends), exposed) if ends else None  # type: ignore[arg-type]
    return replica


def test_steps_are_cut_at_the_one_that_runs() -> None:
    replica = running(2.0, 3.0, 4.0, 5.0, exposed=2.0)
    assert replica.cut(4.5) is None
    assert replica.cut(2.5) == 3.0
    assert replica.run.ends == [2.0, 3.0]
    assert replica.run.exposed == 1.0
    assert running(2.0, 3.0, 4.0).cut(1.5) == 2.0
    assert running(2.0, 3.0, 4.0).cut(2.0) == 2.0
    assert running(2.0, 3.0, 4.0).cut(3.0) == 3.0
    assert running(2.0, 3.0, 4.0).cut(3.1) is None
    assert running(2.0).cut(1.5) is None
    assert running(2.0, 3.0).cut(1.5) == 2.0
    assert running().cut(1.5) is None


def test_what_ran_before_a_failure_counts() -> None:
    replica = running(2.0, 3.0, 4.0)
    started: Any = []
    replica.sequences, replica.steps, replica.busy = {7: None, 9: None}, 5, 10.0
    replica.start = lambda: started.append(True)
    assert replica.lose(3.0) == [7, 9]
    assert (replica.steps, replica.busy, started) == (7, 12.0, [True])
    idle = running()
    idle.sequences, idle.steps, idle.busy, idle.start = {}, 5, 10.0, replica.start
    assert idle.lose(3.0) == []
    assert (idle.steps, idle.busy) == (5, 10.0)
    assert running().end() == []


def test_a_sample_is_how_the_pages_are_divided() -> None:
    replica: Any = Replica.__new__(Replica)
    replica.now, replica.samples, replica.experts = 7.0, [], None
    caches = [SimpleNamespace(held=5, idle=[0] * 3)]
    replica.scheduler = SimpleNamespace(caches=caches, pools=[SimpleNamespace(pages=20)])
    replica._sample()
    arena = SimpleNamespace(frames=50, slot_frames=30)
    replica.experts = SimpleNamespace(offload=SimpleNamespace(arena=arena))
    replica._sample()
    assert replica.samples == [Sample(7.0, 5, 3, 0, 12), Sample(7.0, 5, 3, 30, 12)]
    replica.totals, collected = None, list[bool]()
    replica._collect()
    replica.totals = SimpleNamespace(collect=lambda: collected.append(True))
    replica._collect()
    assert (replica._collected, collected) == (7.0, [True])


def test_the_end_of_steps_that_were_taken_together() -> None:
    replica = running(2.0, 3.0, exposed=0.5)
    noted: Any = []
    decode = SimpleNamespace(decode=True, sequences=["s", "t"], finished_prompts=["s", "t"])
    replica.run.step = decode
    replica.busy, replica.steps, replica.found, replica.sequences = 1.0, 2, 3, {7: "s", 8: "t"}
    replica._certain, replica._collected, replica._sampled = "certain", 3.0 - COLLECT_S, 3.1
    replica.prefill_rate = SimpleNamespace(learn=lambda *given: noted.append(("learn", *given)))
    replica._draft = lambda step, more: noted.append(("draft", more))
    replica._collect, replica._sample = (lambda: noted.append("collect")), (lambda: noted.append("sample"))
    replica.experts = SimpleNamespace(end=lambda *given: noted.append(("end", *given)))
    replica.totals = SimpleNamespace(steps=10, prefilled=lambda tokens: noted.append(("prefilled", tokens)))
    events = [SimpleNamespace(id=7, finish_reason="length", found=5), SimpleNamespace(id=8, finish_reason="", found=9)]

    def commit(step: Any, tokens: "array[int]") -> Any:
        noted.append(("commit", replica.scheduler.drafts, tokens.tolist()))
        return events

    replica.scheduler = SimpleNamespace(commit=commit, drafts=None)
    assert replica.end() == [(7, True), (8, False)]
    assert noted == [
        ("learn", 0, 2.0), ("draft", 1), ("end", 2, 2, 0.5), ("prefilled", 0), ("commit", "certain", [0] * 4),
        "collect",
    ]  # fmt: skip
    assert (replica.now, replica.busy, replica.steps, replica.found, replica.totals.steps) == (3.0, 3.0, 4, 8, 11)
    assert (replica.sequences, replica.run, replica.scheduler.drafts) == ({8: "t"}, None, None)
    noted.clear()
    prompts = [SimpleNamespace(new_tokens=6, decoding=False), SimpleNamespace(new_tokens=1, decoding=True)]
    step: Any = SimpleNamespace(decode=False, sequences=prompts, finished_prompts=prompts[1:])
    replica.run, replica._collected = Run(step, 3.0, [121.0], 0.25), 121.0 - COLLECT_S + 0.01
    events[:] = []
    assert replica.end() == []
    assert noted == [
        ("learn", 6, 118.0), ("end", 1, 0, 0.25), ("prefilled", 6), ("commit", None, [0]), "sample",
    ]  # fmt: skip
    assert replica._sampled == 3 * SAMPLE_S


def made_replica(
    pages: int = 1000, prefill_tokens: int | None = 100, pause_s: float = 0.0, shadowed: Any = None
) -> Any:
    """One whose steps take a second for each hundred prompt tokens, and half a second for each that decodes."""
    asked: Any = []

    def prefill(tokens: int, cached: int, resident: float) -> float:
        asked.append((tokens, cached, resident))
        return tokens / 1e4

    def decode_steps(step: Any, groups: int, share: float, count: int) -> Any:
        asked.append(("decode", groups, share, count))
        return [0.5] * count, 0.125 * count

    def seconds(step: Any, groups: int, share: float) -> float:
        asked.append(("prompts", groups, share))
        return 2.0

    layout = SimpleNamespace(sizes=SimpleNamespace(resident=0.75))
    times: Any = SimpleNamespace(
        prefill=prefill, layout=layout, decode_steps=decode_steps, seconds=seconds, asked=asked
    )
    limits = Limits(
        batch_size=4, max_sequence_length=2000, page_size=SIZE, prefill_tokens=prefill_tokens, mixed_tokens=100,
        reserve=9,
    )  # fmt: skip
    return Replica(5, limits, pages, times, shadowed, pause_s)


def test_a_warm_up_learns_from_prompts_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: Any = []
    monkeypatch.setattr(
        module.Pace, "learn", lambda self, amounts, seconds: learned.append((amounts.tolist(), seconds))
    )
    replica = made_replica(pause_s=0.1)
    found = replica.times.asked
    # 64, 128, 256: the next one would take more than an eighth of all pages
    assert found[:3] == [(64, 0, 0.75), (100, 0, 0.75), (28, 100, 0.75)]
    assert found[3:] == [(100, 0, 0.75), (100, 100, 0.75), (56, 200, 0.75)]
    assert [(amounts[1], seconds) for amounts, seconds in learned[:3]] == [(64, 0.0064), (100, 0.01), (28, 0.0028)]
    assert learned[2][0][2] == 28 * (100 + 14)
    assert made_replica().pace is None
    whole = made_replica(prefill_tokens=None, pause_s=0.1)
    assert whole.times.asked == [(64, 0, 0.75), (128, 0, 0.75), (256, 0, 0.75)]
    asked: Any = []
    monkeypatch.setattr(module, "next_prompt", lambda *given: asked.append(given) or 0)
    made_replica(pages=77, pause_s=0.1)
    assert asked == [(64, pytest.approx(0.0064), SIZE, 77, 2000)]


def test_steps_begin_and_end() -> None:
    replica = made_replica()
    assert (replica.number, replica.busy, replica.steps, replica.preemptions, replica.found, replica.now) == (
        5,
        0,
        0,
        0,
        0,
        0,
    )
    assert (replica.scheduler.pools[0].pages, replica.scheduler.pools[0].page_size) == (1000, SIZE)
    assert replica.begin(1.0) is None
    replica.add(3, Arrival(0.0, array("q", range(6)), 4))
    assert replica.begin(2.0) == 4.0
    assert (replica.now, replica.run.start, replica.run.ends, replica.run.exposed) == (2.0, 2.0, [4.0], 0.0)
    assert replica.times.asked == [("prompts", 1, 0.75)]
    assert replica.end() == [(3, False)]
    assert replica.begin(4.0) == 5.5  # three tokens more
    assert (replica.run.ends, replica.run.exposed) == ([4.5, 5.0, 5.5], 0.375)
    assert replica.times.asked[1:] == [("decode", 1, 0.75, 3)]
    assert replica.end() == [(3, True)]
    assert (replica.busy, replica.steps, replica.sequences) == (3.5, 4, {})
    assert replica.begin(6.0) is None
    assert [sample.at for sample in replica.samples] == [4.0]


def test_steps_that_are_taken_together_have_their_pages_and_drafts() -> None:
    replica, done = made_replica(), list[Any]()
    sequences = [SimpleNamespace(ids=array("q", [7]), drafted=0) for _ in range(2)]
    replica.scheduler = SimpleNamespace(
        grow=lambda given: done.append(("grow", given)), reserve=lambda given: done.append(("reserve", given))
    )
    replica._draft(SimpleNamespace(sequences=sequences), 3)
    assert [(s.ids.tolist(), s.drafted) for s in sequences] == [([7, 0, 0, 0], 3)] * 2
    assert done == [("grow", sequences), ("reserve", sequences)]


def test_shares_of_memory_are_decided_once_prompts_have_a_rate() -> None:
    replica, done = made_replica(), list[Any]()
    step = SimpleNamespace(sequences=[], decode=False)
    replica.scheduler = SimpleNamespace(
        schedule=lambda: step, preempted=["a", "b"], reserve=lambda given: done.append(("reserve", given))
    )
    replica.shares = SimpleNamespace(decide=done.append, expert_pages=13)
    replica.begin(1.0)
    assert done == [("reserve", [])]
    assert (replica.scheduler.expert_pages, replica.preemptions) == (13, 2)
    replica.prefill_rate.value = 8.0
    replica.begin(2.0)
    assert (done[1], replica.preemptions) == (SIZE / 8.0, 4)


def test_prompt_tokens_beside_others_follow_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = made_replica(pause_s=0.1)
    asked: Any = []
    learned: Any = []
    replica.pace = SimpleNamespace(
        chunk=lambda *given: (asked.append(given), 8)[1],
        learn=lambda amounts, seconds: learned.append((amounts.tolist(), seconds)),
    )
    replica.add(3, Arrival(0.0, array("q", range(6)), 4))
    replica.begin(2.0)
    assert asked == [(replica.scheduler.running, SIZE, 0.1, 100)]
    assert replica.scheduler.mixed_tokens == 8
    assert learned == [([1, 6, 18], 2.0)]
    replica.end()
    replica.begin(4.0)
    assert len(learned) == 1  # a decode step


def test_experts_of_a_replica_share_its_steps() -> None:
    begun: Any = []
    offload = SimpleNamespace(arena=SimpleNamespace(free_frames=50))
    experts = SimpleNamespace(
        pages=PagePool(1000, SIZE), offload=offload, elastic=False, begin=begun.append, alike=lambda: 2,
        share=lambda tokens: begun.append(("share", tokens)) or 0.5,
    )  # fmt: skip
    replica = made_replica(shadowed=lambda: experts)
    assert (replica.experts, replica.shares) == (experts, None)
    assert replica.totals is not None
    replica.totals = None
    replica.add(3, Arrival(0.0, array("q", range(6)), 9))
    replica.begin(2.0)
    assert begun == [2.0, ("share", 6)]
    assert replica.times.asked == [("prompts", 1, 0.5)]


def test_certain_drafts_keep_the_last_token() -> None:
    made: Any = SimpleNamespace(drafted=3)
    assert Certain(0).accept(made, [4, 5, 6]) == [6]
    assert made.drafted == 0
    assert sampling_of(9) is sampling_of(9)
    assert (sampling_of(9).max_tokens, sampling_of(9).ignore_eos) == (9, True)


class Fake:
    """A replica of which the simulator only asks what it lost, and what its steps gave."""

    def __init__(self, number: int):
        self.number, self.run, self.lost = number, None, list[int]()
        self.events: list[tuple[int, bool]] = []

    def lose(self, now: float) -> list[int]:
        return self.lost

    def end(self) -> list[tuple[int, bool]]:
        return self.events


def simulator(count: int = 3, **settings: Any) -> Any:
    made: Any = Simulator.__new__(Simulator)
    made.simulation = Simulation(**settings)
    made.layout = SimpleNamespace(
        sizes=SimpleNamespace(world=4), cluster=SimpleNamespace(devices=17),
        hardware=SimpleNamespace(need={"host.devices": 8.0}.__getitem__),
    )  # fmt: skip
    made.outcome = Outcome(replicas=[Fake(n) for n in range(count)])  # type: ignore[misc]
    made.router = Router("least_loaded", 4, count)
    made.events, made.order = [], itertools.count()
    made.lives, made.runs = [0] * count, [0] * count
    made.back, made.fronts, made.open, made.held = [0.0] * count, [0.0] * count, {}, []
    made.choose = np.random.default_rng(0)
    return made


def test_a_replica_that_fails_returns_and_its_requests_go_elsewhere() -> None:
    made = simulator(2)
    replica = made.outcome.replicas[1]
    replica.lost = [5]
    made.outcome.served[5] = Served(1.0, 10, 3, first=2.0, restarts=1)
    sent: Any = []
    made._send = lambda *given: sent.append(given)
    made._fail(replica, 10.0, 60.0)
    assert (made.lives, made.runs, made.back) == ([0, 1], [0, 1], [0.0, 70.0])
    assert made.events == [(70.0, RETURN, 0, 1, 1)]
    assert (made.outcome.failures, made.router.alive, int(made.router.loads[1])) == (1, 1, GONE)
    assert made.outcome.served[5] == Served(1.0, 10, 3, first=0.0, restarts=2)
    assert sent == [(5, 10.0)]
    made._fail(replica, 20.0, 30.0)  # it is lost already, for longer
    assert made.back[1] == 70.0
    made._fail(replica, 30.0, 60.0)
    assert made.back[1] == 90.0
    assert made.events[-1] == (90.0, RETURN, 2, 1, 3)
    assert (made.outcome.failures, made.router.alive, len(sent)) == (1, 1, 1)
    made.held = [5, 6]
    made._return(replica, 90.0)
    assert (made.held, sent[1:], made.router.alive) == ([], [(5, 90.0), (6, 90.0)], 2)


def test_failures_come_at_their_mean_times() -> None:
    made = simulator(2, rank_failure_hours=2.0, node_failure_hours=3.0)
    same = np.random.default_rng(0)
    made._plan_failure(made.outcome.replicas[1], 5.0)
    made._plan_loss(2, 7.0)
    rank, node = 5.0 + same.exponential(2.0 * 3600 / 4), 7.0 + same.exponential(3.0 * 3600)
    assert sorted(made.events) == sorted([(rank, FAIL, 0, 1, 0), (node, LOSE_NODE, 1, 2, 0)])
    assert made._nodes() == range(3)
    none = simulator(2)
    none._plan_failure(none.outcome.replicas[1], 5.0)
    assert (none.events, none._nodes()) == ([], range(0))


def test_tokens_wait_for_the_front() -> None:
    made = simulator(1, front_token_us=500_000.0)
    replica = made.outcome.replicas[0]
    replica.run, replica.events = SimpleNamespace(ends=[9.0, 10.0]), [(1, True), (2, False)]
    made.outcome.served |= {1: Served(0.0, 5, 3, first=4.0), 2: Served(0.0, 5, 3)}
    made.open = {1: None, 2: None}
    made.router.loads[0], begun = 2, list[float]()
    made._begin_step = lambda replica, now: begun.append(now)
    made._end_step(replica, 10.0)
    one, two = made.outcome.served.values()
    assert (one.first, one.last, two.first, two.last) == (4.0, 11.0, 12.0, 0.0)
    assert (made.fronts, begun, made.open) == ([12.0], [10.0], {2: None})
    assert int(made.router.loads[0]) == 1
    replica.events = [(2, True)]
    made._end_step(replica, 11.0)
    assert two.last == 13.0


def test_requests_wait_while_no_replica_is_alive() -> None:
    made = simulator(1)
    made.router.alive = 0
    made.open[3] = Arrival(0.0, array("q", [1]), 2)
    made._send(3, 1.0)
    assert made.held == [3]
    made.router.alive = 1
    replica, cut = made.outcome.replicas[0], list[float]()
    replica.add = lambda id, arrival: None
    replica.begin = lambda now: 8.0
    made._send(3, 2.0)
    assert (made.events, made.runs, int(made.router.loads[0])) == ([(8.0, STEP, 0, 0, 1)], [1], 1)
    replica.run, replica.cut = object(), lambda now: cut.append(now)
    made._send(3, 3.0)
    assert (cut, made.runs, int(made.router.loads[0])) == ([3.0], [1], 2)
    replica.cut = lambda now: 6.0
    made._send(3, 4.0)
    assert heapq.heappop(made.events) == (6.0, STEP, 1, 0, 2)


@pytest.mark.parametrize(("first", "second"), [(STEP, FAIL), (FAIL, LOSE_NODE), (LOSE_NODE, RETURN)])
def test_of_events_at_the_same_time_steps_come_first(first: int, second: int) -> None:
    made = simulator()
    made._at(1.0, second, 0, 0)
    made._at(1.0, first, 0, 0)
    assert [heapq.heappop(made.events)[1] for _ in range(2)] == [first, second]


def laid_out(resident: float = 1.0, replicas: int = 2) -> Any:
    """A layout with 60 pages of 16 tokens for keys and values, of 110 if no expert is resident."""
    case = load_case("demo", ["prefix_floor=64", "prefill_pause_ms=250"])
    config = SimpleNamespace(expert_count=32, experts_per_token=4)
    memory = SimpleNamespace(token=10.0, experts=24_000, rest=5)
    return SimpleNamespace(
        sizes=SimpleNamespace(resident=resident, replicas=replicas, attn_dp=3, moe_ep=4, world=4),
        cluster=SimpleNamespace(search=SimpleNamespace(most_sequences=7, chunk=40), load=Load(), devices=8),
        counted=SimpleNamespace(case=case, config=config, memory=memory, expert_layers=5),
        all_free_bytes=160.0 * 111 + 9, free_bytes=160.0 * 61 + 9,
        decode=lambda count: SimpleNamespace(total=count * 8.0),
        hardware=SimpleNamespace(need={"host.copy_gbps": 1e-6, "host.devices": 8.0}.__getitem__),
    )  # fmt: skip


def test_a_simulator_has_the_limits_of_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = []
    monkeypatch.setattr(simulating, "Replica", lambda *given: (made.append(given), f"replica {given[0]}")[1])
    simulation = Simulation(longest=960, reserve=11, mixed_tokens=30, prefix_cache=False, router="prefix_aware", seed=6)
    of: Any = Simulator(laid_out(), simulation, "times")  # type: ignore[arg-type]
    limits = Limits(21, 960, 16, 3, 40, 30, 11, prefixes=False, prefix_floor=4)
    assert of.limits == limits
    assert made == [(n, limits, 60, "times", None, 0.0) for n in (0, 1)]
    assert of.outcome.replicas == ["replica 0", "replica 1"]
    assert (of.router.kind, of.router.page_size, of.router.alive) == ("prefix_aware", 16, 2)
    assert (of.lives, of.runs, of.back, of.fronts) == ([0, 0], [0, 0], [0.0, 0.0], [0.0, 0.0])
    assert (of.open, of.held, of.events, next(of.order)) == ({}, [], [], 0)
    assert of.choose.random() == np.random.default_rng([6, 2]).random()
    with pytest.raises(UserError, match=r"^simulation\.longest: 961 tokens of one sequence do not fit into the 960 of"):
        Simulator(laid_out(), Simulation(longest=961), "times")  # type: ignore[arg-type]
    few = laid_out()
    few.free_bytes = 160.0 * 6
    assert Simulator(few, Simulation(longest=80), "times").limits.batch_size == 15  # type: ignore[arg-type]
    for tokens, most, pause in ((0, 40, 0.25), (50, 40, 0.0), (40, 40, 0.0)):
        of = Simulator(laid_out(), Simulation(longest=960, mixed_tokens=tokens), "times")  # type: ignore[arg-type]
        assert (of.limits.mixed_tokens, made[-1][5]) == (most, pause)


def test_experts_have_shadows_where_some_are_not_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = []
    monkeypatch.setattr(simulating, "Replica", lambda *given: made.append(given))
    monkeypatch.setattr(simulating, "StepTimes", lambda *given: given)
    monkeypatch.setattr(simulating, "SimulatedExperts", lambda *given: given)
    for resident, memory, pages, slots in (
        (0.5, "fixed", 60, 20),
        (0.5, "elastic", 110, None),
        (1.0, "elastic", 110, None),
    ):
        layout, simulation = laid_out(resident, 1), Simulation(longest=900, memory=memory, skew=1.5, seed=3)
        Simulator(layout, simulation)
        *_, found, times, shadows, _ = made[-1]
        assert (found, times) == (pages, (layout, 900))
        sizes, fixed, skew, seed = shadows()
        assert (fixed, skew, seed) == (slots, 1.5, 3)
        # an expert has 600 bytes, which are copied in 0.6 s; copies may take a share of a step of 8 s
        swaps = min(int(8.0 / COPYING / 0.6), MOST_SWAPS)
        assert sizes == Sizes(5, 8, 32, 4, 600, 160, 16, 160 * 111 + 9, 600 / (1e-6 * GIGA), INTERVAL * swaps)
    slow = laid_out(0.5, 1)
    slow.decode = lambda count: SimpleNamespace(total=1e-9)
    Simulator(slow, Simulation(longest=900))
    assert made[-1][4]()[0].most_swaps == INTERVAL
    quick = laid_out(0.5, 1)
    quick.decode = lambda count: SimpleNamespace(total=1e9)
    Simulator(quick, Simulation(longest=900))
    assert made[-1][4]()[0].most_swaps == INTERVAL * MOST_SWAPS


def test_events_are_served_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come after the front's time; steps of replicas that have failed since do not count."""
    made, done = simulator(2, front_ms=500.0, restart_s=7.0), list[Any]()
    coming = [Arrival(at, array("q", [1] * 4), 9) for at in (1.0, 3.0)]
    monkeypatch.setattr(simulating, "arrivals", lambda load, simulation: iter(coming))
    made.layout.cluster.load = Load()
    made._plan_failure = lambda replica, now: done.append(("plan", replica.number, now))
    made._nodes, made._plan_loss = (lambda: range(1)), (lambda node, now: done.append(("loss", node, now)))
    made.runs, made.lives = [4, 2], [1, 0]

    def send(id: int, now: float) -> None:
        done.append(("send", id, now))
        made._at(now + 1.0, STEP, 0, 4)

    def end_step(replica: Any, now: float) -> None:
        done.append(("step", replica.number, now))
        made.open.clear()

    made._send, made._end_step = send, end_step
    made._fail = lambda replica, now, seconds: done.append(("fail", replica.number, now, seconds))
    made._return = lambda replica, now: done.append(("return", replica.number, now))
    made._lose_node = lambda node, now: done.append(("node", node, now))
    made._at(1.25, LOSE_NODE, 3, 0)
    made._at(1.5, STEP, 1, 2)  # at the time of the first request, which comes first
    made._at(1.75, STEP, 0, 3)  # of an earlier run
    made._at(1.75, FAIL, 0, 0)  # of an earlier life
    made._at(2.0, FAIL, 0, 1)
    made._at(2.25, RETURN, 1, 0)
    made._at(9.0, FAIL, 1, 0)  # after the end
    outcome = made.run()
    assert done == [
        ("plan", 0, 0.0), ("plan", 1, 0.0), ("loss", 0, 0.0), ("node", 3, 1.25), ("send", 0, 1.5), ("step", 1, 1.5),
        ("fail", 0, 2.0, 7.0), ("return", 1, 2.25), ("step", 0, 2.5), ("send", 1, 3.5), ("step", 0, 4.5),
    ]  # fmt: skip
    assert outcome.served == {0: Served(1.0, 4, 9), 1: Served(3.0, 4, 9)}
    assert outcome.end == 4.5

"""The measurements of the planner's costs, with made-up times."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpu_offload.planner import probe
from cpu_offload.planner.model import Line, Shape
from ops.cpu import engine, shadow
from ops.format import FORMATS

BASE = 0.5


class FakeProbe:
    """A mixture of which each call takes `ms`."""

    def __init__(self, tokens: int, ms: float, top_k: int = 4, experts: int = 8):
        self.tokens, self.ms, self.top_k = tokens, ms, top_k
        self.layer = SimpleNamespace(store=range(experts))
        self.calls: list[tuple[int, int]] = []

    def pairs(self, experts: int) -> int:
        return self.tokens * min(self.top_k, experts)

    def __call__(self, resident: int, missing: int) -> float:
        self.calls.append((resident, missing))
        return self.ms + BASE


@pytest.fixture
def budget() -> Any:
    return SimpleNamespace(fastest=lambda once: once())


def slip(budget: Any, *probes: FakeProbe) -> float:
    numbered: Any = {p.tokens: p for p in probes}
    return probe._slip(numbered, BASE, Line(1, 1, 0.25), Line(2, 2, 0.5), budget)


def test_slip_is_the_mean_of_what_halves_on_both_sides_do_not_hide(budget: Any) -> None:
    one, four = FakeProbe(1, 8.25), FakeProbe(4, 16.25)
    # Of 1 token: 2 experts and 2 pairs a side, 3.5 ms and 7 ms: 1.25 ms of 3.5 are not hidden.
    assert slip(budget, one) == pytest.approx(1.25 / 3.5)
    assert one.calls == [(2, 2)]
    # Of 4 tokens: 8 pairs a side, 5 ms and 10 ms: nothing is hidden.
    assert slip(budget, four) == 1
    assert slip(budget, one, four) == pytest.approx((1 + 1.25 / 3.5) / 2)


def test_slip_needs_two_experts(budget: Any) -> None:
    assert slip(budget, FakeProbe(1, 9.0, top_k=1)) == 0
    few = FakeProbe(1, 9.0, top_k=8, experts=2)
    slip(budget, few)
    assert few.calls == [(1, 1)]


def test_a_budget_is_divided_and_what_is_left_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    times = iter(range(1000, 0, -1))
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: now))

    def once() -> float:
        nonlocal now
        now += 1
        return next(times)

    budget = probe.Budget(12, 3)
    assert budget.fastest(once) == 1000 - 3  # within 4 seconds, the first call is not counted
    assert now == 4
    now = 10.0  # the second kind has 1 second and is measured twice all the same
    assert budget.fastest(once) == 1000 - 6
    assert now == 13
    now = -100.0  # the last has all of the time, but needs no more than MOST
    assert budget.fastest(once) == 1000 - 7 - probe.MOST
    assert now == probe.MOST - 99


def test_the_last_kind_has_all_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: now))

    def once() -> float:
        nonlocal now
        now += 1
        return now

    budget, ended = probe.Budget(20, 3), []
    for _ in range(3):
        budget.fastest(once)
        ended.append(now)
    assert ended == [7, 14, 20]  # a call that has begun is finished


def test_costs_are_fitted_to_what_each_side_takes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one token, of the most that decode and of a prefill, with 1, 2, a token's and all their experts."""
    device, shadow = Line(0.5, 0.25, 0.0625), Line(1.0, 0.5, 0.125)
    calls: list[tuple[int, int, int]] = []
    budgets: list[tuple[float, int]] = []

    class Sides(FakeProbe):
        def __init__(self, pool: Any, blocks: Any, made: Any, shape: Shape, tokens: int):
            super().__init__(tokens, 0.0, shape.top_k, shape.experts)
            assert (pool, blocks.block_bytes, made) == ("pool", 77, "made")

        def __call__(self, resident: int, missing: int) -> float:
            calls.append((self.tokens, resident, missing))
            found = device.ms(resident, self.pairs(resident), float(resident > 0))
            return BASE + found + shadow.ms(missing, self.pairs(missing), float(missing > 0))

    def budget(seconds: float, kinds: int) -> Any:
        budgets.append((seconds, kinds))
        return SimpleNamespace(fastest=lambda once: once())

    monkeypatch.setattr(probe, "Probe", Sides)
    monkeypatch.setattr(probe, "Budget", budget)
    monkeypatch.setattr(probe, "_copy", lambda made, budget: 0.75)
    monkeypatch.setattr(probe, "_slip", lambda probes, base, *rest: sum(probes) + base)
    monkeypatch.setattr(probe, "native", SimpleNamespace(teams=lambda: [SimpleNamespace(threads=t) for t in (3, 2)]))
    times = iter([10.0, 12.5])
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    shape, blocks = Shape(layers=3, experts=32, top_k=4), SimpleNamespace(block_bytes=77)
    costs = probe.measure("pool", 6, blocks, "made", shape, 8, 1.5)  # type: ignore[arg-type]
    kinds = [(1, 1), (1, 2), (1, 4), (8, 1), (8, 2), (8, 4), (8, 21), (64, 4), (64, 32)]
    assert sorted(calls) == sorted(
        [(t, 0, 0) for t in (1, 8, 64)] + [c for t, n in kinds for c in ((t, n, 0), (t, 0, n))]
    )
    assert budgets == [(1.5, 2 * len(kinds) + 2 * 3 + 1)]
    assert (costs.base, costs.copy, costs.slip) == (BASE, 0.75, 73 + BASE)
    for found, wanted in ((costs.device, device), (costs.shadow, shadow)):
        assert (found.fixed, found.expert, found.pair) == pytest.approx((wanted.fixed, wanted.expert, wanted.pair))
    assert (costs.block_bytes, costs.threads, costs.seconds) == (77, (5, 6), 2.5)


def test_made_up_blocks_fill_some_memory_but_are_enough_for_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MADE_UP", 640)
    blocks: Any = SimpleNamespace(block_bytes=64)
    for experts, count in ((20, 10), (10, 10), (9, 9), (2, 2)):
        made = probe.made_up(blocks, experts)
        assert made.shape == (count, 64)
        assert (made == 0x3C).all()
    monkeypatch.setattr(probe, "MADE_UP", 64)
    assert len(probe.made_up(blocks, 20)) == probe.QUEUED == 8
    assert len(probe.made_up(blocks, 5)) == 5


def test_a_replay_takes_the_next_experts_and_blocks() -> None:
    """Two tokens with two of five experts, which share three blocks; all experts are alike, so the sums are known."""
    engine.start(1, "auto")
    blocks = shadow.ExpertBlocks(32, 32, FORMATS["float32"])
    made = probe.made_up(blocks, 3)
    assert len(made) == 3
    pool = shadow.ShadowPool([engine.native.Team(-1, 1, [])])
    one = probe.Probe(pool, blocks, made, Shape(layers=1, experts=5, top_k=2), 2)
    assert [one.pairs(experts) for experts in (0, 1, 2, 9)] == [0, 2, 4, 4]
    assert one.ids.tolist() == [[5, 5], [5, 5]]
    level = torch.tensor([0x3C3C3C3C], dtype=torch.int32).view(torch.float32).item()
    hidden = torch.nn.functional.silu(torch.tensor(0.32 * level)) * 0.32 * level
    whole = 32 * float(hidden) * level

    def replay(resident: int, missing: int) -> tuple[list[int], list[int], list[int]]:
        """(times that each expert was used, the blocks of the resident ones, the blocks of all)"""
        before = one.layer.counts.clone()
        assert one(resident, missing) > 0
        blocks_of = {0: -1} | {address: number for number, address in enumerate(one.addresses.tolist())}
        device, store = (
            [blocks_of[address] for address in table.tolist()] for table in (one.layer.device, one.layer.store)
        )
        return (one.layer.counts - before).tolist(), device, store

    assert replay(0, 0) == ([0] * 5, [-1] * 5, [-1] * 5)
    assert one.kept[3].tolist() == [[0.0] * 32] * 2
    assert replay(1, 2) == ([2, 1, 1, 0, 0], [0, -1, -1, -1, -1], [0, 1, 2, -1, -1])
    torch.testing.assert_close(one.kept[3], torch.full((2, 32), whole), rtol=1e-4, atol=0)
    assert replay(0, 1) == ([0, 0, 0, 2, 0], [-1] * 5, [0, 1, 2, 0, -1])
    torch.testing.assert_close(one.kept[3], torch.full((2, 32), whole / 2), rtol=1e-4, atol=0)  # one of two experts
    assert replay(3, 0) == ([1, 1, 0, 0, 2], [2, 0, -1, -1, 1], [2, 0, 2, 0, 1])
    torch.testing.assert_close(one.kept[3], torch.full((2, 32), whole), rtol=1e-4, atol=0)
    assert pool.step.item() == 4
    pool.stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at it takes half a second."""
    now = iter(0.5 * turn for turn in range(10, 100))
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: next(now)))


def test_copies_are_timed_while_several_are_queued(monkeypatch: pytest.MonkeyPatch, clock: None) -> None:
    done: list[Any] = []

    class Copier:
        def submit(self, to: torch.Tensor, source: torch.Tensor) -> int:
            done.append(("copy", slots.setdefault(to.data_ptr(), len(slots)), int(source[0])))
            return len(done)

        def wait(self, ticket: int) -> None:
            done.append(("wait", ticket))

    slots: dict[int, int] = {}
    made = torch.arange(12)[:, None].repeat(1, 5)
    monkeypatch.setattr(probe, "Copier", Copier)
    budget: Any = SimpleNamespace(fastest=lambda once: [once(), once()])
    found: Any = probe._copy(made, budget)
    assert found == [500 / 8] * 2
    assert done == [
        *(("copy", slot, slot) for slot in range(8)), *(("wait", ticket) for ticket in range(1, 9)),
        *(("copy", slot, (8 + slot) % 12) for slot in range(8)), *(("wait", ticket) for ticket in range(17, 25)),
    ]  # fmt: skip
    assert not slots.keys() & {row.data_ptr() for row in made}  # copies go to other memory


@pytest.mark.parametrize(("threads", "most"), [((3, 2), 5), ((31, 1), 32), ((30, 20), 32)])
def test_reading_is_measured_on_what_all_threads_read(
    monkeypatch: pytest.MonkeyPatch, clock: None, threads: tuple[int, int], most: int
) -> None:
    done: list[Any] = []

    class ReadProbe:
        def __init__(self, bytes: int):
            done.append(bytes)

        def run(self) -> None:
            done.append("read")

    def budget(*given: Any) -> Any:
        done.append(given)
        return SimpleNamespace(fastest=lambda once: once())

    teams = [SimpleNamespace(threads=count) for count in threads]
    monkeypatch.setattr(probe, "native", SimpleNamespace(teams=lambda: teams, ReadProbe=ReadProbe))
    monkeypatch.setattr(probe, "Budget", budget)
    assert probe.read_ms(7 * probe.READ, 1.5) == pytest.approx(500 * 7 / most)
    assert done == [most * probe.READ, (1.5, 1), "read"]

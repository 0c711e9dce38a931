"""The loop's guarantees to its drivers: submit, abort, step; with a real model where tokens matter."""

from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from errors import UserError
from executor.engine.batch_limits import Limits
from executor.engine.pages import PagePool
from executor.engine.request import Event, Request, SamplingParams
from executor.engine.scheduler import Scheduler, Step
from executor.engine.sequence import new_sequence
from executor.job.runner import ModelRunner
from ops.sampling import uniform
from tests.spy import spy_on
from tests.tiny import make_runner, save_tiny, tiny_case

PROMPTS = [[5, 17, 3], [7], list(range(30, 53)), [11, 12], [90, 3, 3, 8]]
STOP = 9


def limits_of(data: st.DataObject) -> Limits:
    groups = data.draw(st.sampled_from([1, 1, 2, 3]))
    sizes = st.one_of(st.none(), st.integers(1, 9))
    drafts = data.draw(st.sampled_from([0, 0, 1, 4]))
    return Limits(groups * data.draw(st.integers(1, 3)), 30, data.draw(st.integers(1, 5)), groups,
                  data.draw(sizes), data.draw(sizes), draft_tokens=drafts)  # fmt: skip


def state(scheduler: Scheduler) -> Any:
    return [
        [(s.id, s.group, s.cached, tuple(s.ids), s.finish_reason, len(s.blocks)) for s in sequences]
        for sequences in (scheduler.waiting, scheduler.running)
    ]


def shape(step: Step | None) -> Any:
    return step and [(s.id, s.group, s.new_tokens) for s in step.sequences]


@settings(deadline=None)
@given(st.data())
def test_copies_of_the_scheduler_stay_equal_and_lose_no_page(data: st.DataObject) -> None:
    """Random submissions, aborts and tokens on the schedulers of three ranks, each of which orders the pages of its own
    pool differently."""
    limits = limits_of(data)
    table = -(-limits.max_sequence_length // limits.page_size)
    most = data.draw(st.integers(table, 3 * table))
    ranks = []
    for rank in range(3):
        own = PagePool(most, limits.page_size)
        own.free = own.free[rank:] + own.free[:rank]
        ranks.append(Scheduler(limits, {STOP}, own, rank % limits.groups))
    given_out, ended = Counter[int](), set[int]()
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["submit", "submit", "step", "step", "step", "abort"]))
        events: list[list[Event]] = [[] for _ in ranks]
        if action == "submit":
            params = SamplingParams(max_tokens=data.draw(st.integers(1, 25)), stop_token_ids=(8,))
            prompt = tuple([1] * data.draw(st.integers(0, 28)))
            refused = []
            for scheduler in ranks:
                before = state(scheduler)
                try:
                    scheduler.add(new_sequence(number, Request(prompt, params)))
                    refused.append("")
                except UserError as error:
                    refused.append(str(error))
                    assert state(scheduler) == before  # other sequences are not affected
            assert len(set(refused)) == 1
            assert bool(refused[0]) == (not prompt or len(prompt) + params.max_tokens > limits.max_sequence_length)
        elif action == "abort":
            id = data.draw(st.integers(0, number))
            told = [scheduler.abort(id) for scheduler in ranks]
            assert told == [told[0]] * 3
            events = [[event] if event else [] for event in told]
        else:
            steps = [scheduler.schedule() for scheduler in ranks]
            assert [shape(step) for step in steps] == [shape(steps[0])] * 3
            if steps[0]:
                check_step(ranks[0], steps[0])
                rows = sum(1 + s.drafted for s in steps[0].finished_prompts)
                tokens = [data.draw(st.integers(1, 9)) for _ in range(rows)]
                for i, (scheduler, step) in enumerate(zip(ranks, steps, strict=True)):
                    assert step
                    scheduler.reserve(step.sequences)  # never runs out of pages
                    events[i] = scheduler.commit(step, tokens)
        assert [state(scheduler) for scheduler in ranks] == [state(ranks[0])] * 3
        assert events == [events[0]] * 3
        for event in events[0]:
            assert event.id not in ended
            given_out[event.id] += len(event.tokens)
            ended |= {event.id} if event.finish_reason else set()
        for scheduler in ranks:
            for group, pool in enumerate(scheduler.pools):
                assert isinstance(pool, PagePool)
                held = [b.page for s in scheduler.running if s.group == group for b in s.blocks]
                assert sorted(held + pool.free) == list(range(most))
                assert not any(s.blocks for s in scheduler.waiting)


def check_step(scheduler: Scheduler, step: Step) -> None:
    limits, decoding = scheduler.limits, [s for s in scheduler.running if s.decoding]
    assert all(s in step.sequences for s in decoding)  # no decoding sequence waits for a prompt
    limit = limits.mixed_tokens if decoding else limits.prefill_tokens
    for group in range(limits.groups):
        prompts = sum(s.new_tokens for s in step.sequences if s.group == group and not s.decoding)
        assert limit is None or prompts <= limit
    assert step.decode == (len(decoding) == len(step.sequences))
    assert all(s.new_tokens > 0 for s in step.sequences)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop") / "model"
    save_tiny(folder, eos_token_id=None)
    return folder


def runner_of(model: Path, **data: Any) -> ModelRunner:
    case = tiny_case(model.parent, model, exe_mode="graph", data_config={"batch_size": 3} | data)
    return make_runner(case, model.parent)


class Driver:
    """Steps a runner's loop and collects tokens and finish reason of each request, by its id."""

    def __init__(self, runner: ModelRunner):
        self.loop, self.found = runner.loop, dict[int, tuple[list[int], str]]()

    def step(self) -> None:
        for event in self.loop.step():
            tokens, reason = self.found.get(event.id, ([], ""))
            assert not reason  # nothing comes after the end
            self.found[event.id] = (tokens + list(event.tokens), event.finish_reason)

    def drain(self) -> dict[int, tuple[list[int], str]]:
        while not self.loop.idle:
            self.step()
        return self.found

    def alone(self, request: Request) -> tuple[list[int], str]:
        id = self.loop.submit(request).id
        return self.drain()[id]


def requests(**sampling: Any) -> list[Request]:
    return [Request(tuple(ids), SamplingParams(max_tokens=8, **sampling)) for ids in PROMPTS]


def test_a_seed_gives_the_same_tokens_whatever_runs_beside(model: Path) -> None:
    """The request runs alone, in any order, in chunks, beside prefills of other prompts, and after others were
    aborted."""
    seeded = requests(temperature=1.0, seed=5)
    alone = [Driver(runner_of(model)).alone(request) for request in seeded]
    assert len({tuple(tokens) for tokens, _ in alone}) == len(alone)
    settings: list[dict[str, Any]] = [{}, {"mixed_prefill_size": 1}, {"chunked_prefill_size": 3}, {"batch_size": 1}]
    for data in settings:
        driver = Driver(runner_of(model, **data))
        other = driver.loop.submit(Request((1, 2, 3), SamplingParams(max_tokens=30, temperature=2.0))).id
        driver.step()
        ids = [driver.loop.submit(request).id for request in reversed(seeded)]
        for _ in range(3):
            driver.step()
        driver.loop.abort(other)
        found = driver.drain()
        assert [found[id] for id in reversed(ids)] == alone, data


def test_other_seeds_and_positions_give_other_draws() -> None:
    draws = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(draws) == 2500
    assert all(0 <= draw < 1 for draw in draws)
    assert abs(sum(draws) / 2500 - 0.5) < 0.02
    assert uniform(1, 2) != uniform(2, 1)
    assert uniform(7, 3) == 0.9579187413704255  # on every machine, in every release


def test_requests_have_settings_of_their_own(model: Path) -> None:
    greedy, _ = Driver(runner_of(model)).alone(Request(tuple(PROMPTS[2]), SamplingParams(max_tokens=8)))
    mixed = [
        SamplingParams(max_tokens=8),
        SamplingParams(max_tokens=3),
        SamplingParams(max_tokens=8, stop_token_ids=(greedy[4],)),
        SamplingParams(max_tokens=8, temperature=5.0, seed=3),
        SamplingParams(max_tokens=8, temperature=5.0, top_k=1),
    ]
    driver = Driver(runner_of(model))
    ids = [driver.loop.submit(Request(tuple(PROMPTS[2]), params)).id for params in mixed]
    found = driver.drain()
    first = greedy.index(greedy[4]) + 1
    assert [found[id] for id in ids[:3]] == [(greedy, "length"), (greedy[:3], "length"), (greedy[:first], "stop")]
    assert found[ids[3]][0] != greedy
    assert found[ids[4]] == (greedy, "length")


@pytest.mark.parametrize(
    ("ids", "params", "complaint"),
    [
        ((), {}, r"prompt 2 has no tokens"),
        ((1, 96), {}, r"prompt 2: token 96 is outside the vocabulary of 96"),
        ((1,) * 50, {"max_tokens": 7}, r"prompt 2: 50 tokens and max_tokens 7 are more than the 56 that a sequence"),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_harms_no_other(
    model: Path, ids: tuple[int, ...], params: dict[str, Any], complaint: str
) -> None:
    expected = [Driver(runner_of(model)).alone(request) for request in requests()[:2]]
    driver = Driver(runner_of(model))
    running = [driver.loop.submit(request).id for request in requests()[:2]]
    driver.step()
    with pytest.raises(UserError, match=complaint) as raised:
        driver.loop.submit(Request(ids, SamplingParams(**params)))
    assert "\n" not in str(raised.value)
    found = driver.drain()
    assert [found[id] for id in running] == expected


def test_abort_ends_a_request_at_once_and_frees_its_pages(model: Path) -> None:
    runner = runner_of(model, batch_size=2)
    ids = [runner.loop.submit(request).id for request in requests()]
    runner.loop.step()
    runner.loop.abort(ids[0])  # it runs
    runner.loop.abort(ids[4])  # it waits
    runner.loop.abort(ids[4])
    runner.loop.abort(99)
    assert not runner.loop.idle
    events = runner.loop.step()
    assert [e for e in events if e.finish_reason == "abort"] == [Event(ids[0], (), "abort"), Event(ids[4], (), "abort")]
    found = Driver(runner).drain()
    assert {id for id, (_, reason) in found.items() if reason == "length"} == set(ids[1:4])
    runner.loop.abort(ids[1])  # it has ended
    assert runner.loop.idle
    assert runner.loop.step() == []
    assert all(len(pool.free) == runner.loop.scheduler.limits.pages for pool in runner.loop.scheduler.pools)  # type: ignore[attr-defined]


def test_a_long_prompt_does_not_stop_those_that_decode(model: Path) -> None:
    """While one sequence decodes, a prompt of 40 tokens comes in by five tokens a step; the graph is used again when
    it is cached."""
    runner = runner_of(model, mixed_prefill_size=5, batch_size=2)
    sizes: list[tuple[int, ...]] = []
    spy_on(runner, before_pack=lambda sequences: sizes.append(tuple(s.new_tokens for s in sequences)))
    first = runner.loop.submit(Request((5, 17, 3), SamplingParams(max_tokens=30))).id
    runner.loop.step()
    second = runner.loop.submit(Request(tuple(range(40)), SamplingParams(max_tokens=4))).id
    tokens = Counter[int]()
    while not runner.loop.idle:
        events = runner.loop.step()
        assert [e.id for e in events].count(first) == (tokens[first] < 29)
        tokens.update(e.id for e in events)
    assert sizes[1:9] == [(1, 5)] * 8
    assert sizes[9:12] == [(1, 1)] * 3
    assert set(sizes[12:]) == {(1,)}
    assert tokens == {first: 29, second: 4}
    assert runner.loop.timings.prefill_tokens == 43
    assert runner.loop.timings.decode_tokens == 29 + 3
    assert len(runner.loop.timings.per_token) - len(runner.loop.timings.pure_decode_steps) == 8

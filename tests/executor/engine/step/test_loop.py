"""The loop's guarantees to its drivers: submit, abort, step; with a real model where tokens matter."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.spy import spy_on
from tests.tiny import make_runner, save_tiny, tiny_case
from umbra.base.errors import UserError
from umbra.executor.engine.schedule.request import Event, Request, SamplingParams
from umbra.executor.model_runner import ModelRunner
from umbra.ops.sampling import uniform

PROMPTS = [[5, 17, 3], [7], list(range(30, 53)), [11, 12], [90, 3, 3, 8]]


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
        self.loop, self.outcomes = runner.loop, dict[int, tuple[list[int], str]]()

    def step(self) -> None:
        for event in self.loop.step():
            tokens, reason = self.outcomes.get(event.id, ([], ""))
            assert not reason  # nothing comes after the end
            self.outcomes[event.id] = (tokens + list(event.tokens), event.finish_reason)

    def drain(self) -> dict[int, tuple[list[int], str]]:
        while not self.loop.idle:
            self.step()
        return self.outcomes

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
    settings: list[dict[str, Any]] = [{"mixed_prefill_size": 1}, {"chunked_prefill_size": 3}]
    for data in settings:
        driver = Driver(runner_of(model, **data))
        other = driver.loop.submit(Request((1, 2, 3), SamplingParams(max_tokens=30, temperature=2.0))).id
        driver.step()
        ids = [driver.loop.submit(request).id for request in reversed(seeded)]
        for _ in range(3):
            driver.step()
        driver.loop.abort(other)
        outcomes = driver.drain()
        assert [outcomes[id] for id in reversed(ids)] == alone, data


def test_a_seed_and_a_position_give_the_same_draw_in_every_release() -> None:
    assert uniform(7, 3) == 0.9579187413704255


@pytest.mark.parametrize(
    ("ids", "params", "complaint"),
    [
        ((-1, 5), {}, r"prompt 2: token -1 is outside the vocabulary of 96"),
        ((5,), {"logit_bias": {95: 1.0, 96: 1.0}}, r"logit_bias: token 96 is outside the vocabulary of 96"),
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
    outcomes = driver.drain()
    assert [outcomes[id] for id in running] == expected


def test_abort_ends_a_request_at_once_and_frees_its_pages(model: Path) -> None:
    runner = runner_of(model, batch_size=2)
    ids = [runner.loop.submit(request).id for request in requests()]
    runner.loop.step()
    runner.loop.abort(ids[0])  # it runs
    runner.loop.abort(ids[4])  # it waits
    runner.loop.abort(ids[4])
    runner.loop.abort(99)
    assert runner.loop.idle is False
    events = runner.loop.step()
    assert [e for e in events if e.finish_reason == "abort"] == [Event(ids[0], (), "abort"), Event(ids[4], (), "abort")]
    outcomes = Driver(runner).drain()
    assert {id for id, (_, reason) in outcomes.items() if reason == "length"} == set(ids[1:4])
    runner.loop.abort(ids[1])  # it has ended
    assert runner.loop.step() == []
    assert not runner.loop.scheduler.caches[0].held


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
    assert runner.loop.timings.prompt_tokens == 43
    assert runner.loop.timings.decode_tokens == 29 + 3
    assert len(runner.loop.timings.per_token) - len(runner.loop.timings.pure_decode_steps) == 8

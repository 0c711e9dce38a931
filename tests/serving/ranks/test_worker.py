"""The loop of a server's rank: what gives way when memory ends, in which order, and what the front is told."""

import itertools
import random
import threading
from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.scripted import Server
from tests.tiny import make_runner, save_tiny, tiny_case
from umbra.executor.engine.schedule.request import Grammar, SamplingParams
from umbra.executor.model_runner import ModelRunner
from umbra.serving.ranks import matchers
from umbra.serving.ranks import worker as worker_module
from umbra.serving.ranks.messages import Ping, Pong, Refused, Residency, State, Submit, Watch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 experts of 6 KB; a page of 4 tokens has 8 KB."""
    folder = tmp_path_factory.mktemp("worker") / "model"
    save_tiny(folder, num_experts=64, num_hidden_layers=4, num_key_value_heads=8, max_position_embeddings=512)
    return folder


def runner_of(model: Path, offload: dict[str, Any] | None = None, **serve: Any) -> ModelRunner:
    data = {"input_max_len": 48, "max_new_tokens": 400, "batch_size": 4}
    sections: dict[str, Any] = {"data_config": data, "threads": 1, "serve_config": serve}
    if offload:
        sections["offload_config"] = {"max_swaps": 4, "shadow_threads": 1, "measure_s": 0.01} | offload
    return make_runner(tiny_case(model.parent, model, exe_mode="graph", **sections), model.parent)


def prompts(number: int, length: int, seed: int = 1) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(96) for _ in range(length)] for _ in range(number)]


ELASTIC = {"mode": "elastic", "arena_mb": 1}  # 128 pages, or about 160 experts
FLOOR = 8  # pages


def test_what_gives_way_when_memory_ends(model: Path) -> None:
    """Four requests grow: first prefixes go down to the floor, then all experts, then the other prefixes, and then the
    youngest request is preempted. Resumed, it goes on as if nothing had happened."""
    server = Server(runner_of(model, ELASTIC, reserve=0, prefix_floor=4 * FLOOR))
    worker, scheduler = server.worker, server.worker.loop.scheduler
    shadows, cache = worker.engine.shadows, worker.loop.scheduler.caches[0]
    assert shadows
    assert worker.memory_split
    worker.memory_split.decide = lambda prefill_s: None  # type: ignore[method-assign]
    worker.memory_split.expert_pages = 90
    for id, ids in enumerate(prompts(6, 40)):
        server.answer(id, ids, 4)
    assert FLOOR < len(cache.idle) <= scheduler.pools[0].pages - 90

    asked = {10 + i: ids[i:] for i, ids in enumerate(prompts(4, 12, seed=2))}  # no two need a page in the same step
    for id, ids in asked.items():
        server.submit(id, ids, 250)
    full = len(shadows.slots)
    assert full > 50
    seen = []  # after each step: kept pages, resident experts, preempted requests
    while not scheduler.preempted:
        worker.turn()
        seen.append((len(cache.idle), len(shadows.slots), [s.id for s in scheduler.preempted]))

    def first(reached: Any) -> int:
        return next(number for number, step in enumerate(seen) if reached(*step))

    floor = first(lambda kept, experts, preempted: kept <= FLOOR)
    fewer = first(lambda kept, experts, preempted: experts < full)
    none = first(lambda kept, experts, preempted: not experts)
    below = first(lambda kept, experts, preempted: kept < FLOOR)
    empty = first(lambda kept, experts, preempted: not kept)
    assert 0 < floor <= fewer < none <= below < empty < len(seen) - 1
    assert all(kept == FLOOR for kept, *_ in seen[floor:below])
    assert seen[-1][2] == [13]  # the youngest

    server.finish()
    assert worker.preemptions > 0
    assert cache.held == 0
    for id, ids in asked.items():
        assert server.script.tokens(id) == server.answer(100 + id, ids, 250)
        assert server.script.ended(id)


@pytest.mark.parametrize("mode", [None, "resident", "fixed", "elastic"])
def test_every_mode_serves_without_preemption(model: Path, mode: str | None) -> None:
    """With reserve -1 a request waits until its pages are sure. Without a moving arena, no share moves."""
    offload = {None: None, "fixed": {"mode": "fixed", "slots": 40}, "elastic": ELASTIC}.get(mode, {"mode": mode})
    server = Server(runner_of(model, offload, reserve=-1))
    assert (server.worker.memory_split is not None) == (mode == "elastic")
    asked = dict(enumerate(prompts(6, 30)))
    for id, ids in asked.items():
        server.submit(id, ids, 120)
    server.finish()
    assert server.worker.preemptions == 0
    assert all(server.script.tokens(id) == server.answer(50 + id, ids, 120) for id, ids in asked.items())


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front is told of every step."""
    monkeypatch.setattr(worker_module, "STATE_S", 0.0)
    monkeypatch.setattr(worker_module, "RESIDENCY_S", 0.0)


def test_what_the_front_is_told(model: Path, every_step: None) -> None:
    """The reports say where experts and memory are, how much they are used, and how long requests have waited."""
    server = Server(runner_of(model, ELASTIC))
    script, worker, shadows = server.script, server.worker, server.worker.engine.shadows
    ready = worker.ready()
    assert (ready.batch_size, ready.page_size, ready.vocabulary, ready.longest) == (4, 4, 96, 448)
    assert ready.prefill_rate > 0
    assert shadows
    script.messages = [Ping(7), Watch(True)]
    asked = dict(enumerate(ids * (2 + n % 4) for n, ids in enumerate(prompts(8, 4))))
    for id, ids in asked.items():
        server.submit(id, ids, 20)
    server.finish()
    worker.turn()
    assert script.of(Pong) == [Pong(7, 0)]
    states: list[State] = script.of(State)
    for state in states:
        kept = state.groups[0].held + state.groups[0].kept
        assert kept + state.expert_frames + state.free_frames == state.arena_frames - 1  # one page is padding
        assert 0 < state.experts_resident <= state.experts == 256
    assert max(state.waiting for state in states) == len(max((s.queue for s in states), key=len)) == 4
    # Steps that decode only: each of their tokens has three experts in each of four layers.
    decoded = sum(tokens for state in states for tokens in state.step_tokens if tokens <= 4)
    assert states[-1].expert_hits + states[-1].expert_misses == decoded * 3 * 4
    computed = sum(tokens for state in states for tokens in state.step_tokens)
    assert computed == sum(len(ids) + 19 for ids in asked.values())
    waited = [script.rows(id)[0].queued_s for id in asked]
    assert 0 < max(waited[:4]) < min(waited[4:])
    told = script.of(Residency)
    assert all(first != second for first, second in itertools.pairwise(told))
    bits = np.unpackbits(np.frombuffer(told[-1].resident, np.uint8), bitorder="little")
    assert (bits.reshape(4, 64) == shadows.published).all()
    assert {max(residency.heat) for residency in told[1:]} == {255}
    script.messages, before = [Watch(False)], len(told)
    server.answer(9, [1, 2], 9)
    assert len(script.of(Residency)) == before  # nobody watches


def test_requests_that_cannot_run_are_refused(model: Path) -> None:
    server = Server(runner_of(model))
    script = server.script
    bad: list[dict[str, Any]] = [{"logit_bias": {96: 1.0}}, {"grammar": Grammar("lark", "start: [")}]
    for id, fields in enumerate(bad, 1):
        script.messages.append(Submit(id, [1], SamplingParams(2, **fields)))
    script.messages += [Submit(8, [1] * 40, SamplingParams(9999)), Submit(9, [96], SamplingParams(1))]
    server.submit(10, [1, 2], 2)
    server.finish()
    assert sorted(refused.id for refused in script.of(Refused)) == [1, 2, 8, 9]
    assert len(script.tokens(10)) == 2


class AnyToken:
    """A matcher that allows all tokens."""

    def allowed_after(self, draft: ListOf[int]) -> list[bytes]:
        return [b"\xff" * 12] * (1 + len(draft))

    def followed(self, draft: ListOf[int]) -> int:
        return len(draft)

    def accept(self, token: int) -> bool:
        return True


class SlowGrammars:
    """Compiles any grammar once `compiled` is set."""

    def __init__(self) -> None:
        self.compiled = threading.Event()

    def matcher(self, grammar: Grammar) -> AnyToken:
        self.compiled.wait()
        return AnyToken()


def test_other_requests_go_on_while_a_grammar_is_compiled(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that come later; and one that its client gives up is forgotten."""
    grammars = SlowGrammars()
    monkeypatch.setattr(matchers, "read_grammars", lambda *given: grammars)
    server = Server(runner_of(model))
    for id in (1, 2):
        server.script.messages.append(Submit(id, [1, 2, 3], SamplingParams(8, grammar=Grammar("regex", "a{2}"))))
    server.submit(3, [4, 5, 6], 20)
    while not server.script.ended(3):
        server.worker.turn()
    assert not server.script.rows(1)
    assert not server.worker.idle
    server.abort(2)
    server.worker.turn()
    grammars.compiled.set()
    server.finish()
    assert server.script.ended(1)
    assert not server.script.rows(2)

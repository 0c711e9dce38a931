"""The loop of a server's rank: what gives way when memory ends, in which order, and what the front is told."""

import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from executor.engine import shares
from executor.engine.expert_totals import ExpertTotals
from executor.engine.shares import CLEARLY
from executor.model_runner import ModelRunner
from serving.ranks.messages import Grammar, Ping, Pong, Refused, Residency, Sampling, State, Submit, Watch
from tests.serving.ranks.scripted import Server
from tests.tiny import make_runner, save_tiny, tiny_case


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
    offload, cache = worker.engine.offload, worker.loop.scheduler.caches[0]
    assert offload
    assert worker.shares
    worker.shares.decide = lambda prefill_s: None  # type: ignore[method-assign]
    worker.shares.expert_pages = 90
    for id, ids in enumerate(prompts(6, 40)):
        server.answer(id, ids, 4)
    assert FLOOR < len(cache.idle) <= scheduler.pools[0].pages - 90

    asked = {10 + i: ids[i:] for i, ids in enumerate(prompts(4, 12, seed=2))}  # no two need a page in the same step
    for id, ids in asked.items():
        server.submit(id, ids, 250)
    full = len(offload.slots)
    assert full > 50
    seen = []  # after each step: kept pages, resident experts, preempted requests
    while not scheduler.preempted:
        worker.turn()
        seen.append((len(cache.idle), len(offload.slots), [s.id for s in scheduler.preempted]))

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
    assert (server.worker.shares is not None) == (mode == "elastic")
    asked = dict(enumerate(prompts(6, 30)))
    for id, ids in asked.items():
        server.submit(id, ids, 120)
    server.finish()
    assert server.worker.preemptions == 0
    assert all(server.script.tokens(id) == server.answer(50 + id, ids, 120) for id, ids in asked.items())


def test_the_share_moves_to_where_a_page_is_worth_more(model: Path) -> None:
    server = Server(runner_of(model, ELASTIC))
    share = server.worker.shares
    assert share
    middle = share.expert_pages
    assert middle == share.pages // 2
    worth = (1.0, 1.0, 1.0, 1.0)
    for _ in range(9):
        share.move(*worth)
        share.move(1.0, CLEARLY, CLEARLY, 1.0)
    assert share.expert_pages == middle  # as long as neither is worth clearly more
    share.move(1.0, 0.0, 1.6, 2.0)
    assert share.expert_pages == middle + share.margin
    for _ in range(99):
        share.move(0.0, 0.0, 1.0, 1.0)
    assert share.expert_pages == share.pages
    for _ in range(99):
        share.move(1.0, 1.0, 0.0, 0.0)
    assert share.expert_pages == 0


def test_steps_with_prompts_make_experts_worth_more(model: Path) -> None:
    """Such a step uses all experts: each that is missing makes it longer, by what the planner expects."""
    share = Server(runner_of(model, ELASTIC)).worker.shares
    assert share
    for tokens in (16.0, 48.0):
        assert share.prompt_step_s(tokens, 0.0) > 0
    share.prompt_step_s = lambda tokens, resident: tokens * (1 - resident)
    come, go = share.prompts_at_margin(10.0)
    assert come == pytest.approx(10.0 * share.margin_experts / 256)
    assert go == pytest.approx(come)
    share.prompt_step_s = lambda tokens, resident: tokens * resident  # a shadow pool that is quicker than the device
    assert share.prompts_at_margin(10.0) == (0.0, 0.0)


def test_prompts_that_come_again_win_pages(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine prompts of ten pages go round; half of the arena cannot keep them. Steps hardly wait for experts here, so
    the share falls until all prompts are found, and rises once they come no more and experts are worth a little."""
    monkeypatch.setattr(shares, "DECIDE_S", 0.0)
    server = Server(runner_of(model, ELASTIC, prefix_floor=0))
    share, ids = server.worker.shares, count()
    assert share
    monkeypatch.setattr(ExpertTotals, "miss_s", 1e-9)
    share.prompt_step_s = lambda tokens, resident: 0.0
    before = share.expert_pages
    around = prompts(9, 41)
    for _ in range(12):
        for prompt in around:
            server.answer(next(ids), prompt, 2)
    last = list(range(next(ids) - 9, next(ids) - 1))
    assert share.expert_pages < before
    assert sum(server.script.rows(id)[0].found == 40 for id in last) > 5
    monkeypatch.setattr(ExpertTotals, "miss_s", 1.0)
    low = share.expert_pages
    for prompt in prompts(40, 9, seed=5):
        server.answer(next(ids), prompt, 12)
    assert share.expert_pages > low


def test_what_the_front_is_told(model: Path) -> None:
    server = Server(runner_of(model, ELASTIC))
    script, worker = server.script, server.worker
    ready = worker.ready()
    assert (ready.batch_size, ready.page_size, ready.vocabulary, ready.longest) == (4, 4, 96, 448)
    assert ready.prefill_rate > 0
    worker._reported = 0.0
    script.messages = [Ping(7), Watch(True)]
    server.answer(0, [1, 2, 3], 3)
    assert script.of(Pong) == [Pong(7, 0)]
    (state, *_) = script.of(State)
    assert state.experts == 256
    assert 0 < state.experts_resident < 256
    assert state.expert_frames + state.free_frames < state.arena_frames
    residency = script.of(Residency)
    if residency:  # at most once a second
        assert len(residency[0].resident) == 32
        assert len(residency[0].heat) == 256
    bad = {"logit_bias": {96: 1.0}}, {"temperature": -1.0}, {"grammar": Grammar("lark", "start: [")}
    for id, fields in enumerate(bad, 1):
        script.messages.append(Submit(id, [1], Sampling(2, **fields)))
    script.messages += [Submit(8, [1] * 40, Sampling(9999)), Submit(9, [96], Sampling(1))]
    server.submit(10, [1, 2], 2)
    server.finish()
    assert sorted(refused.id for refused in script.of(Refused)) == [1, 2, 3, 8, 9]
    assert len(script.tokens(10)) == 2


def test_aborted_requests_get_no_more_rows_and_leave_nothing(model: Path) -> None:
    server = Server(runner_of(model))
    for id, ids in enumerate(prompts(6, 20)):  # two of them wait
        server.submit(id, ids, 200)
    for _ in range(5):
        server.worker.turn()
    before = [len(server.script.rows(id)) for id in range(6)]
    assert before == [5, 5, 5, 5, 0, 0]
    for id in range(6):
        server.abort(id)
    server.finish()
    assert [len(server.script.rows(id)) for id in range(6)] == before
    assert all(cache.held == 0 for cache in server.worker.loop.scheduler.caches)
    server.stop()
    server.worker.turn()
    assert server.worker.stopping


def test_a_server_collects_nothing_step_by_step(model: Path) -> None:
    server = Server(runner_of(model, ELASTIC))
    server.answer(0, [1, 2, 3], 300)
    totals = server.worker.experts
    assert totals
    assert len(totals.offload.history.steps) < 65
    assert len(server.worker.loop.timings.per_token) < 65
    totals.collect()
    assert totals.hits + totals.misses == 299 * 4 * 3

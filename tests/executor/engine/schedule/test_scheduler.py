"""The scheduler's rules one by one: who is admitted, what is promised, who gives way, and what a step leaves behind."""

from collections.abc import Sequence as ListOf
from typing import Any

import pytest

from tests.fakes.drafts import FreeDrafts
from umbra.base.errors import UserError
from umbra.executor.engine.memory.pages import PagePool
from umbra.executor.engine.schedule.request import Event, Request, SamplingParams, TokenLogprob
from umbra.executor.engine.schedule.scheduler import MOST_PREEMPTIONS, Scheduler
from umbra.executor.engine.schedule.sequence import FAILED, Sequence, new_sequence
from umbra.executor.plan.batch_limits import Limits

PAGE, STOP, OWN_STOP = 4, 9, 8


def sequence(id: int, ids: int | ListOf[int], most: int = 1, priority: int = 0, **sampling: Any) -> Sequence:
    """One with these tokens, or so many of them."""
    prompt = tuple(range(ids)) if isinstance(ids, int) else tuple(ids)
    return new_sequence(id, Request(prompt, SamplingParams(max_tokens=most, **sampling), priority))


def scheduler_of(pages: int = 10, batch: int = 3, groups: int = 1, **limits: Any) -> Scheduler:
    scheduler = Scheduler(Limits(batch, 40, PAGE, groups, **limits), {STOP}, PagePool(pages, PAGE), 0)
    if scheduler.drafts:
        scheduler.drafts = FreeDrafts(scheduler.drafts.most)
    return scheduler


def added(scheduler: Scheduler, *sequences: Sequence) -> Scheduler:
    for one in sequences:
        scheduler.add(one)
    return scheduler


def run(scheduler: Scheduler, token: int = 1) -> list[Event]:
    step = scheduler.schedule()
    assert step
    scheduler.reserve(step.sequences)
    return scheduler.commit(step, [token for s in step.finished_prompts for _ in range(1 + s.drafted)])


def test_a_sequence_that_can_never_run_is_refused() -> None:
    scheduler = added(scheduler_of(pages=3), sequence(0, 11, most=1))  # twelve tokens in three pages
    remedy = r"lower max_new_tokens or input_max_len, or raise offload_config\.arena_mb"
    for refused, error in (
        (sequence(1, 12), f"prompt 1 needs up to 4 KV pages of 4 tokens, the cache has 3: {remedy}"),
        (sequence(2, 30, most=11), r"prompt 2: 30 tokens and max_tokens 11 are more than the 40 that a sequence"),
        (sequence(3, 0), "prompt 3 has no tokens"),
    ):
        with pytest.raises(UserError, match=error):
            scheduler.add(refused)
    assert [s.id for s in scheduler.waiting] == [0]


def test_sequences_wait_by_priority_and_arrival() -> None:
    scheduler = added(scheduler_of(), *(sequence(id, 1, priority=p) for id, p in enumerate((1, 0, 1, -1, 0))))
    assert [s.id for s in scheduler.waiting] == [3, 1, 4, 0, 2]


@pytest.mark.parametrize(
    ("reserve", "most", "preemptions", "pages"),
    [
        (None, 20, 0, 7),  # all that it can ever have: 5 + 20 tokens
        (4, 20, 0, 3),
        (4, 3, 0, 2),  # it never has more than 8
        (3, 20, MOST_PREEMPTIONS, 7),
    ],
)
def test_pages_are_promised_for_what_is_reserved(reserve: int | None, most: int, preemptions: int, pages: int) -> None:
    one = sequence(0, 5, most)
    one.preemptions = preemptions
    scheduler = added(scheduler_of(reserve=reserve), one)
    assert scheduler.admit() == [one]
    assert one.promised == scheduler.committed(0) == pages


def grown(*sequences: Sequence) -> Scheduler:
    """Returns a scheduler of four pages, of which each sequence holds two and needs another in the next step."""
    scheduler = added(scheduler_of(pages=4, reserve=0), *sequences)
    for _ in range(2):
        run(scheduler)
    assert [(len(s.ids), len(s.blocks)) for s in sequences] == [(9, 2)] * len(sequences)
    return scheduler


def test_the_youngest_gives_back_its_pages_and_waits() -> None:
    old, young = sequence(0, 7, most=5), sequence(1, 7, most=5)
    scheduler = grown(old, young)
    young.prompt_logprobs = scores = [TokenLogprob(-1.0, ())]
    step = scheduler.schedule()
    assert step
    assert [s.id for s in step.sequences] == [0]
    assert (scheduler.running, scheduler.waiting, scheduler.preempted) == ([old], [young], [young])
    assert (young.blocks, young.promised, young.num_computed, young.preemptions) == ([], 0, 0, 1)
    assert young.prompt_logprobs is scores  # its answer has begun: they are not computed again
    assert scheduler.committed(0) == old.promised == 3
    scheduler.reserve(step.sequences)
    scheduler.commit(step, [1])
    scheduler.schedule()
    assert scheduler.preempted == []


@pytest.mark.parametrize(("priorities", "preempted", "gone"), [((1, 0), (0, 0), 0), ((0, 0), (0, MOST_PREEMPTIONS), 0)])
def test_who_is_preempted(priorities: tuple[int, int], preempted: tuple[int, int], gone: int) -> None:
    """Whoever is of less priority, or came later, unless it was preempted often already."""
    pair = [sequence(id, 7, most=5, priority=priority) for id, priority in enumerate(priorities)]
    scheduler = grown(*pair)
    for one, times in zip(pair, preempted, strict=True):
        one.preemptions = times
    scheduler.schedule()
    assert [s.id for s in scheduler.preempted] == [gone]


ENDS: list[tuple[dict[str, Any], int, list[int], list[int], str]] = [
    ({}, 3, [1, 2, 3], [1, 2, 3], "length"),
    ({}, 9, [1, STOP, 3], [1, STOP], "stop"),
    ({"stop_token_ids": (OWN_STOP,)}, 9, [1, OWN_STOP, 3], [1, OWN_STOP], "stop"),
    ({"stop_token_ids": (OWN_STOP,), "ignore_eos": True}, 9, [STOP, OWN_STOP, 3], [STOP, OWN_STOP], "stop"),
    ({}, 9, [1, FAILED, 3], [1], "error"),
]


@pytest.mark.parametrize(("sampling", "room", "tokens", "taken", "reason"), ENDS)
def test_tokens_count_up_to_the_end(
    sampling: dict[str, Any], room: int, tokens: list[int], taken: list[int], reason: str
) -> None:
    one = sequence(0, 5, most=room, **sampling)
    scheduler = added(scheduler_of(), one)
    for token in tokens:
        if not scheduler.idle:
            run(scheduler, token)
    assert (one.generated, one.finish_reason, scheduler.idle) == (taken, reason, bool(reason))


def test_tokens_must_be_integers() -> None:
    for ids in (("a",), (1 << 63,)):
        with pytest.raises(UserError, match=r"^prompt 6: its tokens must be integers: "):
            new_sequence(6, Request(ids))  # type: ignore[arg-type]

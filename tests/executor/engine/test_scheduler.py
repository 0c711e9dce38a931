"""The scheduler's rules one by one: who is admitted, what is promised, who gives way, and what a step leaves behind."""

from collections.abc import Sequence as ListOf
from typing import Any

import pytest

from executor.engine.batch_limits import Limits
from executor.engine.pages import PagePool
from executor.engine.request import Event, Request, SamplingParams, TokenLogprob
from executor.engine.scheduler import MOST_PREEMPTIONS, Scheduler
from executor.engine.sequence import FAILED, Sequence, new_sequence
from tests.fakes.drafts import FreeDrafts
from umbra.errors import UserError

PAGE, STOP, OWN_STOP = 4, 9, 8


def sequence(id: int, ids: int | ListOf[int], most: int = 1, priority: int = 0, **sampling: Any) -> Sequence:
    """One with these tokens, or so many of them."""
    prompt = tuple(range(ids)) if isinstance(ids, int) else tuple(ids)
    return new_sequence(id, Request(prompt, SamplingParams(max_tokens=most, **sampling), priority))


def scheduler_of(pages: int = 10, batch: int = 3, groups: int = 1, **limits: Any) -> Scheduler:
    made = Scheduler(Limits(batch, 40, PAGE, groups, **limits), {STOP}, PagePool(pages, PAGE), 0)
    if made.drafts:
        made.drafts = FreeDrafts(made.drafts.most)
    return made


def added(scheduler: Scheduler, *sequences: Sequence) -> Scheduler:
    for one in sequences:
        scheduler.add(one)
    return scheduler


def run(scheduler: Scheduler, token: int = 1) -> list[Event]:
    step = scheduler.schedule()
    assert step
    scheduler.reserve(step.sequences)
    return scheduler.commit(step, [token for s in step.finished_prompts for _ in range(1 + s.drafted)])


def with_kept_pages(pages: int = 10, **limits: Any) -> Scheduler:
    """Four pages of a prompt of the tokens 0 to 15 are kept."""
    scheduler = added(scheduler_of(pages, prefixes=True, **limits), sequence(0, 16))
    while not scheduler.idle:
        run(scheduler)
    assert len(scheduler.caches[0].idle) == 4
    return scheduler


def test_each_group_has_pages_for_its_longest_sequences() -> None:
    limits = Limits(6, 17, PAGE, groups=2)
    assert (limits.per_group, limits.table_width, limits.pages) == (3, 5, 15)
    assert [pool.pages for pool in Scheduler(limits).pools] == [15, 15]
    own = PagePool(9, PAGE)
    smaller = Scheduler(limits, (), own, 1)
    assert smaller.pools[1] is own
    assert smaller.pools[0].pages == 9


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
        (3, 20, 0, 2),
        (4, 20, 0, 3),
        (4, 3, 0, 2),  # it never has more than 8
        (3, 20, MOST_PREEMPTIONS - 1, 2),
        (3, 20, MOST_PREEMPTIONS, 7),
    ],
)
def test_pages_are_promised_for_what_is_reserved(reserve: int | None, most: int, preemptions: int, pages: int) -> None:
    one = sequence(0, 5, most)
    one.preemptions = preemptions
    scheduler = added(scheduler_of(reserve=reserve), one)
    assert scheduler.admit() == [one]
    assert one.promised == scheduler.committed(0) == pages


@pytest.mark.parametrize(("pages", "admitted"), [(10, [1, 2]), (9, [1])])
def test_pages_that_others_hold_count_once_and_nobody_overtakes(pages: int, admitted: list[int]) -> None:
    """The second sequence that holds the kept pages needs only its own part of nine."""
    scheduler = added(with_kept_pages(pages), sequence(1, 17, most=3), sequence(2, 17, most=19), sequence(3, [7]))
    found = scheduler.admit()
    assert [s.id for s in found] == admitted
    assert [s.id for s in scheduler.waiting] == [2, 3][len(admitted) - 1 :]
    assert {(s.num_computed, s.published, s.cached_tokens, len(s.blocks)) for s in found} == {(16, 4, 16, 4)}
    assert [block.holders for block in found[0].blocks] == [len(admitted)] * 4
    assert scheduler.committed(0) == (10 if len(admitted) == 2 else 5)


def test_prompts_that_are_scored_are_computed_again() -> None:
    scored = sequence(1, 17, prompt_logprobs=0)
    added(with_kept_pages(), scored).admit()
    assert (scored.num_computed, scored.cached_tokens, scored.blocks) == (0, 0, [])


def test_the_emptiest_group_gets_the_next_sequence() -> None:
    scheduler = added(scheduler_of(batch=4, groups=2), *(sequence(id, 1) for id in range(6)))
    assert [(s.id, s.group) for s in scheduler.admit()] == [(0, 0), (2, 0), (1, 1), (3, 1)]
    assert [[s.id for s in of] for of in scheduler.by_group(scheduler.running)] == [[0, 2], [1, 3]]
    scheduler.abort(1)
    assert [(s.id, s.group) for s in scheduler.admit()] == [(4, 1)]


def test_a_request_can_be_ended_wherever_it_is() -> None:
    scheduler = added(scheduler_of(batch=1), sequence(5, 6, most=3), sequence(6, 6, most=3))
    run(scheduler)
    assert scheduler.abort(7) is None
    assert scheduler.abort(6) == Event(6, (), "abort")
    assert scheduler.abort(6) is None
    assert scheduler.abort(5) == Event(5, (), "abort")
    assert (scheduler.idle, scheduler.caches[0].held, scheduler.schedule()) == (True, 0, None)


@pytest.mark.parametrize(
    ("experts", "floor", "kept"),
    [(6, 0, 4), (7, 0, 3), (8, 0, 2), (8, 3, 3), (8, 9, 4), (99, 0, 0)],
)
def test_kept_prefixes_leave_pages_to_experts(experts: int, floor: int, kept: int) -> None:
    """A step drops those that leave too few of ten pages, down to the floor."""
    scheduler = with_kept_pages(prefix_floor=floor)
    scheduler.expert_pages = experts
    assert scheduler.schedule() is None
    assert len(scheduler.caches[0].idle) == kept


def test_steps_take_as_many_prompt_tokens_as_they_may() -> None:
    scheduler = scheduler_of(pages=30, prefill_tokens=6, mixed_tokens=3)
    added(scheduler, sequence(0, 5, most=3), sequence(1, 9, most=3))
    taken = []
    for _ in range(4):
        step = scheduler.schedule()
        assert step
        taken.append(([(s.id, s.new_tokens) for s in step.sequences], [s.id for s in step.finished_prompts]))
        scheduler.reserve(step.sequences)
        scheduler.commit(step, [1] * len(step.finished_prompts))
    assert taken == [
        ([(0, 5), (1, 1)], [0]),
        ([(0, 1), (1, 3)], [0]),
        ([(0, 1), (1, 3)], [0]),  # the first one has all its tokens now
        ([(1, 2)], [1]),
    ]


@pytest.mark.parametrize(
    ("drafts", "most", "experts", "kept", "drafted", "promised"),
    [  # behind 6 tokens, with two pages promised, in ten pages
        (2, 31, 0, False, 2, 2),  # as many as drafts may have
        (3, 31, 7, False, 3, 3),
        (3, 31, 8, False, 2, 2),  # an expert would have to go
        (3, 31, 3, True, 3, 3),
        (3, 31, 4, True, 2, 2),  # or a kept page
        (8, 4, 0, False, 2, 2),  # as many as it can have
        (8, 5, 0, False, 3, 3),
        (8, 2, 0, False, 0, 2),
    ],
)
def test_drafts_take_a_page_only_if_nobody_has_to_give_it(
    drafts: int, most: int, experts: int, kept: bool, drafted: int, promised: int
) -> None:
    limits = {"draft_tokens": drafts, "reserve": 0}
    scheduler, one = with_kept_pages(**limits) if kept else scheduler_of(**limits), sequence(1, [1, 2, 3, 1, 2], most)
    run(added(scheduler, one), token=3)
    scheduler.expert_pages = experts
    assert scheduler.schedule()
    assert (one.drafted, one.promised) == (drafted, promised)


def grown(*sequences: Sequence) -> Scheduler:
    """Of four pages each sequence holds two, and is to grow beyond them in the next step."""
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


@pytest.mark.parametrize(
    ("priorities", "preempted", "gone"),
    [((0, 0), (0, 0), 1), ((1, 0), (0, 0), 0), ((0, 0), (0, MOST_PREEMPTIONS), 0), ((0, 0), (3, 0), 1),
     ((1, 0), (MOST_PREEMPTIONS, 0), 1), ((0, 0), (MOST_PREEMPTIONS, MOST_PREEMPTIONS), 1)],
)  # fmt: skip
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
    ({}, 2, [1, STOP, 3], [1, STOP], "stop"),
    ({}, 9, [1, OWN_STOP, 3], [1, OWN_STOP, 3], ""),
    ({"stop_token_ids": (OWN_STOP,)}, 9, [1, OWN_STOP, 3], [1, OWN_STOP], "stop"),
    ({"stop_token_ids": (OWN_STOP,)}, 9, [1, STOP, 3], [1, STOP], "stop"),
    ({"stop_token_ids": (OWN_STOP,), "ignore_eos": True}, 9, [STOP, OWN_STOP, 3], [STOP, OWN_STOP], "stop"),
    ({"ignore_eos": True}, 9, [1, STOP, 3], [1, STOP, 3], ""),
    ({"ignore_eos": True}, 2, [1, STOP, 3], [1, STOP], "length"),
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


def test_a_step_publishes_full_pages_and_tells_what_was_found() -> None:
    scheduler = scheduler_of(pages=30, prefixes=True, prefill_tokens=13)
    whole, part = sequence(0, 7, most=5), sequence(1, range(20, 31), most=5)
    added(scheduler, whole, part)
    assert run(scheduler) == [Event(0, (1,), "", 0)]
    assert [(s.num_computed, s.limit, s.published) for s in (whole, part)] == [(7, None, 1), (6, None, 1)]
    assert run(scheduler) == [Event(0, (1,), "", 0), Event(1, (1,), "", 0)]
    assert [block.key for block in part.blocks] == [*part.keys, b""]
    again = added(scheduler, sequence(2, range(20, 31), most=1))
    assert [event for event in run(again) if event.id == 2] == [Event(2, (1,), "length", 8)]


@pytest.mark.parametrize("ids", [("a",), (1.5,), (1 << 63,)])
def test_tokens_must_be_integers(ids: tuple[Any, ...]) -> None:
    with pytest.raises(UserError, match=r"^prompt 6: its tokens must be integers: "):
        new_sequence(6, Request(ids))

"""The scheduler's rules one by one: who is admitted, what is promised, who gives way, and what a step leaves behind."""

from array import array
from collections.abc import Sequence as ListOf
from typing import Any

import pytest

from errors import UserError
from executor.engine import scheduler as module
from executor.engine.batch_limits import Limits
from executor.engine.pages import Block, PagePool
from executor.engine.request import Event, Request, SamplingParams, TokenLogprob
from executor.engine.scheduler import MOST_PREEMPTIONS, MOST_SCORED, Scheduler, Step, _seniority
from executor.engine.sequence import FAILED, Sequence, new_sequence

PAGE, STOP, OWN_STOP = 4, 9, 8


def sequence(id: int, ids: int | ListOf[int], most: int = 1, priority: int = 0, **sampling: Any) -> Sequence:
    """One with these tokens, or so many of them."""
    prompt = tuple(range(ids)) if isinstance(ids, int) else tuple(ids)
    return new_sequence(id, Request(prompt, SamplingParams(max_tokens=most, **sampling), priority))


def scheduler_of(pages: int = 10, batch: int = 3, groups: int = 1, **limits: Any) -> Scheduler:
    made = Limits(batch, 40, PAGE, groups, **limits)
    return Scheduler(made, {STOP}, PagePool(pages, PAGE), 0)


def run(scheduler: Scheduler, token: int = 1) -> list[Event]:
    step = scheduler.schedule()
    assert step
    scheduler.reserve(step.sequences)
    return scheduler.commit(step, [token for s in step.finished_prompts for _ in range(1 + s.drafted)])


def finish(scheduler: Scheduler, *sequences: Sequence) -> None:
    for one in sequences:
        scheduler.add(one)
    while not scheduler.idle:
        run(scheduler)


def test_a_scheduler_has_pages_for_the_longest_of_all_sequences() -> None:
    made = Scheduler(Limits(6, 17, PAGE, 2))
    assert (made.limits.per_group, made.limits.table_width, made.limits.pages) == (3, 5, 15)
    assert [pool.pages for pool in made.pools] == [15, 15]
    assert (made.mixed_tokens, made.drafts, made.idle, made.preempted) == (None, None, True, [])
    assert Scheduler(Limits(6, 16, PAGE, mixed_tokens=7)).limits.table_width == 4
    assert Scheduler(Limits(6, 16, PAGE, mixed_tokens=7)).mixed_tokens == 7
    drafting = Scheduler(Limits(6, 16, PAGE, draft_tokens=3))
    assert drafting.drafts
    assert drafting.drafts.most == 3
    own = PagePool(9, PAGE)
    second = Scheduler(Limits(6, 17, PAGE, 2), (), own, 1)
    assert second.pools[1] is own
    assert second.caches[1].pool is own
    assert second.pools[0].pages == 9


def test_a_sequence_that_can_never_run_is_refused() -> None:
    scheduler = scheduler_of(pages=3)
    scheduler.add(sequence(0, 11, most=1))  # twelve tokens in three pages
    with pytest.raises(UserError, match="prompt 1 needs up to 4 KV pages of 4 tokens, the cache has 3"):
        scheduler.add(sequence(1, 12, most=1))
    with pytest.raises(UserError, match=r"prompt 2: 30 tokens and max_tokens 11 are more than the 40 that a sequence"):
        scheduler.add(sequence(2, 30, most=11))
    with pytest.raises(UserError, match="prompt 3 has no tokens"):
        scheduler.add(sequence(3, 0))
    scheduler.add(sequence(4, 1))
    assert [(s.id, s.arrival) for s in scheduler.waiting] == [(0, 0), (4, 1)]


def test_sequences_wait_by_priority_and_arrival() -> None:
    scheduler = scheduler_of()
    for id, priority in enumerate((1, 0, 1, -1, 0)):
        scheduler.add(sequence(id, 1, priority=priority))
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
    scheduler, one = scheduler_of(reserve=reserve), sequence(0, 5, most)
    one.preemptions = preemptions
    scheduler.add(one)
    assert scheduler.admit() == [one]
    assert one.promised == pages
    assert scheduler.committed(0) == pages


def test_pages_that_others_hold_count_once() -> None:
    """Four pages of the prompt are kept. The second sequence that holds them needs only its own part of nine."""
    for pages, admitted in ((10, [1, 2]), (9, [1])):
        scheduler = scheduler_of(pages, prefixes=True)
        finish(scheduler, sequence(0, 16))
        one, two = sequence(1, 17, most=3), sequence(2, 17, most=19)
        small = sequence(3, [7])
        for each in (one, two, small):
            scheduler.add(each)
        found = scheduler.admit()
        assert [s.id for s in found] == [s.id for s in scheduler.running] == admitted
        assert [s.id for s in scheduler.waiting] == [2, 3][len(admitted) - 1 :]  # nobody overtakes
        for each in found:
            assert (each.cached, each.published, each.found, len(each.blocks)) == (16, 4, 16, 4)
            assert each.promised == (5 if each is one else 9)
        assert [block.holders for block in one.blocks] == [len(admitted)] * 4
        assert scheduler.committed(0) == (10 if len(admitted) == 2 else 5)


def test_kept_pages_that_nobody_holds_count_as_well() -> None:
    """Of ten pages the first sequence is promised five or six; the second needs five, of which four are kept."""
    for first, admitted in ((17, [1, 2]), (21, [1])):
        scheduler = scheduler_of(prefixes=True)
        finish(scheduler, sequence(0, 16))
        scheduler.add(sequence(1, [7] * first, most=3))
        scheduler.add(sequence(2, 17, most=3))
        assert [s.id for s in scheduler.admit()] == admitted


def test_prompts_that_are_scored_are_computed_anew() -> None:
    scheduler = scheduler_of(prefixes=True)
    finish(scheduler, sequence(0, 16))
    scored = sequence(1, 17, prompt_logprobs=0)
    scheduler.add(scored)
    scheduler.admit()
    assert (scored.cached, scored.found, scored.blocks, len(scored.keys)) == (0, 0, [], 4)


def test_looks_for_pages_that_were_dropped_are_counted() -> None:
    scheduler = scheduler_of(prefixes=True)
    finish(scheduler, sequence(0, 16))
    scheduler.caches[0].trim(2)
    again = sequence(1, 17)
    scheduler.add(again)
    scheduler.admit()
    assert (again.found, scheduler.caches[0].missed_hits) == (8, 2)


def test_the_emptiest_group_gets_the_next_sequence() -> None:
    scheduler = scheduler_of(batch=4, groups=2)
    for id in range(6):
        scheduler.add(sequence(id, 1))
    assert [(s.id, s.group) for s in scheduler.admit()] == [(0, 0), (2, 0), (1, 1), (3, 1)]
    assert [(s.id, s.group) for s in scheduler.running] == [(0, 0), (2, 0), (1, 1), (3, 1)]
    assert [s.id for s in scheduler.waiting] == [4, 5]
    assert [[s.id for s in of] for of in scheduler.by_group(scheduler.running)] == [[0, 2], [1, 3]]
    scheduler.abort(1)
    assert [(s.id, s.group) for s in scheduler.admit()] == [(4, 1)]
    one = scheduler_of()
    assert one.by_group(one.running) == [[]]


def test_a_request_can_be_ended_wherever_it_is() -> None:
    scheduler = scheduler_of(batch=1)
    runs, waits = sequence(5, 6, most=3), sequence(6, 6, most=3)
    scheduler.add(runs)
    scheduler.add(waits)
    run(scheduler)
    assert scheduler.abort(7) is None
    assert scheduler.abort(6) == Event(6, (), "abort")
    assert (scheduler.waiting, waits.finish_reason, runs.finish_reason) == ([], "abort", "")
    assert scheduler.abort(6) is None
    assert scheduler.abort(5) == Event(5, (), "abort")
    assert (scheduler.running, runs.blocks, scheduler.caches[0].held) == ([], [], 0)
    assert scheduler.idle
    assert scheduler.schedule() is None


@pytest.mark.parametrize(
    ("experts", "floor", "kept"),
    [(0, 0, 4), (6, 0, 4), (7, 0, 3), (8, 0, 2), (8, 3, 3), (8, 9, 4), (10, 0, 0), (99, 0, 0)],
)
def test_kept_prefixes_leave_pages_to_experts(experts: int, floor: int, kept: int) -> None:
    """Four of ten pages are kept; a step drops those that leave too few, down to the floor."""
    scheduler = scheduler_of(prefixes=True, prefix_floor=floor)
    finish(scheduler, sequence(0, 16))
    cache = scheduler.caches[0]
    assert len(cache.idle) == 4
    scheduler.expert_pages = experts
    assert scheduler.schedule() is None
    assert len(cache.idle) == kept


def test_kept_prefixes_give_way_to_sequences() -> None:
    """Of ten pages, four are kept, and a sequence is promised seven."""
    scheduler = scheduler_of(prefixes=True, prefix_floor=9)
    finish(scheduler, sequence(0, 16))
    scheduler.add(sequence(1, [7] * 20, most=8))
    scheduler.admit()
    assert len(scheduler.caches[0].idle) == 3


def test_steps_take_as_many_prompt_tokens_as_they_may() -> None:
    scheduler = scheduler_of(pages=30, prefill_tokens=6, mixed_tokens=3)
    first, second = sequence(0, 5, most=3), sequence(1, 9, most=3)
    scheduler.add(first)
    scheduler.add(second)
    taken = []
    for _ in range(4):
        step = scheduler.schedule()
        assert step
        taken.append(
            ([(s.id, s.new_tokens) for s in step.sequences], step.decode, [s.id for s in step.finished_prompts])
        )
        scheduler.reserve(step.sequences)
        scheduler.commit(step, [1] * len(step.finished_prompts))
    assert taken == [
        ([(0, 5), (1, 1)], False, [0]),
        ([(0, 1), (1, 3)], False, [0]),
        ([(0, 1), (1, 3)], False, [0]),  # the first one has all its tokens now
        ([(1, 2)], False, [1]),
    ]


def test_prompts_may_have_to_wait_for_those_that_decode() -> None:
    scheduler = scheduler_of(mixed_tokens=0)
    scheduler.add(sequence(0, 5, most=3))
    run(scheduler)
    scheduler.add(sequence(1, 5, most=3))
    step = scheduler.schedule()
    assert step
    assert [s.id for s in step.sequences] == [0]
    assert step.decode
    assert step.finished_prompts is step.sequences


def test_chunks_share_the_limit_of_their_group() -> None:
    scheduler = scheduler_of(groups=2, batch=6)

    def chunks(limit: int | None, *prompts: Sequence) -> list[tuple[int, int]]:
        for one in prompts:
            one.limit = None
        return [(s.id, s.new_tokens) for s in scheduler.chunk(prompts, limit)]

    a, b, c = (sequence(id, 5) for id in range(3))
    c.group = 1
    assert chunks(None, a, b, c) == [(0, 5), (1, 5), (2, 5)]
    assert chunks(7, a, b, c) == [(0, 5), (1, 2), (2, 5)]
    assert chunks(5, a, b, c) == [(0, 5), (2, 5)]
    assert chunks(0, a, b, c) == []
    scored, after = sequence(3, MOST_SCORED + 44, prompt_logprobs=1), sequence(4, 200)
    assert chunks(None, scored, after) == [(3, MOST_SCORED), (4, 200)]
    assert chunks(MOST_SCORED + 50, scored, after) == [(3, MOST_SCORED), (4, 50)]
    assert chunks(100, scored, after) == [(3, 100)]
    assert chunks(100, a) == [(0, 5)]
    assert (scored.limit, a.limit) == (100, 100)


@pytest.mark.parametrize(
    ("drafts", "most", "experts", "room", "promised"),
    [  # beyond 6 tokens, with two pages promised, in ten pages
        (2, 30, 0, 2, 2),  # as many as drafts may have
        (3, 30, 0, 6, 3),
        (3, 30, 7, 6, 3),
        (3, 30, 8, 2, 2),  # an expert would have to go
        (8, 3, 0, 2, 2),  # as many as it can have
        (8, 4, 0, 3, 3),
        (8, 2, 0, 1, 2),
        (8, 1, 0, 0, 2),
    ],
)
def test_drafts_take_a_page_only_if_nobody_has_to_give_it(
    drafts: int, most: int, experts: int, room: int, promised: int
) -> None:
    scheduler, one = scheduler_of(draft_tokens=drafts), sequence(0, 6, most)
    scheduler.running, one.promised, scheduler.expert_pages = [one], 2, experts
    assert scheduler._room(one) == room
    assert one.promised == promised


def test_drafts_take_no_page_that_is_kept_or_promised() -> None:
    for kept, others, room in ((0, 7, 6), (1, 7, 2), (0, 8, 2)):
        scheduler, one, other = scheduler_of(draft_tokens=3), sequence(0, 6, 30), sequence(1, 6, 30)
        scheduler.running, one.promised, other.promised = [one, other], 2, others
        scheduler.caches[0].idle = {bytes([number]): Block(number) for number in range(kept)}
        assert scheduler._room(one) == room


def test_drafts_are_for_small_groups_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_DRAFTING", 1)
    for count, proposed in ((2, [[4, 4]]), (3, [])):
        scheduler, asked = scheduler_of(pages=30, batch=4, groups=2, draft_tokens=4), list[Any]()
        for id in range(count):
            scheduler.add(sequence(id, 3, most=30))
        run(scheduler)  # the prompts
        assert scheduler.drafts
        monkeypatch.setattr(scheduler.drafts, "propose", lambda sequences, room, asked=asked: asked.append(room))
        run(scheduler)
        assert [[min(most, 4) for most in room] for room in asked] == proposed


def grown(*sequences: Sequence) -> Scheduler:
    """Of four pages each sequence holds two, and is to grow beyond them in the next step."""
    scheduler = scheduler_of(pages=4, reserve=0)
    for one in sequences:
        scheduler.add(one)
    run(scheduler)
    for one in sequences:
        one.ids.extend([1] * (8 - len(one.ids)))
        one.cached = 8
        one.ids.append(1)
    return scheduler


def test_the_youngest_gives_back_its_pages_and_waits() -> None:
    old, young = sequence(0, 7, most=5), sequence(1, 7, most=5)
    scheduler = grown(old, young)
    young.table.extend([1, 2])
    young.limit = 3
    step = scheduler.schedule()
    assert step
    assert [s.id for s in step.sequences] == [0]
    assert scheduler.preempted == [young]
    assert (scheduler.running, scheduler.waiting) == ([old], [young])
    assert (old.promised, old.preemptions) == (3, 0)
    assert (young.blocks, young.promised, young.cached, len(young.table)) == ([], 0, 0, 0)
    assert (young.limit is None, young.preemptions) == (True, 1)
    assert scheduler.committed(0) == 3
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
    assert max(pair, key=_seniority) is pair[gone]
    scheduler.schedule()
    assert [s.id for s in scheduler.preempted] == [gone]


def test_scores_of_a_prompt_are_kept_unless_they_are_computed_again() -> None:
    """Its answer has begun, or not."""
    for generated, kept in ((1, 1), (0, 0)):
        scheduler, one = scheduler_of(), sequence(0, 7, most=5)
        scheduler.add(one)
        scheduler.admit()
        one.ids.extend([1] * generated)
        score = TokenLogprob(-1.0, ())
        one.prompt_logprobs = [score]
        scheduler._preempt(one)
        assert one.prompt_logprobs == [score] * kept


def test_pages_of_a_step_are_reserved_where_they_are_missing() -> None:
    scheduler, one = scheduler_of(), sequence(0, 8, most=5)
    scheduler.add(one)
    scheduler.admit()
    for end, pages in ((4, 1), (4, 1), (5, 2), (8, 2)):
        one.limit = end
        scheduler.reserve([one])
        assert len(one.blocks) == pages


APPENDED: list[tuple[dict[str, Any], int, list[int], list[int], str]] = [
    ({}, 9, [1, 2, 3], [1, 2, 3], ""),
    ({}, 4, [1, 2, 3], [1, 2, 3], ""),
    ({}, 3, [1, 2, 3], [1, 2, 3], "length"),
    ({}, 2, [1, 2, 3], [1, 2], "length"),
    ({}, 9, [1, STOP, 3], [1, STOP], "stop"),
    ({}, 2, [1, STOP, 3], [1, STOP], "stop"),
    ({}, 9, [1, OWN_STOP, 3], [1, OWN_STOP, 3], ""),
    ({"stop_token_ids": (OWN_STOP,)}, 9, [1, OWN_STOP, 3], [1, OWN_STOP], "stop"),
    ({"stop_token_ids": (OWN_STOP,)}, 9, [1, STOP, 3], [1, STOP], "stop"),
    ({"stop_token_ids": (OWN_STOP,), "ignore_eos": True}, 9, [STOP, OWN_STOP, 3], [STOP, OWN_STOP], "stop"),
    ({"ignore_eos": True}, 9, [1, STOP, 3], [1, STOP, 3], ""),
    ({"ignore_eos": True}, 4, [1, STOP, 3], [1, STOP, 3], ""),
    ({"ignore_eos": True}, 3, [1, STOP, 3], [1, STOP, 3], "length"),
    ({"ignore_eos": True}, 2, [1, STOP, 3], [1, STOP], "length"),
    ({}, 9, [1, FAILED, 3], [1], "error"),
    ({}, 9, [FAILED], [], "error"),
]


@pytest.mark.parametrize(("sampling", "room", "tokens", "taken", "reason"), APPENDED)
def test_tokens_count_up_to_the_end(
    sampling: dict[str, Any], room: int, tokens: list[int], taken: list[int], reason: str
) -> None:
    scheduler, one = scheduler_of(), sequence(0, 5, most=room, **sampling)
    assert list(scheduler._append(one, tokens)) == taken
    assert list(one.ids) == [*range(5), *taken]
    assert one.finish_reason == reason


def test_a_step_leaves_all_but_the_newest_token_cached() -> None:
    scheduler = scheduler_of(pages=30, prefixes=True)
    whole, part, broken = sequence(0, 7, most=5), sequence(1, range(20, 29), most=5), sequence(2, [6] * 5, most=5)
    for one in (whole, part, broken):
        scheduler.add(one)
    scheduler.admit()
    part.limit, part.found = 5, 3
    step = Step(scheduler.running, False)
    assert step.finished_prompts == [whole, broken]
    scheduler.reserve(step.sequences)
    events = scheduler.commit(step, [1, FAILED])
    assert events == [Event(0, (1,), "", 0), Event(2, (), "error", 0)]
    assert [(s.cached, s.limit, s.published) for s in (whole, part)] == [(7, None, 1), (5, None, 1)]
    assert (broken.cached, broken.blocks, broken.finish_reason) == (5, [], "error")
    assert scheduler.running == [whole, part]
    part.limit = 3  # up to the end of its second page
    scheduler.reserve([part])
    assert scheduler.commit(Step([part], False), []) == []
    assert (part.published, len(part.keys)) == (2, 2)
    assert [block.key for block in part.blocks] == part.keys
    part.limit = None
    scheduler.reserve([part])
    assert scheduler.commit(Step([part], False), [1]) == [Event(1, (1,), "", 3)]


def test_ends_are_retired_with_their_pages() -> None:
    scheduler = scheduler_of(pages=20, groups=2, batch=4, prefixes=True)
    made = [sequence(id, [id] * 6, most=5) for id in range(3)]
    for one in made:
        scheduler.add(one)
    run(scheduler)
    assert scheduler.retire() == []
    assert [s.id for s in scheduler.running] == [0, 2, 1]
    scheduler.expert_pages = 20  # no page is left to prefixes
    made[1].finish_reason = "stop"
    assert scheduler.retire() == [made[1]]
    assert [s.id for s in scheduler.running] == [0, 2]
    assert made[1].blocks == []
    assert [(cache.held, len(cache.idle)) for cache in scheduler.caches] == [(4, 0), (0, 0)]


def test_digests_differ_wherever_ranks_could() -> None:
    def digest(change: str = "") -> int:
        scheduler, one = scheduler_of(groups=2, batch=4), sequence(3, 5, most=5)
        scheduler.running, one.cached = [one], 2
        step = Step([one], True) if change in ("step", "end") else None
        if change == "end":
            one.limit = 1
        elif change == "last":
            one.ids[-1] = 77
        elif change == "earlier":
            one.ids[-2] = 77
        elif change == "ids":
            one.ids.insert(0, 1)
        elif change == "waiting":
            scheduler.waiting = [sequence(4, 1)]
        elif change == "held":
            scheduler.caches[1].held = 1
        elif change == "idle":
            scheduler.caches[1].idle = {b"": Block(0)}
        elif change not in ("", "step"):
            setattr(one, change, getattr(one, change) + 1)
        return scheduler.digest(step)

    changes = ("", "id", "group", "cached", "ids", "last", "step", "end", "waiting", "held", "idle")
    found = {change: digest(change) for change in changes}
    assert len(set(found.values())) == len(changes)
    assert all(0 <= one < 1 << 64 for one in found.values())
    assert digest() == found[""]
    assert digest("earlier") == found[""]  # which tokens came before is not compared again


def test_a_sequence_knows_what_its_next_step_takes() -> None:
    one = sequence(3, 10, most=5, prompt_logprobs=1)
    assert (one.prompt_len, one.longest, one.generated, one.decoding) == (10, 15, [], False)
    assert (one.end, one.new_tokens, one.complete, one.scored, one.logit_rows) == (10, 10, True, True, 10)
    one.limit = 4
    assert (one.end, one.new_tokens, one.complete, one.logit_rows) == (4, 4, False, 4)
    one.cached = 8
    assert (one.end, one.new_tokens, one.complete, one.scored) == (10, 2, True, True)
    one.cached, one.limit = 9, None  # only its last token is left, behind which no token of the prompt comes
    assert (one.scored, one.logit_rows, one.decoding) == (False, 1, False)
    one.ids.extend([4, 5])
    assert (one.generated, one.decoding, one.scored) == ([4, 5], False, False)
    one.cached = 11
    assert (one.decoding, one.new_tokens) == (True, 1)
    one.drafted = 1
    assert not one.decoding
    one.cached = 10
    assert (one.decoding, one.new_tokens) == (True, 2)
    plain = sequence(4, 10)
    assert (plain.scored, plain.logit_rows) == (False, 1)


@pytest.mark.parametrize("ids", [("a",), (1.5,), (1 << 70,)])
def test_tokens_must_be_integers(ids: tuple[Any, ...]) -> None:
    with pytest.raises(UserError, match=r"^prompt 6: its tokens must be integers: "):
        new_sequence(6, Request(ids))
    assert new_sequence(6, Request((1, 2))).ids == array("q", [1, 2])

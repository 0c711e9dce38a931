"""Shared prefixes, promises and preemption: over random histories every request gets all its tokens, every page and
every set of states holds the tokens it is found by, and copies of the scheduler stay equal."""

import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.fakes.drafts import FreeDrafts
from umbra.executor.engine.memory.pages import Block, PagePool, States
from umbra.executor.engine.memory.prefixes import extend_keys, key_of
from umbra.executor.engine.schedule import states as recurrent
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.engine.schedule.scheduler import Scheduler, Step
from umbra.executor.engine.schedule.sequence import Sequence, new_sequence
from umbra.executor.plan.batch_limits import Limits
from umbra.models.config import Expansion

LONGEST = 40


@pytest.fixture(scope="module", autouse=True)
def checkpoints_inside_of_prompts() -> Iterator[None]:
    """Distances that are no multiples of every page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "INTERVAL", 6)
        yield


class Rank:
    """A scheduler beside a record of what each page contains."""

    def __init__(self, limits: Limits, pages: int, number: int):
        own = PagePool(pages, limits.page_size, limits.set_pages)
        own.free = own.free[number:] + own.free[:number]
        self.scheduler = Scheduler(limits, (), own, number % limits.groups)
        if limits.draft_tokens:
            self.scheduler.drafts = FreeDrafts(limits.draft_tokens)
        # (group, slot) -> (layer set, salt, all before)
        self.written: dict[tuple[int, int], tuple[int, bytes, tuple[int, ...]]] = {}
        self.states: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = {}  # (group, place) -> (salt, all before)

    def step(self, tokens: dict[int, int]) -> Any:
        """Runs one step in which sequence i gets the token tokens[i]. -> what all ranks must agree on"""
        scheduler = self.scheduler
        step = scheduler.schedule()
        if step is None:
            return None
        check_step(scheduler, step)
        scheduler.reserve(step.sequences)  # never runs out of pages
        for s in step.sequences:
            pool, salt = scheduler.pools[s.group], s.request.salt
            size = pool.page_size
            for number, held in enumerate(s.held):
                table = held.pages(pool)
                first = max(0, s.num_computed - held.window + 1) if held.window else 0  # that this step sees
                assert held.first == first // size  # nothing behind the window is held
                for position in range(first, s.end):
                    slot = table[position // size] * size + position % size
                    content = number, salt, tuple(s.ids[: position + 1])
                    if position < s.num_computed:
                        assert self.written[s.group, slot] == content  # also what another sequence computed
                    else:
                        self.written[s.group, slot] = content
                full = held.blocks[: s.num_computed // size - held.first]
                assert all(b in full for b in held.blocks if b.holders > 1)  # nobody writes into a shared page
            assert sum(b.pages for b in s.blocks) == s.pages <= s.promised
            if scheduler.limits.set_pages:
                self.check_states(s)
        chosen = [tokens[s.id] for s in step.finished_prompts for _ in range(1 + s.drafted)]
        events = scheduler.commit(step, chosen)
        return [(s.id, s.group, s.num_computed, s.preemptions) for s in step.sequences], events

    def check_states(self, s: Sequence) -> None:
        """Reads and writes the states of one sequence's next step."""
        own = s.recurrent
        assert (own.states is None) == (s.num_computed == 0)
        assert own.written
        contents = {own.states: own.at, own.at_page: own.full}
        for states, tokens in contents.items():
            if states:
                content = s.request.salt, tuple(s.ids[:tokens])
                assert all(self.states[s.group, unit] == content for unit in states.places)
        assert not own.written.key
        assert own.written.holders == 1
        for states, tokens in ((own.marked, own.mark), (own.written, own.written_at)):
            if states:
                content = s.request.salt, tuple(s.ids[:tokens])
                self.states |= {(s.group, unit): content for unit in states.places}

    def check(self) -> None:
        scheduler = self.scheduler
        for group, (pool, cache) in enumerate(zip(scheduler.pools, scheduler.caches, strict=True)):
            assert isinstance(pool, PagePool)
            blocks = Counter(b for s in scheduler.running if s.group == group for b in s.blocks)
            assert all(b.holders == count for b, count in blocks.items())
            assert cache.held == sum(b.pages for b in blocks)
            held, kept = ([page for b in of for page in pages_of(b)] for of in (blocks, cache.idle.values()))
            assert sorted(held + kept + pool.free) == list(range(pool.pages))
            assert cache.kept == len(kept)
            assert scheduler.committed(group) + len(kept) <= pool.pages
            sets = [b for b in (*blocks, *cache.idle.values()) if isinstance(b, States)]
            assert cache.live_states + cache.kept_states == len(sets)
            assert all(cache.index[key] is b and b.key == key and not b.holders for key, b in cache.idle.items())
            room = pool.pages - scheduler.committed(group)
            assert len(kept) <= max(scheduler.limits.prefix_floor, room - scheduler.expert_pages)
        assert not any(s.blocks or s.num_computed for s in scheduler.waiting)


def pages_of(block: Block) -> tuple[int, ...]:
    return block.places if isinstance(block, States) else (block.page,)


def check_step(scheduler: Scheduler, step: Step) -> None:
    limits, decoding = scheduler.limits, [s for s in scheduler.running if s.decoding or s.drafted]
    assert all(s in step.sequences for s in decoding)  # no decoding sequence waits for a prompt
    limit = limits.mixed_tokens if decoding else limits.prefill_tokens
    for group in range(limits.groups):
        prompts = sum(s.new_tokens for s in step.sequences if s.group == group and s not in decoding)
        assert limit is None or prompts <= limit
    assert step.decode == (len(decoding) == len(step.sequences))
    assert all(s.new_tokens > 0 for s in step.sequences)


@given(st.integers(0, 1 << 32))
def test_every_request_gets_its_tokens_whatever_gives_way(seed: int) -> None:
    """Prompts are of two tokens, so that many begin alike, and mostly repeat themselves, so that drafts come true."""
    draw = random.Random(seed)
    groups = draw.randint(1, 3)
    limits = Limits(
        3 * groups,
        LONGEST,
        draw.randint(1, 4),
        groups,
        draw.choice([None, 5]),
        3,
        draw.choice([None, 0, 1, 7]),
        draw.random() < 0.9,
        draw.randint(0, 3),
        draw.choice([0, 1, 3, 9]),
        draw.choice([(None,), (None,), (None, 6), (1,), (None, None, 3, 9)]),
        draw.choice([0, 1, 4, 4]),
    )
    pages = limits.pages_of(LONGEST) + draw.choice([0, 0, 1, 5, 12, 30])
    ranks = [Rank(limits, pages, number) for number in range(3)]
    wanted: dict[int, int] = {}
    got = Counter[int]()
    number = 0
    for _ in range(draw.randint(5, 60)):
        if draw.random() < 0.4:
            part = draw.choice([(0,), (1,), (0, 1), (1, 1, 0)]) * 30
            ids = [token if draw.random() < 0.95 else 1 - token for token in part[: draw.randint(1, 30)]]
            request = Request(
                tuple(ids),
                SamplingParams(max_tokens=draw.randint(1, 10)),
                draw.randint(0, 1),
                draw.choice([b"", b"a"]),
                branches=draw.choice([(), (len(ids) // 2, len(ids) - 1)]),
            )
            for rank in ranks:
                rank.scheduler.add(new_sequence(number, request))
            wanted[number], number = request.sampling.max_tokens, number + 1
        if draw.random() < 0.1 and number:
            id = draw.randrange(number)
            told = [rank.scheduler.abort(id) for rank in ranks]
            assert told == [told[0]] * 3
            if told[0]:
                del wanted[id]
        left = draw.randint(0, 5)
        for rank in ranks:
            rank.scheduler.expert_pages = left
        advance(ranks, number, got, draw.choice([0, 0, 0, 1]))
    for _ in range(4000):
        if ranks[0].scheduler.idle:
            break
        advance(ranks, number, got, 0)
    assert ranks[0].scheduler.idle
    assert {id: got[id] for id in wanted} == wanted
    assert all(cache.held == 0 for rank in ranks for cache in rank.scheduler.caches)


def advance(ranks: list[Rank], number: int, got: Counter[int], token: int) -> None:
    told = [rank.step(dict.fromkeys(range(number), token)) for rank in ranks]
    assert told == [told[0]] * 3
    for rank in ranks:
        rank.scheduler.retire()
        if told[0] is not None:
            rank.check()
    assert len({rank.scheduler.digest() for rank in ranks}) == 1
    for event in told[0][1] if told[0] else []:
        got[event.id] += len(event.tokens)


def run_alone(scheduler: Scheduler, id: int, ids: Iterable[int], most: int, salt: bytes = b"") -> Sequence:
    sequence = new_sequence(id, Request(tuple(ids), SamplingParams(max_tokens=most), salt=salt))
    scheduler.add(sequence)
    while not scheduler.idle:
        step = scheduler.schedule()
        assert step
        scheduler.reserve(step.sequences)
        scheduler.commit(step, [7] * len(step.finished_prompts))
    return sequence


def test_a_conversation_is_found_again_and_other_salts_find_nothing() -> None:
    scheduler = Scheduler(Limits(2, 100, 4, prefixes=True))
    first = run_alone(scheduler, 0, list(range(10)), 7)
    assert first.cached_tokens == 0
    again = run_alone(scheduler, 1, first.ids, 3)  # 17 tokens, of which the last was never computed
    assert again.cached_tokens == 16
    assert run_alone(scheduler, 2, list(range(8)), 3).cached_tokens == 4  # the last token is always computed
    assert run_alone(scheduler, 3, first.ids, 3, salt=b"other").cached_tokens == 0
    assert run_alone(scheduler, 4, [9, *range(1, 10)], 3).cached_tokens == 0


def test_prompts_are_expanded_as_decided_at_their_first_admission() -> None:
    """Behind a cached prefix only long ones are."""
    scheduler = Scheduler(Limits(2, 100, 4, prefixes=True, expansion=Expansion(saved=1, spent=8)))
    alone = run_alone(scheduler, 0, range(17), 1), run_alone(scheduler, 1, [9] * 16, 1)
    behind = [run_alone(scheduler, 2 + rows, [*range(16), *[rows] * rows], 1) for rows in (11, 12)]
    assert [(s.cached_tokens, s.expanded) for s in (*alone, *behind)] == [(0, 17), (0, 0), (16, 0), (16, 28)]
    again = new_sequence(99, Request(tuple(range(30))))
    again.preemptions = 1
    scheduler.add(again)
    assert scheduler.admit() == [again]
    assert again.expanded == 0


def test_a_prefix_needs_only_the_last_pages_of_a_window() -> None:
    limits = Limits(2, 100, 4, prefill_tokens=8, prefixes=True, windows=(None, 6))
    assert (limits.pages_of(100), limits.longest_in(25), limits.longest_in(28)) == (25 + 4, 84, 96)
    scheduler = Scheduler(limits)
    cache = scheduler.caches[0]
    first = run_alone(scheduler, 0, range(30), 5)
    assert run_alone(scheduler, 1, first.ids, 3).cached_tokens == 32
    assert run_alone(scheduler, 2, [*range(14), 99], 3).cached_tokens == 12
    keys: list[bytes] = []
    extend_keys(keys, first.ids, 4, b"")
    for page in (2, 7):  # of the window
        cache.index.pop(key_of(keys[page], 1))
    parts = cache.find(keys, 34, limits.windows).held
    assert [(held.first, held.end) for held in parts] == [(0, 7), (5, 7)]
    assert [held.end for held in cache.find(keys[:4], 17, limits.windows).held] == [2, 2]


def test_what_was_used_last_is_kept_and_a_page_goes_before_its_predecessor() -> None:
    scheduler = Scheduler(Limits(1, 32, 4, prefixes=True))
    cache = scheduler.caches[0]
    run_alone(scheduler, 0, list(range(12)), 1)
    run_alone(scheduler, 1, list(range(50, 62)), 1)
    run_alone(scheduler, 2, list(range(9)), 1)  # uses two pages of the first again
    keys: list[bytes] = []
    extend_keys(keys, array("q", range(12)), 4, b"")
    assert len(cache.idle) == 6
    cache.trim(2)
    assert list(cache.idle) == [keys[1], keys[0]]
    cache.trim(1)
    assert list(cache.idle) == [keys[0]]
    assert run_alone(scheduler, 3, list(range(12)), 1).cached_tokens == 4
    assert cache.missed_hits == 1  # the last page was dropped too long ago

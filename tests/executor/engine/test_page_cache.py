"""Kept pages, one call at a time: who holds them, which are found, counted, dropped and given back."""

import hashlib
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from errors import UserError
from executor.engine import sampling
from executor.engine.pages import Block, PagePool
from executor.engine.prefixes import KEY_BYTES, MARGIN, PageCache, extend_keys
from executor.engine.sequence import FAILED

SIZE = 4


def key(number: int) -> bytes:
    return b"key%d" % number


def kept(pages: int, count: int) -> tuple[PageCache, list[Block]]:
    """A cache in which `count` pages are kept; the last one was given back first."""
    cache = PageCache(PagePool(pages, SIZE))
    blocks: list[Block] = []
    cache.extend(blocks, count * SIZE)
    for number in range(count):
        cache.publish(blocks, number, key(number))
    cache.release(blocks)
    return cache, blocks


def test_keys_of_full_pages_follow_from_all_tokens_before() -> None:
    ids, keys = array("q", range(11)), list[bytes]()
    extend_keys(keys, ids[:7], SIZE, b"salt")
    assert len(keys) == 1
    extend_keys(keys, ids, SIZE, b"ignored now")
    before, expected = hashlib.blake2b(b"salt", digest_size=KEY_BYTES).digest(), []
    for page in range(2):
        part = ids[page * SIZE : (page + 1) * SIZE].tobytes()
        before = hashlib.blake2b(before + part, digest_size=KEY_BYTES).digest()
        expected.append(before)
    assert keys == expected
    extend_keys(keys, ids, SIZE, b"salt")
    assert keys == expected


def test_pages_are_found_up_to_the_last_token() -> None:
    cache, blocks = kept(32, 3)
    keys = [key(number) for number in range(3)]
    assert [len(cache.find(keys, tokens)) for tokens in (1, 4, 5, 8, 9, 12, 13, 99)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert cache.find(keys, 99) == blocks
    assert cache.find([key(0), key(7), key(1)], 99) == blocks[:1]
    assert cache.held == 0


def test_held_pages_are_counted_once_each() -> None:
    cache, blocks = kept(32, 3)
    assert list(cache.idle) == [key(2), key(1), key(0)]  # in the order in which they may be dropped
    cache.hold(blocks[:2])
    assert (cache.held, list(cache.idle)) == (2, [key(2)])
    cache.hold(blocks)
    assert (cache.held, list(cache.idle)) == (3, [])
    assert [block.holders for block in blocks] == [2, 2, 1]
    cache.release(blocks)
    assert (cache.held, list(cache.idle)) == (2, [key(2)])
    cache.release(blocks[:2])
    assert (cache.held, list(cache.idle)) == (0, [key(2), key(1), key(0)])


def test_hits_at_the_margin_and_misses_of_what_was_dropped() -> None:
    cache, blocks = kept(2 * MARGIN, 4)
    assert (cache.margin, cache.most_dropped) == (2, MARGIN)
    cache.hold(blocks[:2])  # 3 and 2 would be dropped next
    assert cache.last_hits == 0
    cache.hold(blocks[:3])  # of these only 2 is kept without a holder
    assert cache.last_hits == 1
    cache.hold(blocks[:3])
    assert cache.last_hits == 1
    cache.release(blocks[:3])
    cache.release(blocks[:3])
    cache.release(blocks[:2])
    cache.hold(blocks)
    assert cache.last_hits == 3
    cache.release(blocks)
    cache.trim(2)
    assert list(cache.dropped) == [key(3), key(2)]
    cache.count_missed([key(2), key(3), key(0), key(2)])
    assert cache.missed_hits == 2
    small = PageCache(PagePool(1, SIZE))
    assert (small.margin, small.most_dropped) == (1, 1)


def test_what_is_dropped_is_free_again() -> None:
    cache, blocks = kept(8, 6)
    free = len(cache.pool.free)  # type: ignore[attr-defined]
    cache.trim(4)
    assert len(cache.pool.free) == free + 2  # type: ignore[attr-defined]
    assert list(cache.idle) == [key(3), key(2), key(1), key(0)]
    assert key(4) not in cache.index
    cache.trim(4)
    assert len(cache.idle) == 4
    cache.trim(-1)
    assert (cache.idle, cache.index) == ({}, {})
    assert list(cache.dropped) == [key(3), key(2), key(1), key(0)]  # the last four of eight pages
    fresh: list[Block] = []
    cache.extend(fresh, SIZE)
    cache.publish(fresh, 0, key(1))
    assert key(1) not in cache.dropped
    assert not any(block is fresh[0] for block in blocks)


def test_a_page_that_another_sequence_has_published_is_given_back() -> None:
    cache, blocks = kept(8, 1)
    own: list[Block] = []
    cache.extend(own, 2 * SIZE)
    mine, free, version = own[0], len(cache.pool.free), cache.pool.version  # type: ignore[attr-defined]
    cache.publish(own, 0, key(0))
    assert own[0] is blocks[0]
    assert (blocks[0].holders, mine.holders, cache.held) == (1, 0, 2)
    assert len(cache.pool.free) == free + 1  # type: ignore[attr-defined]
    assert cache.pool.version == version + 1
    cache.publish(own, 0, key(9))  # it has a key
    assert blocks[0].key == key(0)
    assert key(9) not in cache.index
    cache.release(own)
    assert cache.held == 0
    assert len(cache.pool.free) == 7  # type: ignore[attr-defined]


def test_pages_are_taken_all_or_none() -> None:
    pool, held = PagePool(3, SIZE), list[Block]()
    assert (pool.pages, pool.padding) == (3, 3)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert pool.extend(held, 5) == 2
    assert [block.page for block in held] == [0, 1]
    assert pool.extend(held, 8) == pool.extend(held, 1) == 0
    with pytest.raises(UserError, match="KV cache: 2 more pages of 4 tokens needed, 1 free"):
        pool.extend(held, 16)
    assert len(held) == 2
    assert pool.extend(held, 12) == 1
    pool.give(held)
    assert [pool.take().page for _ in range(3)] == [0, 1, 2]


def test_a_token_that_a_grammar_refuses_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sequence that has drafts before it, and so several rows."""
    refused: list[int] = []

    def sequence(drafted: int, matcher: Any = None) -> Any:
        settings = SimpleNamespace(takes_the_largest=matcher is None)
        return SimpleNamespace(drafted=drafted, matcher=matcher, request=SimpleNamespace(sampling=settings))

    def accept(token: int) -> bool:
        refused.append(token)
        return token != 6

    follows = SimpleNamespace(accept=accept)
    ops: Any = SimpleNamespace(
        argmax=lambda logits: logits.argmax(-1), sample=lambda logits, choices: torch.tensor([5, 4, 6, 7])
    )
    monkeypatch.setattr(sampling, "choices_of", lambda sequence: [None] * (1 + sequence.drafted))
    made = [sequence(1), sequence(0, follows), sequence(0, follows)]
    assert sampling.choose(ops, torch.zeros(4, 9), made).tolist() == [5, 4, FAILED, 7]
    assert refused == [6, 7]
    assert sampling.choose(ops, torch.eye(4), [sequence(3)]).tolist() == [0, 1, 2, 3]

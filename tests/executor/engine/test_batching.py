"""What a batch and the pages of an arena are made of, number by number."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from errors import UserError
from executor.engine.batching import pack
from executor.engine.pages import Block, ElasticPages, PagePool
from executor.engine.request import Request, SamplingParams
from executor.engine.sampling import choices_of
from executor.engine.sequence import Sequence, new_sequence
from models.batch import Batch
from ops import load_ops

OPS, SIZE = load_ops("reference"), 4


def sequence(ids: int, cached: int, pages: list[int], prompt: int | None = None, **sampling: Any) -> Sequence:
    """Tokens 100, 101 and so on, in these pages."""
    given = tuple(range(100, 100 + ids))
    made = new_sequence(7, Request(given[:prompt], SamplingParams(**sampling)))
    made.ids = array("q", given)
    made.cached, made.blocks = cached, [Block(page) for page in pages]
    return made


def packed(*sequences: Sequence, **options: Any) -> tuple[Batch, PagePool]:
    pool = PagePool(20, SIZE)
    return pack(OPS, sequences, pool, (9, 9), 3, **options), pool


def numbers(batch: Batch) -> list[Any]:
    names = ("token_ids", "positions", "places", "block_tables", "query_starts", "kv_lens")
    return [torch.as_tensor(getattr(batch, name)).tolist() for name in names]


def test_prompts_are_packed_one_after_another() -> None:
    one, two = sequence(7, 2, [5, 3]), sequence(3, 0, [9])
    one.limit = 4
    batch, _ = packed(one, two)
    assert numbers(batch) == [
        [102, 103, 104, 105, 100, 101, 102],
        [2, 3, 4, 5, 0, 1, 2],
        [22, 23, 12, 13, 36, 37, 38],
        [[5, 3, 0], [9, 0, 0]],
        [0, 4, 7],
        [6, 3],
    ]
    assert batch.logit_rows is not None
    assert batch.logit_rows.tolist() == [3, 6]
    assert (batch.tokens_per_group, batch.sequence_parallel, batch.wanted_per_group) == ((9, 9), False, None)
    batch, _ = packed(one, two, all_logits=True, sequence_parallel=True, wanted_per_group=(1, 2))
    assert batch.logit_rows is None
    assert (batch.sequence_parallel, batch.wanted_per_group) == (True, (1, 2))


def test_scored_prompts_have_logits_of_all_their_rows() -> None:
    batch, _ = packed(sequence(3, 0, [1]), sequence(4, 0, [2], prompt_logprobs=0))
    assert batch.logit_rows is not None
    assert batch.logit_rows.tolist() == [2, 3, 4, 5, 6]


def test_drafted_tokens_are_rows_of_their_own() -> None:
    one, two = sequence(7, 4, [5, 3], prompt=4), sequence(2, 1, [9], prompt=1)
    one.drafted = 2
    batch, _ = packed(one, two, decode=True, all_logits=True)
    assert numbers(batch) == [
        [104, 105, 106, 101],
        [4, 5, 6, 1],
        [12, 13, 14, 37],
        [[5, 3, 0], [5, 3, 0], [5, 3, 0], [9, 0, 0]],
        [0, 1, 2, 3, 4],
        [5, 6, 7, 2],
    ]


def test_padding_rows_are_written_to_the_page_for_padding() -> None:
    batch, pool = packed(sequence(2, 1, [9], prompt=1), decode=True, rows=4)
    assert pool.padding == 20
    assert numbers(batch) == [
        [101, 0, 0, 0],
        [1, 0, 0, 0],
        [37, 80, 81, 82],
        [[9, 0, 0], [20] * 3, [20] * 3, [20] * 3],
        [0, 1, 2, 3, 4],
        [2, 2, 2, 2],
    ]
    assert batch.logit_rows is not None
    assert batch.logit_rows.tolist() == [0, 1, 2, 3]
    batch, _ = packed(rows=6)  # more than a page has tokens
    assert torch.as_tensor(batch.places).tolist() == [80, 81, 82, 83, 80, 81]


def test_page_numbers_are_read_again_after_pages_have_moved() -> None:
    one = sequence(9, 4, [5, 3])
    pool = PagePool(20, SIZE)
    one.limit = 4
    pack(OPS, [one], pool, (4,), 3)
    assert (one.table.tolist(), one.table_version) == ([5, 3], 0)
    one.blocks[0].page = 11
    one.blocks.append(Block(6))
    pack(OPS, [one], pool, (4,), 3)
    assert one.table.tolist() == [5, 3, 6]  # nobody said that a page has moved
    pool.version = 2
    batch = pack(OPS, [one], pool, (4,), 3)
    assert (one.table.tolist(), one.table_version) == ([11, 3, 6], 2)
    assert torch.as_tensor(batch.block_tables).tolist() == [[11, 3, 6]]


def test_tokens_are_chosen_by_seed_and_position() -> None:
    one = sequence(7, 4, [5, 3], prompt=4)
    one.drafted = 2
    choices = choices_of(one)
    assert [(c.seed, c.prompt, c.position, c.allowed) for c in choices] == [(7, 4, p, None) for p in (5, 6, 7)]
    assert all(choice.ids is one.ids and choice.settings is one.request.sampling for choice in choices)
    seeded = sequence(7, 4, [5, 3], prompt=4, seed=0)
    matcher: Any = SimpleNamespace(allowed=lambda: b"bits")
    seeded.matcher = matcher
    assert [(c.seed, c.position, c.allowed) for c in choices_of(seeded)] == [(0, 7, b"bits")]


class Arena:
    """Of ten frames with three units each; `free` have no page."""

    frames, units = 10, 3

    def __init__(self) -> None:
        self.free = [9, 8, 7, 6, 5, 4]
        self.moves: list[tuple[int, int]] = []
        self.stays: list[int] = []

    @property
    def free_frames(self) -> int:
        return len(self.free)

    def take_page(self) -> int | None:
        return self.free.pop() * self.units if self.free else None

    def give_page(self, unit: int) -> None:
        self.free.append(unit // self.units)

    def gather(self, stays: int) -> list[tuple[int, int]]:
        self.stays.append(stays)
        return self.moves


def test_elastic_pages_are_frames_for_which_experts_leave() -> None:
    arena, asked, copied = Arena(), list[int](), list[Any]()
    given: Any = arena, SIZE, 2, asked.append, lambda *move: copied.append(move)
    pages = ElasticPages(*given)
    assert (pages.pages, pages.padding, pages.page_size, pages.version) == (10 - 2 - 1, 12, SIZE, 0)
    assert (pages.available(5), asked) == (5, [])
    assert (pages.available(7), asked) == (5, [2])
    held: list[Block] = []
    assert pages.extend(held, 17) == 5
    assert [block.page for block in held] == [15, 18, 21, 24, 27]
    with pytest.raises(UserError, match="KV cache: the arena has no page left"):
        pages.take()
    with pytest.raises(UserError, match="KV cache: 1 more pages of 4 tokens needed, 0 free"):
        pages.extend(held, 21)
    pages.give(held[3:])
    assert arena.free == [8, 9]
    assert sorted(pages.blocks) == [12, 15, 18, 21]
    pages.gather()
    assert (arena.stays, pages.version, copied) == ([12], 0, [])
    arena.moves = [(15, 24), (21, 27)]
    pages.gather()
    assert (pages.version, copied) == (2, [(15, 24), (21, 27)])
    assert [block.page for block in held[:3]] == [24, 18, 27]
    assert sorted(pages.blocks) == [12, 18, 24, 27]
    assert pages.blocks[24] is held[0]


def test_a_new_sequence_has_nothing_yet() -> None:
    one = new_sequence(3, Request((5, 6)))
    counts = (one.arrival, one.group, one.cached, one.table_version, one.promised, one.published, one.found)
    assert counts == (0,) * 7
    assert (one.preemptions, one.drafted, one.limit, one.matcher, one.finish_reason) == (0, 0, None, None, "")
    assert (one.blocks, one.keys, one.prompt_logprobs, len(one.table)) == ([], [], [], 0)
    matches = one.matches
    assert (matches.ends, matches.end, matches.expected, matches.pause) == ({}, 2, None, 0)


def test_what_a_request_gets_that_says_nothing() -> None:
    one = Request((5,))
    assert (one.priority, one.salt, one.sampling) == (0, b"", SamplingParams())
    plain: dict[str, Any] = dict(
        max_tokens=32, temperature=0.0, top_k=None, top_p=1.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
        repetition_penalty=1.0, logit_bias={}, seed=None, stop_token_ids=(), ignore_eos=False, logprobs=None,
        prompt_logprobs=None, grammar=None,
    )  # fmt: skip
    assert vars(SamplingParams()) == plain
    assert SamplingParams(seed=2**63 - 1).seed == 2**63 - 1
    with pytest.raises(UserError, match="seed: 9223372036854775808 must be an integer from 0 to 9223372036854775807"):
        SamplingParams(seed=2**63)

"""What a batch is made of, number by number; and that attention over pages is attention."""

from array import array
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from executor.engine.batching import pack
from executor.engine.pages import Block, PagePool
from executor.engine.request import Request, SamplingParams
from executor.engine.sequence import Sequence, new_sequence
from models.batch import Batch
from ops import load_ops

OPS, SIZE = load_ops("reference"), 4


def sequence(ids: int, cached: int, pages: list[int], prompt: int | None = None, **sampling: Any) -> Sequence:
    """Tokens 100, 101 and so on, in these pages."""
    given = tuple(range(100, 100 + ids))
    made = new_sequence(7, Request(given[:prompt], SamplingParams(**sampling)))
    made.ids = array("q", given)
    made.num_computed, made.blocks = cached, [Block(page) for page in pages]
    return made


def packed(*sequences: Sequence, **options: Any) -> tuple[Batch, PagePool]:
    pool = PagePool(20, SIZE)
    return pack(OPS, sequences, pool, (9, 9), 3, **options), pool


def numbers(batch: Batch) -> list[Any]:
    return [torch.as_tensor(numbers).tolist() for numbers in (batch.token_ids, batch.positions, *batch.paged)]


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
    assert torch.as_tensor(batch.paged.slot_mapping).tolist() == [80, 81, 82, 83, 80, 81]


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
    assert torch.as_tensor(batch.paged.block_tables).tolist() == [[11, 3, 6]]


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 5))
def test_packed_paged_attention_equals_plain_attention(data: st.DataObject, lens: list[int], page_size: int) -> None:
    """Sequences written chunk by chunk into shuffled pages attend as if each lay alone in one piece."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    heads, kv_heads, dim = 4, 2, 8
    pool = PagePool(sum(-(-n // page_size) for n in lens), page_size)
    pool.free = data.draw(st.permutations(pool.free))
    caches = torch.zeros(2, len(pool.free), page_size, kv_heads, dim)
    sequences = [new_sequence(i, Request((0,) * n)) for i, n in enumerate(lens)]
    whole = [[torch.randn(n, h, dim) for h in (heads, kv_heads, kv_heads)] for n in lens]
    got: list[list[torch.Tensor]] = [[] for _ in lens]
    while any(s.num_computed < n for s, n in zip(sequences, lens, strict=True)):
        active = [s for s in sequences if s.num_computed < lens[s.id]]
        for s in active:
            s.ids = array("q", range(data.draw(st.integers(s.num_computed + 1, lens[s.id]))))
            pool.extend(s.blocks, len(s.ids))
        batch = pack(OPS, active, pool, (sum(s.new_tokens for s in active),), 12, all_logits=True)
        q, k, v = (torch.cat([whole[s.id][t][s.num_computed : len(s.ids)] for s in active]) for t in range(3))
        assert batch.token_ids.tolist() == [i for s in active for i in s.ids[s.num_computed :]]
        assert batch.positions.tolist() == batch.token_ids.tolist()  # ids were chosen to be positions
        OPS.write_kv(k, v, caches[0], caches[1], batch.paged.slot_mapping)
        out = OPS.attention(q, caches[0], caches[1], batch.paged, dim**-0.5)
        for s, part in zip(active, out.split([s.new_tokens for s in active]), strict=True):
            got[s.id].append(part)
            s.num_computed = len(s.ids)
    for (q, k, v), parts in zip(whole, got, strict=True):
        plain = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(torch.cat(parts), plain.transpose(0, 1), atol=1e-5, rtol=1e-5)

"""A batch of sequences in pages: attention over them is attention, and page numbers are never stale."""

from array import array

import hypothesis.strategies as st
import torch
from hypothesis import given

from umbra.executor.engine.memory.pages import Block, Holding, PagePool
from umbra.executor.engine.schedule.request import Request
from umbra.executor.engine.schedule.sequence import new_sequence
from umbra.executor.engine.step.batching import Packer, StepShape
from umbra.ops import load_ops

OPS = load_ops("reference")


def test_page_numbers_are_read_again_after_pages_have_moved() -> None:
    one, pool = new_sequence(7, Request(tuple(range(100, 109)))), PagePool(20, 4)
    held = Holding(None, [Block(5), Block(3)])
    one.num_computed, one.held, one.limit = 4, [held], 4
    Packer(OPS, pool, 3).pack([one], StepShape((4,)))
    assert (held.table.tolist(), held.version) == ([5, 3], 0)
    held.blocks[0].page = 11
    held.blocks.append(Block(6))
    Packer(OPS, pool, 3).pack([one], StepShape((4,)))
    assert held.table.tolist() == [5, 3, 6]  # nobody said that a page has moved
    pool.version = 2
    batch = Packer(OPS, pool, 3).pack([one], StepShape((4,)))
    assert (held.table.tolist(), held.version) == ([11, 3, 6], 2)
    assert torch.as_tensor(batch.paged[0].block_tables).tolist() == [[11, 3, 6]]


def test_pages_behind_a_window_are_given_back_and_never_named() -> None:
    held = Holding(6, [Block(page) for page in (7, 8, 9)])
    pool = PagePool(20, 4)
    assert held.pages(pool).tolist() == [7, 8, 9]
    assert held.slide(8, 4) == []  # token 8 sees from token 3 on
    assert [block.page for block in held.slide(9, 4)] == [7]
    assert (held.first, held.end, held.pages(pool).tolist()) == (1, 3, [8, 8, 9])
    pool.extend(held, 13)
    assert (held.end, len(held.blocks), held.slide(9, 4)) == (4, 3, [])
    assert held.pages(pool).tolist()[:3] == [8, 8, 9]


@given(st.data(), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 5))
def test_packed_paged_attention_equals_plain_attention(data: st.DataObject, lens: list[int], page_size: int) -> None:
    """Sequences written chunk by chunk into shuffled pages attend as if each lay alone in one piece."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    heads, kv_heads, dim = 4, 2, 8
    pool = PagePool(sum(-(-n // page_size) for n in lens), page_size)
    pool.free = data.draw(st.permutations(pool.free))
    caches = torch.zeros(2, len(pool.free), page_size, kv_heads, dim)
    sequences = [new_sequence(i, Request((0,) * n)) for i, n in enumerate(lens)]
    for s in sequences:
        s.held = [Holding(None)]
    whole = [[torch.randn(n, h, dim) for h in (heads, kv_heads, kv_heads)] for n in lens]
    got: list[list[torch.Tensor]] = [[] for _ in lens]
    while any(s.num_computed < n for s, n in zip(sequences, lens, strict=True)):
        active = [s for s in sequences if s.num_computed < lens[s.id]]
        for s in active:
            s.ids = array("q", range(data.draw(st.integers(s.num_computed + 1, lens[s.id]))))
            pool.extend(s.held[0], len(s.ids))
        batch = Packer(OPS, pool, 12).pack(active, StepShape((sum(s.new_tokens for s in active),), all_logits=True))
        q, k, v = (torch.cat([whole[s.id][t][s.num_computed : len(s.ids)] for s in active]) for t in range(3))
        assert batch.token_ids.tolist() == [i for s in active for i in s.ids[s.num_computed :]]
        assert batch.positions.tolist() == batch.token_ids.tolist()  # ids were chosen to be positions
        OPS.write_kv(k, v, caches[0], caches[1], batch.paged[0].slot_mapping)
        out = OPS.attention(q, caches[0], caches[1], batch.paged[0], dim**-0.5)
        for s, part in zip(active, out.split([s.new_tokens for s in active]), strict=True):
            got[s.id].append(part)
            s.num_computed = len(s.ids)
    for (q, k, v), parts in zip(whole, got, strict=True):
        plain = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(torch.cat(parts), plain.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_rows_of_prompts_are_expanded_and_others_are_not() -> None:
    """A recomputed sequence has rows of both kinds; a batch of one kind names no others."""
    pool = PagePool(20, 4)
    sequences = [new_sequence(i, Request(tuple(range(n)))) for i, n in enumerate((9, 6, 3))]
    for s, computed, expanded in zip(sequences, (2, 5, 0), (7, 0, 3), strict=True):
        s.num_computed, s.expanded = computed, expanded
        s.held = [Holding(None)]
        pool.extend(s.held[0], len(s.ids))
    batch = Packer(OPS, pool, 3).pack(sequences, StepShape((12,), rows=4))
    tables = torch.as_tensor(batch.paged[0].block_tables)
    for subset, rows, starts, lengths, of in (
        (batch.expanded, [0, 1, 2, 3, 4, 8, 9, 10], [0, 5, 8], [7, 3], [0, 2]),
        (batch.absorbed, [5, 6, 7, 11], [0, 2, 3, 4], [9, 6, 2], [0, 1, 3]),
    ):
        assert subset
        assert subset.rows.tolist() == rows
        numbers = [torch.as_tensor(x).tolist() for x in (subset.paged[0].query_starts, subset.paged[0].kv_lens)]
        assert numbers == [starts, lengths]
        assert torch.equal(subset.paged[0].block_tables, tables[of])
    only = (
        Packer(OPS, pool, 3).pack(sequences[2:], StepShape((3,))),
        Packer(OPS, pool, 3).pack(sequences[1:2], StepShape((1,))),
    )
    assert [(b.expanded is None, b.absorbed is None) for b in only] == [(False, True), (True, True)]

"""Properties of paging, scheduling and packing, over random histories."""

from array import array

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from errors import UserError
from executor.engine.batch_limits import Limits
from executor.engine.batching import pack
from executor.engine.pages import Block, PagePool
from executor.engine.request import Request, SamplingParams
from executor.engine.scheduler import Scheduler
from executor.engine.sequence import Sequence, new_sequence
from ops import load_ops

reference = load_ops("reference")


def sequence(index: int, prompt_len: int, new: int) -> Sequence:
    ids = tuple(100 * index + i for i in range(prompt_len))
    return new_sequence(index, Request(ids, SamplingParams(max_tokens=new)))


@given(st.data(), st.integers(1, 30), st.integers(1, 7))
def test_no_page_has_two_holders_and_none_is_lost(data: st.DataObject, pages: int, page_size: int) -> None:
    pool, holders = PagePool(pages, page_size), [list[Block]() for _ in range(4)]
    for _ in range(data.draw(st.integers(1, 30))):
        held = holders[data.draw(st.integers(0, 3))]
        if data.draw(st.booleans()):
            pool.give(held)
            held.clear()
        else:
            tokens, before, free = data.draw(st.integers(0, 60)), list(held), len(pool.free)
            missing = pool.pages_for(tokens) - len(held)
            if missing > free:
                with pytest.raises(UserError, match="KV cache"):
                    pool.extend(held, tokens)
                assert (held, len(pool.free)) == (before, free)  # all or nothing
            else:
                pool.extend(held, tokens)
                assert len(held) * page_size >= tokens
                assert held[: len(before)] == before  # what is cached stays where it is
        everywhere = [block.page for held in holders for block in held] + pool.free
        assert sorted(everywhere) == list(range(pages))


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 5),
       st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 3)]))  # fmt: skip
def test_every_prompt_runs_to_its_end_within_the_worst_case(
    prompts: list[tuple[int, int]], page_size: int, sizes: tuple[int, int]
) -> None:
    batch_size, groups = sizes
    scheduler = Scheduler(Limits(batch_size, 20 + 9, page_size, groups))
    sequences = [sequence(i, n, new) for i, (n, new) in enumerate(prompts)]
    for s in sequences:
        scheduler.add(s)
    order: list[int] = []
    while scheduler.waiting or scheduler.running:
        admitted = scheduler.admit()
        order += sorted(s.id for s in admitted)
        assert len(scheduler.running) <= batch_size
        assert [s.group for s in scheduler.running] == sorted(s.group for s in scheduler.running)
        for g in range(groups):
            assert sum(s.group == g for s in scheduler.running) <= batch_size // groups
        if scheduler.waiting:
            assert len(scheduler.running) == batch_size  # no sequence waits while a place is free
        scheduler.reserve(scheduler.running)  # never runs out of pages
        for s in scheduler.running:
            s.cached = len(s.ids)
            s.ids.append(0)
            s.finish_reason = "length" if len(s.generated) == s.request.sampling.max_tokens else ""
        scheduler.retire()
    assert order == list(range(len(prompts)))  # first come, first served
    assert [len(s.generated) for s in sequences] == [new for _, new in prompts]
    assert all(len(pool.free) == scheduler.limits.pages for pool in scheduler.pools)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 5),
       st.integers(2, 3), st.integers(0, 12))  # fmt: skip
def test_ranks_of_all_groups_decide_alike(
    prompts: list[tuple[int, int]], page_size: int, groups: int, more: int
) -> None:
    """Pools have fewer pages than the worst case; each rank's own pool may hand out pages in any order."""
    ranks = []
    for group in range(groups):
        own = PagePool(-(-29 // page_size) + more, page_size)
        own.free.reverse()
        ranks.append(Scheduler(Limits(3 * groups, 29, page_size, groups), (), own, group))
        assert ranks[-1].pools[group] is own
        for i, (n, new) in enumerate(prompts):
            ranks[-1].add(sequence(i, n, new))
    while ranks[0].waiting or ranks[0].running:
        admitted = [[(s.id, s.group) for s in rank.admit()] for rank in ranks]
        assert admitted == [admitted[0]] * groups
        for rank in ranks:
            rank.reserve(rank.running)  # never runs out of pages
            for s in rank.running:
                s.cached = len(s.ids)
                s.ids.append(0)
                s.finish_reason = "length" if len(s.generated) == s.request.sampling.max_tokens else ""
        retired = [[(s.id, s.group) for s in rank.retire()] for rank in ranks]
        assert retired == [retired[0]] * groups


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 5))
def test_packed_paged_attention_equals_plain_attention(data: st.DataObject, lens: list[int], page_size: int) -> None:
    """Sequences written chunk by chunk into shuffled pages attend as if each lay alone in one piece."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    heads, kv_heads, dim = 4, 2, 8
    pool = PagePool(sum(-(-n // page_size) for n in lens), page_size)
    pool.free = data.draw(st.permutations(pool.free))
    caches = torch.zeros(2, len(pool.free), page_size, kv_heads, dim)
    sequences = [sequence(i, n, 1) for i, n in enumerate(lens)]
    whole = [[torch.randn(n, h, dim) for h in (heads, kv_heads, kv_heads)] for n in lens]
    got: list[list[torch.Tensor]] = [[] for _ in lens]
    while any(s.cached < n for s, n in zip(sequences, lens, strict=True)):
        active = [s for s in sequences if s.cached < lens[s.id]]
        for s in active:
            s.ids = array("q", range(data.draw(st.integers(s.cached + 1, lens[s.id]))))
            pool.extend(s.blocks, len(s.ids))
        batch = pack(reference, active, pool, (sum(s.new_tokens for s in active),), 12, all_logits=True)
        q, k, v = (torch.cat([whole[s.id][t][s.cached : len(s.ids)] for s in active]) for t in range(3))
        assert batch.token_ids.tolist() == [i for s in active for i in s.ids[s.cached :]]
        assert batch.positions.tolist() == batch.token_ids.tolist()  # ids were chosen to be positions
        reference.write_kv(k, v, caches[0], caches[1], batch.places)
        out = reference.attention(
            q, caches[0], caches[1], batch.block_tables, batch.query_starts, batch.kv_lens, dim**-0.5
        )
        for s, part in zip(active, out.split([s.new_tokens for s in active]), strict=True):
            got[s.id].append(part)
            s.cached = len(s.ids)
    for (q, k, v), parts in zip(whole, got, strict=True):
        plain = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(torch.cat(parts), plain.transpose(0, 1), atol=1e-5, rtol=1e-5)

"""Attention over chosen blocks, and rows by hashes: native against what they mean, whatever the chunks and threads."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cpu.test_ops import SETS, start
from umbra.base.errors import UserError
from umbra.ops import reference
from umbra.ops.cpu import engine
from umbra.ops.cpu import ops as cpu
from umbra.ops.interface import NgramTable, Paged, Pooling

CPU, RATIO, SIZE, WIDTH, TOP = torch.device("cpu"), 4, 8, 24, 5


def run(
    ops: Any, dtype: torch.dtype, chunks: list[list[int]], seed: int = 5, ties: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The outputs of two sequences of 61 and 30 tokens, computed in steps of so many new tokens of each, and the blocks
    of each step. Tokens that a step computes again are written again."""
    torch.manual_seed(seed)
    lengths, tables = (61, 30), torch.tensor([[3, 0, 9, 5, 1, 12, 7, 11], [2, 8, 4, 6, 0, 0, 0, 0]])
    q, k, v = (torch.randn(91, heads, WIDTH) for heads in (6, 2, 2))
    raw, index_q, weight = torch.randn(91, WIDTH), torch.randn(91, 4, WIDTH), torch.rand(WIDTH) + 0.5
    raw = torch.ones_like(raw) if ties else raw
    angles = torch.arange(91.0)[:, None] * torch.rand(WIDTH // 2).repeat(2) * (not ties)
    caches = [ops.row_cache(13, SIZE, 2, WIDTH, dtype, CPU) for _ in range(2)]
    index = ops.row_cache(13, SIZE + SIZE // RATIO, 1, WIDTH, dtype, CPU)
    out, chosen, done = torch.zeros(91, 6, WIDTH), [], [0, 0]
    firsts, back = (0, 61), angles[RATIO - 1]
    for step in chunks:
        rows = [range(done[s], done[s] + step[s]) for s in range(2)]
        done = [done[s] + step[s] for s in range(2)]
        at = torch.tensor([firsts[s] + i for s in range(2) for i in rows[s]])
        slots = torch.tensor([int(tables[s, i // SIZE]) * SIZE + i % SIZE for s in range(2) for i in rows[s]])
        starts = torch.tensor([0, *itertools.accumulate(step)])
        paged = Paged(slots, tables, starts, torch.tensor(done))
        positions = torch.tensor([i for s in range(2) for i in rows[s]])
        cos, sin = angles[positions].cos(), angles[positions].sin()
        ops.write_rows(k[at], v[at], *caches, slots)
        ops.write_index(raw[at], Pooling(RATIO, 1e-6, weight, cos, sin, back.cos(), back.sin()), index, slots)
        queries = ops.norm_rotate(index_q[at], weight, 1e-6, cos, sin)
        blocks = ops.choose_blocks(queries, None, index, paged, RATIO, TOP)
        out[at] = ops.selected_attention(q[at], *caches, paged, blocks, RATIO, 0.3)
        chosen.append(blocks)
    assert tuple(done) == lengths
    return out, chosen


@pytest.mark.parametrize("instruction_set", SETS)
def test_native_ops_do_what_they_mean(instruction_set: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        start((2,), instruction_set)
        expected, blocks = run(reference, dtype, [[61, 30]])
        actual, own = run(cpu, dtype, [[61, 30]])
        assert torch.equal(blocks[0], own[0])
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
        # The same bits in pieces of 7 tokens and of one, with other threads.
        start((1, 2), instruction_set)
        pieces = [[7, 7]] * 4 + [[7, 2], [7, 0], [1, 0], *[[1, 0]] * 18]
        assert torch.equal(run(cpu, dtype, pieces)[0], actual)
    engine.start(1, "auto")


def test_the_first_of_equal_blocks_are_chosen_and_the_tail_is_kept() -> None:
    implementations: list[Any] = [reference, cpu]
    for ops in implementations:
        _, (blocks,) = run(ops, torch.float32, [[61, 30]], ties=True)
        assert blocks[60].tolist() == blocks[90].tolist() == [0, 1, 2, 3, 4]
        assert blocks[2].tolist() == [-1] * 5
        assert blocks[61 + 8].tolist() == [0, 1, -1, -1, -1]
    torch.manual_seed(1)
    q, keys = torch.randn(1, 2, 8), torch.zeros(1, 1, 5, 8)
    paged = Paged(torch.tensor([2]), torch.tensor([[0]]), torch.tensor([0, 1]), torch.tensor([3]))
    caches = torch.randn(2, 1, 2, 4, 8)
    for ops in implementations:  # three tokens, of which no block is complete
        blocks = ops.choose_blocks(q, None, keys, paged, 4, 3)
        out = ops.selected_attention(q, *caches, paged, blocks, 4, 1.0)
        k, v = caches[:, 0, :, :3]
        weights = torch.einsum("hd,hkd->hk", q[0], k).softmax(-1)
        torch.testing.assert_close(out[0], torch.einsum("hk,hkd->hd", weights, v), atol=1e-6, rtol=1e-5)


def test_weights_of_heads_may_be_negative() -> None:
    torch.manual_seed(2)
    q, weights, index = torch.randn(9, 4, 8), torch.randn(9, 4), torch.randn(6, 1, 10, 8)
    paged = Paged(torch.arange(9), torch.tensor([[3, 1, 5, 0, 2, 4]]), torch.tensor([0, 9]), torch.tensor([41]))
    expected = reference.choose_blocks(q, weights, index, paged, 4, 3)
    assert torch.equal(cpu.choose_blocks(q, weights, index, paged, 4, 3), expected)


def test_int8_caches_are_refused() -> None:
    with pytest.raises(UserError, match="kv_dtype: int8: attention over chosen blocks"):
        cpu.row_cache(1, 8, 1, 16, torch.int8, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_by_hashes(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    moduli = torch.tensor([7, 11, 13, 17])
    parts = [part.contiguous() for part in torch.randn(48, 5).to(dtype).chunk(4)]
    addresses = torch.tensor([part.data_ptr() for part in parts])
    big = torch.tensor([23703573157769, 20109073645365, 8052911324071])
    table = NgramTable(big, moduli, torch.tensor([0, 7, 18, 31]), 2, parts, addresses)
    ids = torch.tensor([4, 2, 248319, 9])
    previous = torch.tensor([[-1, -1], [4, -1], [2, 4], [248319, 2]])
    expected = reference.ngram_rows(ids, previous, table)
    assert torch.equal(cpu.ngram_rows(ids, previous, table), expected)
    # The first token's: nothing lies before it, so the end of a text stands there.
    row = ((4 * int(big[0])) ^ (2 * int(big[1])) ^ (2 * int(big[2]))) % 17 + 31
    assert torch.equal(expected[0, 15:], torch.cat(parts)[row].float())
    keys, queries, values = torch.randn(5, 12), torch.randn(5, 12), torch.randn(5, 4)
    keys[1, :4] = 0
    torch.testing.assert_close(
        cpu.agreeing_values(keys, queries, values, 3), reference.agreeing_values(keys, queries, values, 3)
    )

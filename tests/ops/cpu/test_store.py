"""The shadow store over several NUMA nodes: the same bits, rows in each node's own memory, whole copies."""

from itertools import accumulate, pairwise

import pytest
import torch

from tests.experts import fill_experts, kind_of
from umbra.ops import load_ops
from umbra.ops.cpu import engine, shadow
from umbra.ops.cpu.engine import native
from umbra.ops.cpu.matrix import NativeExperts
from umbra.ops.cpu.store import ExpertStore, joined
from umbra.ops.formats import FORMATS, Format

CPU = torch.device("cpu")
COUNT, INNER, HIDDEN = 5, 192, 128
KINDS = {k: FORMATS[k] for k in ("float32", "bfloat16", "q8", "q4")} | {
    "q4 zeros": Format("q4", 64, zeros=True),
    "f8": Format("f8", 32),
    "mxfp4": FORMATS["mxfp4"],
    "w8a8": Format("w8a8", 32),
    "q8 and q4": Format("q8", 64, down=FORMATS["q4"]),
}
TEAMS = [(1,), (2, 1, 3), (1,) * 12]  # threads of each; the last are more than w2 has row blocks


def filled(format: Format, teams: tuple[int, ...]) -> tuple[ExpertStore, shadow.ShadowPool, NativeExperts]:
    engine.start(1, "auto")
    pool = shadow.ShadowPool([native.Team(-1, threads, []) for threads in teams])
    kind = kind_of(format)
    store = ExpertStore(COUNT, shadow.ExpertBlocks(INNER, HIDDEN, format, kind), pool)
    experts = NativeExperts(COUNT, INNER, HIDDEN, format, CPU, kind)
    fill_experts(COUNT, INNER, HIDDEN, kind, store, experts)
    return store, pool, experts


@pytest.mark.parametrize("teams", TEAMS)
@pytest.mark.parametrize("format", KINDS.values(), ids=KINDS)
def test_a_divided_store_gives_the_same_bits_and_whole_blocks(format: Format, teams: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    store, pool, experts = filled(format, teams)
    slots = torch.full((COUNT, store.blocks.block_bytes), 0x7F, dtype=torch.uint8)
    copier, whole = shadow.Copier(), store.blocks
    for expert in range(COUNT):
        copier.wait(copier.submit(slots[expert], store[expert]))
        for which in ("gate", "up", "down"):
            stored = whole.dequantised(slots[expert].data_ptr(), which)
            assert torch.equal(stored, experts.dequantised(expert, which))
    table, counts, hits, times = (torch.zeros(size, dtype=torch.int64) for size in (COUNT, COUNT, 1, 4))
    layer = shadow.ShadowLayer(
        0, store.blocks, store.addresses, table, counts, hits, times, store, first_expert=1, handles=store.handles
    )
    x, weights = torch.randn(3, HIDDEN), torch.rand(3, 4)
    ids = torch.stack([torch.randperm(COUNT + 2)[:4] for _ in range(3)])  # some are of other ranks
    expected = load_ops("cpu").moe(x, weights, ids, experts, 1)
    for resident in ([], [0, 3], list(range(COUNT))):
        table.zero_()
        table[resident] = torch.tensor([slots[expert].data_ptr() for expert in resident], dtype=torch.int64)
        job = shadow.submit(pool, layer, x, ids)
        shadow.resident_rows(job)
        assert torch.equal(shadow.join(job, weights), expected)


@pytest.mark.parametrize("teams", TEAMS)
def test_each_nodes_rows_lie_in_its_own_memory(teams: tuple[int, ...]) -> None:
    """In proportion to its threads; what a copy reads of an expert is all of that and nothing else."""
    store, _, experts = filled(FORMATS["q4"], teams)
    regions = [(b.address, b.address + len(b)) for b in store.buffers]
    read = [0] * len(teams)
    for expert in range(COUNT):
        source = store[expert]
        spans = sorted((offset, offset + size) for offset, _, size in source.pieces)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        for _, start, size in source.pieces:
            (team,) = (t for t, (a, b) in enumerate(regions) if a <= source.address + start <= b - size)
            read[team] += size
    assert sum(read) == experts.nbytes
    for before, after, size in zip([0, *accumulate(teams)], accumulate(teams), read, strict=False):
        rows = {unit: n * after // sum(teams) - n * before // sum(teams) for unit, n in ((64, 6), (16, 8))}
        quants = 64 * rows[64] * HIDDEN // 2 + 16 * rows[16] * INNER // 2
        assert size == COUNT * (quants + quants // 16 * 2)
    if len(teams) == 1:
        assert source.pieces == [(0, 0, store.blocks.block_bytes)]


def test_neighbouring_pieces_are_one() -> None:
    pieces = [(0, 0, 10), (16, 16, 4), (20, 20, 0), (32, 40, 8), (40, 48, 8)]
    assert list(joined(iter(pieces))) == [(0, 0, 20), (32, 40, 16)]

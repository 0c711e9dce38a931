"""A job that sums and gathers rows over its ranks in both ways, for every way to share attention, and requires the same
values; then again with each mistake, which must change them. Rank 0 prints how many comparisons there were."""

import os
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

import pytest
import torch
import torch.distributed as dist

from tests.ops.parallel.row_mistakes import ROW_MISTAKES
from umbra.ops.parallel.groups import Parallel
from umbra.ops.parallel.join import parallel_of
from umbra.ops.parallel.partitions import ParallelSizes, partitions
from umbra.ops.parallel.rows import GroupRows, RowShares

COLUMNS = 24


def places(rank: int, world: int) -> list[Parallel]:
    """The rank's place for every number of ranks that share attention."""
    handles: dict[tuple[int, ...], dist.ProcessGroup] = {}
    sizes = [ParallelSizes(world, attn_tp) for attn_tp in range(1, world + 1) if world % attn_tp == 0]
    for ids in (ids for size in sizes for members in partitions(size).values() for ids in members):
        if len(ids) > 1 and ids not in handles:
            handles[ids] = dist.new_group(list(ids))
    return [parallel_of(size, rank, handles) for size in sizes]


def wrong(parallel: Parallel, counts: tuple[int, ...], dtype: torch.dtype) -> int:
    """Number of comparisons, of four, in which shares of rows differ from whole ones. Sums are compared bit by bit; if
    groups have different numbers of rows, all-reduce and reduce-scatter add in another order."""
    rank, group = parallel.world.rank, parallel.attn_dp.rank
    whole, shares = GroupRows(parallel, counts), RowShares(parallel, counts)
    noise = torch.Generator().manual_seed(rank)
    x = torch.randn(counts[group], COLUMNS, generator=noise).to(dtype)
    y = torch.randn(sum(counts), COLUMNS, generator=noise).to(dtype)
    same = torch.randn(counts[group], COLUMNS, generator=torch.Generator().manual_seed(100 + group)).to(dtype)
    exact = dict(rtol=0, atol=0) if min(counts) == max(counts) else dict(rtol=2 * torch.finfo(dtype).eps, atol=1e-1)
    pairs = [
        (shares.gather(shares.sum(x.clone())), whole.sum(x.clone()), dict(rtol=0, atol=0)),
        (shares.gather(shares.own(same)), same, dict(rtol=0, atol=0)),
        (shares.gather_all(shares.own(same)), whole.gather_all(same), dict(rtol=0, atol=0)),
        (shares.gather(shares.sum_all(y.clone())), whole.sum_all(y.clone()), exact),
    ]
    return sum(got.shape != want.shape or not torch.allclose(got, want, **how) for got, want, how in pairs)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    everywhere, compared = places(rank, world), 0
    for parallel in everywhere:
        tp, dp = parallel.attn_tp.size, parallel.attn_dp.size
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for counts in ((tp,) * dp, (37 * tp,) * dp, tuple(tp * (1 + 5 * g) for g in range(dp))):
                errors = wrong(parallel, counts, dtype)
                assert not errors, f"attn_tp {tp}, {dtype}, {counts}: {errors} of 4"
                compared += 4
    for name, mistake in ROW_MISTAKES.items():
        with pytest.MonkeyPatch.context() as patch:
            mistake(patch)
            noticed = torch.tensor(wrong(everywhere[-1], (5 * world,), torch.float32))
        dist.all_reduce(noticed)
        assert noticed, f"{name} was not found"
    if rank == 0:
        print(f"{compared} comparisons, {len(ROW_MISTAKES)} mistakes")


if __name__ == "__main__":
    main()

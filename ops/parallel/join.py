"""Joins the processes of a job and creates their rank groups; groups of the same ranks are created once and shared."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from umbra.ops.parallel.groups import Group, Parallel, Shard
from umbra.ops.parallel.partitions import ParallelSizes, partitions


def join(sizes: ParallelSizes, rank: int, timeout_s: int, backend: str, options: Callable[[str], Any]) -> Parallel:
    """Joins all ranks of the world, which call this together. -> this process's position in every split

    `backend` is a backend of torch.distributed; `options` returns the backend's options for a rank group, by its name.
    """
    if sizes.world == 1:
        return Parallel()
    # Nothing uses the default group: backends that make communicators at first use then have no buffers for it.
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    handles: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for name, members in partitions(sizes).items():  # every rank creates every group, in the same order
        for ids in members:
            if len(ids) > 1 and ids not in handles:
                handles[ids] = dist.new_group(list(ids), pg_options=options(name))
    return parallel_of(sizes, rank, handles)


def parallel_of(sizes: ParallelSizes, rank: int, handles: Mapping[tuple[int, ...], dist.ProcessGroup]) -> Parallel:
    """Returns the position of `rank` in every split. A group without an entry in `handles` has its size and rank, but
    cannot communicate: enough to count what a rank holds."""
    own = {}
    for name, members in partitions(sizes).items():
        ids = next(ids for ids in members if rank in ids)
        own[name] = Group(ids.index(rank), len(ids), handles.get(ids))
    return Parallel(
        **own,
        moe_tp=Shard(rank % sizes.moe_tp, sizes.moe_tp),
        moe_ep=Shard(rank // sizes.moe_tp, sizes.moe_ep),
        expert_slots=sizes.expert_slots,
    )

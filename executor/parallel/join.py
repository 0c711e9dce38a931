"""Joins the ranks and makes their groups; equal groups are made once and shared."""

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from errors import UserError
from executor.config.case import Case
from executor.config.env import RankEnv
from executor.parallel.groups import Group, Parallel, Shard
from executor.parallel.partitions import partitions
from executor.platform.base import Platform


def init_parallel(case: Case, ranks: RankEnv, platform: Platform) -> Parallel:
    """This rank's place in every split of the case."""
    if ranks.world_size != case.world_size:
        raise UserError(
            f"case {case.name}: world_size: {case.world_size}, but this process is one of {ranks.world_size}: "
            f"start all ranks with bash infer.sh {case.name}"
        )
    if case.world_size == 1:
        return Parallel()
    # The default group stays unused: HCCL then makes no communicator, and so no buffers, for it.
    dist.init_process_group(platform.collectives, timeout=timedelta(seconds=case.parallel_config.comm_timeout_s))
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for name, members in partitions(case).items():  # every rank makes every group, in the same order
        for ids in members:
            if len(ids) > 1 and ids not in made:
                made[ids] = dist.new_group(list(ids), pg_options=platform.group_options(name))
    return place_of(case, ranks.rank, made)


def place_of(case: Case, rank: int, handles: Mapping[tuple[int, ...], dist.ProcessGroup]) -> Parallel:
    """Where `rank` stands in every split; what is missing in `handles` it knows, but cannot talk to."""
    own = {}
    for name, members in partitions(case).items():
        ids = next(ids for ids in members if rank in ids)
        own[name] = Group(ids.index(rank), len(ids), handles.get(ids))
    moe_tp_size = case.parallel_config.moe_tp_size
    return Parallel(
        **own,
        moe_tp=Shard(rank % moe_tp_size, moe_tp_size),
        moe_ep=Shard(rank // moe_tp_size, case.world_size // moe_tp_size),
    )

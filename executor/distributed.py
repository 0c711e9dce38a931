"""Joins the ranks and makes their groups; equal groups are made once and shared."""

from datetime import timedelta

import torch.distributed as dist

from errors import UserError
from executor.config import Case
from executor.env import RankEnv
from executor.platform.base import Platform
from models.parallel import Group, Parallel, Shard


def init_parallel(case: Case, ranks: RankEnv, platform: Platform) -> Parallel:
    """This rank's place in every split of the case."""
    if ranks.world_size != case.world_size:
        raise UserError(
            f"case {case.name}: world_size: {case.world_size}, but this process is one of {ranks.world_size}: "
            f"start all ranks with bash infer.sh {case.name}"
        )
    if case.world_size == 1:
        return Parallel()
    sizes = case.parallel_config
    dist.init_process_group(
        platform.collectives,
        timeout=timedelta(seconds=sizes.comm_timeout_s),
        pg_options=platform.group_options("world"),
    )
    world, rank = case.world_size, ranks.rank
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group(name: str, members: list[list[int]]) -> Group:
        """`members`: a partition of the world. Every rank makes every group, in the same order."""
        own = Group()
        for ids in members:
            if len(ids) == 1:
                continue
            if tuple(ids) not in made:
                made[tuple(ids)] = dist.new_group(ids, pg_options=platform.group_options(name))
            if rank in ids:
                own = Group(ids.index(rank), len(ids), made[tuple(ids)])
        return own

    def neighbours(size: int) -> list[list[int]]:
        return [list(range(start, start + size)) for start in range(0, world, size)]

    attn_tp_size, moe_tp_size = sizes.attn_tp_size, sizes.moe_tp_size
    return Parallel(
        world=group("world", neighbours(world)),
        attn_tp=group("attn_tp", neighbours(attn_tp_size)),
        attn_dp=group("attn_dp", [list(range(first, world, attn_tp_size)) for first in range(attn_tp_size)]),
        moe_tp=Shard(rank % moe_tp_size, moe_tp_size),
        moe_ep=Shard(rank // moe_tp_size, world // moe_tp_size),
        embed_tp=group("embed_tp", neighbours(sizes.embed_tp_size)),
        lmhead_tp=group("lmhead_tp", neighbours(sizes.lmhead_tp_size)),
    )

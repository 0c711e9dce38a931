"""Joins the ranks of a case: each gets its position in every split."""

from umbra.base.errors import UserError
from umbra.executor.config.case import Case
from umbra.executor.config.env import RankEnv
from umbra.executor.platform.base import Platform
from umbra.ops.parallel.groups import Parallel
from umbra.ops.parallel.join import join


def init_parallel(case: Case, ranks: RankEnv, platform: Platform) -> Parallel:
    """Returns this rank's position in every split of the case, when all ranks have joined."""
    if ranks.world_size != case.world_size:
        raise UserError(
            f"case {case.name}: world_size: {case.world_size}, but this process is one of {ranks.world_size}: "
            f"start all ranks with bash infer.sh {case.name}"
        )
    timeout_s = case.parallel_config.comm_timeout_s
    return join(case.parallel_sizes, ranks.rank, timeout_s, platform.collectives, platform.group_options)

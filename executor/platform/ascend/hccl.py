"""What each HCCL group is made with: its buffer, and where its collectives run.

HCCL runs collectives on the vector cores (AIV) for one group of ranks at a time. The environment variable
HCCL_OP_EXPANSION_MODE=AIV, which switches it on, speaks to every group, so each group but that one is told otherwise.
"""

import itertools
from typing import TYPE_CHECKING

from errors import UserError
from executor.parallel.partitions import partitions

if TYPE_CHECKING:
    from executor.config.case import Case

HOST, AI_CPU, AIV = 1, 2, 3  # HcclCommConfig's hcclOpExpansionMode
A3 = "Ascend910_93"  # how the names of its dies begin


def group_options(case: "Case", name: str, soc: str) -> dict[str, int]:
    """`hccl_config` of torch_npu's ProcessGroupHCCL.Options for the group `name` on a device called `soc`."""
    elsewhere = AI_CPU if soc.startswith(A3) else HOST
    mode = AIV if uses_aiv(case) and case.hccl_config.aiv_group in shared_with(case, name) else elsewhere
    return {"hccl_buffer_size": buffer_mb(case, name), "hccl_op_expansion_mode": mode}


def uses_aiv(case: "Case") -> bool:
    """Whether any collective runs on the vector cores: a group of one rank has none."""
    chosen = case.hccl_config.aiv_group
    return chosen != "none" and len(partitions(case)[chosen][0]) > 1


def buffer_mb(case: "Case", name: str) -> int:
    return next((size for _, size in _own_sizes(case, name)), case.hccl_config.buffer_mb)


def check_buffers(case: "Case", where: str) -> None:
    """Groups of the same ranks are one group, so they cannot have buffers of different sizes."""
    for name, ranks in partitions(case).items():
        for (key, size), (other, other_size) in itertools.pairwise(_own_sizes(case, name)):
            if size != other_size:
                raise UserError(
                    f"{where}: hccl_config.{key}: {size} and hccl_config.{other}: {other_size}: both are the group "
                    f"of the same {len(ranks[0])} ranks: give them one size"
                )


def shared_with(case: "Case", name: str) -> list[str]:
    """The names of all groups with the same ranks, `name` among them."""
    ranks = partitions(case)
    return [other for other in ranks if ranks[other] == ranks[name]]


def _own_sizes(case: "Case", name: str) -> list[tuple[str, int]]:
    """(key, MB) of each size that the case gives to this group under one of its names."""
    keys = [f"{shared}_buffer_mb" for shared in shared_with(case, name)]
    return [(key, size) for key in keys if (size := getattr(case.hccl_config, key))]

"""The settings that each HCCL group is created with: its buffer, and where its collectives run.

HCCL runs collectives on the vector cores (AIV) for one group of ranks at a time. The environment variable
HCCL_OP_EXPANSION_MODE=AIV, which switches AIV on, applies to every group, so all groups but one name another mode.
"""

from umbra.executor.platform.ascend.settings import HcclSettings
from umbra.ops.parallel.partitions import ParallelSizes, names_sharing, partitions

HOST, AI_CPU, AIV = 1, 2, 3  # HcclCommConfig's hcclOpExpansionMode
A3 = "Ascend910_93"  # how the names of its dies begin


def group_options(hccl: HcclSettings, sizes: ParallelSizes, name: str, soc: str) -> dict[str, int]:
    """`hccl_config` of torch_npu's ProcessGroupHCCL.Options for the group `name` on a device called `soc`."""
    elsewhere = AI_CPU if soc.startswith(A3) else HOST
    mode = AIV if uses_aiv(hccl, sizes) and hccl.aiv_group in names_sharing(sizes, name) else elsewhere
    return {"hccl_buffer_size": buffer_mb(hccl, sizes, name), "hccl_op_expansion_mode": mode}


def uses_aiv(hccl: HcclSettings, sizes: ParallelSizes) -> bool:
    """Returns whether any collective runs on the vector cores. A group of one rank has none."""
    return hccl.aiv_group != "none" and len(partitions(sizes)[hccl.aiv_group][0]) > 1


def buffer_mb(hccl: HcclSettings, sizes: ParallelSizes, name: str) -> int:
    """Size of the buffer of the group `name`, which may be set under any name of a group of the same ranks."""
    return next((size for _, size in hccl.own_buffers(names_sharing(sizes, name))), hccl.buffer_mb)

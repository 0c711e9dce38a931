"""Which ranks stand together: every group of a case as plain rank numbers, before any communicator exists."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executor.config.case import Case

GROUPS = ("world", "attn_tp", "attn_dp", "embed_tp", "lmhead_tp")

Partition = tuple[tuple[int, ...], ...]


def partitions(case: "Case") -> dict[str, Partition]:
    """For each of GROUPS, in that order, the world split into its groups. Equal groups are made once and shared."""
    world, sizes = case.world_size, case.parallel_config

    def neighbours(size: int) -> Partition:
        return tuple(tuple(range(start, start + size)) for start in range(0, world, size))

    return {
        "world": neighbours(world),
        "attn_tp": neighbours(sizes.attn_tp_size),
        "attn_dp": tuple(tuple(range(first, world, sizes.attn_tp_size)) for first in range(sizes.attn_tp_size)),
        "embed_tp": neighbours(sizes.embed_tp_size),
        "lmhead_tp": neighbours(sizes.lmhead_tp_size),
    }

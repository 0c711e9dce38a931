"""Splits a world of ranks into rank groups, as plain rank numbers, before any communicator exists."""

from dataclasses import dataclass

GROUPS = ("world", "attn_tp", "attn_dp", "embed_tp", "lmhead_tp")

Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ParallelSizes:
    """The numbers of ranks that share one attention layer, one expert, the embedding table and the output head."""

    world: int = 1
    attn_tp: int = 1
    moe_tp: int = 1
    embed_tp: int = 1
    lmhead_tp: int = 1
    expert_slots: int = 0  # experts of a layer that a rank holds, with copies; 0: each expert is on one rank

    @property
    def attn_dp(self) -> int:
        """Number of data-parallel groups, each with its own sequences."""
        return self.world // self.attn_tp

    @property
    def moe_ep(self) -> int:
        """Number of parts that the experts are divided into."""
        return self.world // self.moe_tp

    def physical(self, experts: int) -> int:
        """Number of experts, with copies, that all ranks hold of a layer with `experts` experts."""
        return self.expert_slots * self.moe_ep or experts


def partitions(sizes: ParallelSizes) -> dict[str, Partition]:
    """The rank groups that the world is split into under each name of GROUPS, in that order."""

    def neighbours(size: int) -> Partition:
        return tuple(tuple(range(start, start + size)) for start in range(0, sizes.world, size))

    return {
        "world": neighbours(sizes.world),
        "attn_tp": neighbours(sizes.attn_tp),
        "attn_dp": tuple(tuple(range(first, sizes.world, sizes.attn_tp)) for first in range(sizes.attn_tp)),
        "embed_tp": neighbours(sizes.embed_tp),
        "lmhead_tp": neighbours(sizes.lmhead_tp),
    }


def names_sharing(sizes: ParallelSizes, name: str) -> list[str]:
    """The names of all splits whose rank groups are the same as those of `name`, itself included."""
    ranks = partitions(sizes)
    return [other for other in ranks if ranks[other] == ranks[name]]

"""A layer's view of a split over ranks: the shard that this rank holds, and the rank group that holds all shards."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# PyTorch 2.13 gave `all_gather_into_tensor` and `reduce_scatter_tensor` these names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `size` equal parts."""

    rank: int = 0
    size: int = 1

    def part(self, total: int) -> slice:
        """The range of this part in a dimension of `total` elements, which `size` must divide."""
        per_rank = total // self.size
        return slice(self.rank * per_rank, (self.rank + 1) * per_rank)

    def blocks(self, total: int, block: int) -> slice:
        """The range of this part in a dimension that is divided in whole blocks; the first parts may have one more."""
        per_rank, more = divmod(total // block, self.size)
        first = self.rank * per_rank + min(self.rank, more)
        return slice(first * block, (first + per_rank + (self.rank < more)) * block)

    def padded(self, total: int) -> int:
        """The least number from `total` on that can be divided into parts."""
        return -(-total // self.size) * self.size


@dataclass(frozen=True)
class Group(Shard):
    """The ranks that hold the shards of one layer or table. In a group of one rank every collective is the identity."""

    handle: dist.ProcessGroup | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums `x` over the group, in place, and returns it."""
        if self.size > 1:
            dist.all_reduce(x, group=self.handle)
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        """Puts the tensors (T, N / size) of all ranks side by side. -> (T, N)"""
        if self.size == 1:
            return x
        parts = self._gather(x)  # (size, T, N / size)
        return parts.movedim(0, 1).flatten(1)

    def gather_rows(self, x: Tensor, counts: tuple[int, ...] | None) -> Tensor:
        """Concatenates the rows of all ranks. -> (sum of counts, ...)

        Rank r contributes `counts[r]` rows; None means that all ranks have as many rows as this one.
        """
        if self.size == 1:
            return x
        if counts is None or min(counts) == max(counts):
            return self._gather(x).flatten(0, 1)
        padded = x.new_zeros(max(counts), *x.shape[1:])
        padded[: len(x)] = x
        parts = self._gather(padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def own_rows(self, x: Tensor, counts: tuple[int, ...] | None) -> Tensor:
        """The inverse of `gather_rows`: the rows of `x` that this rank contributed."""
        if self.size == 1:
            return x
        return x.split(len(x) // self.size if counts is None else list(counts))[self.rank]

    def sum_rows(self, x: Tensor, counts: tuple[int, ...] | None) -> Tensor:
        """The rows of the sum of `x` over the group that this rank contributes to `gather_rows`. A collective gives all
        ranks equally many rows, so ranks with fewer of them are padded."""
        if self.size == 1:
            return x
        if counts is None or min(counts) == max(counts):
            return self._sum_parts(x)
        padded = x.new_zeros(self.size, max(counts), *x.shape[1:])
        for part, rows in zip(padded, x.split(list(counts)), strict=True):
            part[: len(rows)] = rows
        return self._sum_parts(padded.flatten(0, 1))[: counts[self.rank]]

    def exchange_rows(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Sends the first sent[0] rows of `x` to rank 0 of the group, the next sent[1] to rank 1, and so on.
        -> the rows that came, of which the first received[0] are from rank 0, and so on"""
        came = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(came, x, received, sent, group=self.handle)
        return came

    def _sum_parts(self, x: Tensor) -> Tensor:
        part = x.new_empty(len(x) // self.size, *x.shape[1:])
        reduce_scatter_single(part, x.contiguous(), group=self.handle)
        return part

    def _gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size, *x.shape)
        all_gather_single(parts.flatten(0, 1), x.contiguous(), group=self.handle)
        return parts


@dataclass(frozen=True)
class Parallel:
    """One rank's position in every split. Consecutive ranks share an attention layer or an expert."""

    world: Group = Group()
    attn_tp: Group = Group()
    attn_dp: Group = Group()
    moe_tp: Shard = Shard()
    moe_ep: Shard = Shard()
    embed_tp: Group = Group()
    lmhead_tp: Group = Group()
    expert_slots: int = 0  # experts of a layer that this rank holds, with copies; 0: its part of moe_ep

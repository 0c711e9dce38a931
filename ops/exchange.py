"""The meaning of `Exchange` in plain PyTorch: rows go to the ranks of their experts and back by all-to-all."""

import torch
import torch.distributed as dist
from torch import Tensor

from umbra.ops.interface import ExpertMatrices, Ops, PhysicalExperts


class GroupExchange:
    """T rows on this rank, K experts for each of them. `group` None is the default group."""

    uneven = True

    def __init__(self, ops: Ops, group: dist.ProcessGroup | None = None):
        self.ops, self.group = ops, group

    def takes(self, rows: int, experts: ExpertMatrices) -> bool:
        return True

    def mixture(
        self, x: Tensor, weights: Tensor, ids: Tensor, experts: ExpertMatrices, physical: PhysicalExperts | None = None
    ) -> Tensor:
        tokens, top_k = ids.shape
        flat, ranks = (ids if physical is None else physical.of(ids)).flatten(), dist.get_world_size(self.group)
        order = flat.argsort(stable=True)  # (T K): by expert, and so by rank
        sent = torch.bincount(flat, minlength=ranks * experts.count).view(ranks, -1)  # rows for each expert
        received = torch.empty_like(sent)  # rows from each rank for each expert here
        dist.all_to_all_single(received, sent, group=self.group)
        if physical:
            physical.rows.add_(received.sum(0))
        there, here = sent.sum(1).tolist(), received.sum(1).tolist()
        rows = self._moved(x[order // top_k], there, here)
        local = torch.arange(experts.count).repeat(ranks).repeat_interleave(received.flatten())[:, None]
        y = self.ops.moe(rows, torch.ones(local.shape), local, experts, None)
        back = self._moved(y, here, there)[order.argsort()].unflatten(0, (tokens, top_k))
        return (back.float() * weights[..., None].float()).sum(1).to(x.dtype)

    def _moved(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        moved = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(moved, rows, received, sent, group=self.group)
        return moved

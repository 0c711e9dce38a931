"""Expert-parallel load balancing: places experts again while a job runs, by the rows that came to them, and moves their
weights between ranks.

After `interval` steps all ranks sum their counts, and each computes the same placements from them. Then one
layer after another moves, each after a step, so that no step waits for long. A rank sends rows to a new physical expert
only after the exchange of weights that it takes part in, and the rank that has it reads those rows in its next step,
when it has written the weights. Captured steps find weights and tables at the same addresses.
"""

import time
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from umbra.models.layers.base import layers_of
from umbra.models.layers.experts import Experts
from umbra.ops.interface import MovableExperts
from umbra.ops.parallel.groups import Group
from umbra.ops.parallel.placement import Counts, imbalance, moves, next_placement


@dataclass
class Rebalance:
    """The result of one interval. Imbalance: tokens of the busiest rank / of a rank on average, in the mean of all
    layers."""

    steps: int  # before it
    before: float  # imbalance in the interval
    after: float  # imbalance of the same tokens as they are placed now
    experts: int = 0  # moved, in all layers
    nbytes: int = 0  # of weights that came to this rank
    ms: float = 0.0  # that steps waited for it

    def __str__(self) -> str:
        return (
            f"experts placed again after {self.steps} steps: the busiest rank had {self.before:.2f} times the "
            f"mean and has {self.after:.2f} times now; {self.experts} experts moved in {self.ms:.0f} ms"
        )


class Rebalancing:
    """Every rank calls `end` after the same steps."""

    def __init__(self, model: nn.Module, world: Group, interval: int | None):
        """`interval`: steps between two placements; None: the first placement stays."""
        layers = [layer for _, layer in layers_of(model) if isinstance(layer, Experts)]
        self.layers = [(layer, layer.physical) for layer in layers if layer.physical]
        self.world, self.interval, self.steps = world, interval, 0
        self.due: list[tuple[Experts, Counts]] = []  # layers that are to be placed by these counts
        self.history: list[Rebalance] = []

    @torch.inference_mode()
    def end(self) -> None:
        """To be called after a step."""
        if self.interval is None:
            return
        self.steps += 1
        if self.steps % self.interval == 0 and not self.due:
            self._count()
        elif self.due:
            self._place(*self.due.pop(0))

    def report(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self.history]

    def _count(self) -> None:
        """Begins a placement by the rows that came since the last one."""
        rows = torch.stack([physical.rows for _, physical in self.layers])  # (layers, physical experts of this rank)
        counts = rows.new_zeros(len(self.layers), self.layers[0][0].experts)
        for own, one, (layer, physical) in zip(rows, counts, self.layers, strict=True):
            one[torch.from_numpy(layer.held[layer.here]).to(rows.device)] = own
            physical.rows.zero_()
        routed = self.world.all_reduce(counts).cpu().numpy()
        self.due = [(layer, one) for one, (layer, _) in zip(routed, self.layers, strict=True)]
        now = float(np.mean([imbalance(one, layer.held, self.world.size) for layer, one in self.due]))
        self.history.append(Rebalance(self.steps, now, now))

    def _place(self, layer: Experts, counts: Counts) -> None:
        start, ranks, one = time.perf_counter(), self.world.size, self.history[-1]
        held = next_placement(counts, ranks, layer.held)
        one.after -= (imbalance(counts, layer.held, ranks) - imbalance(counts, held, ranks)) / len(self.layers)
        if copies := moves(layer.held, held, ranks):
            one.experts += len(copies)
            one.nbytes += self._move(cast(MovableExperts, layer.weights), copies, len(held) // ranks)
            layer.route_to(held)
        one.ms += 1e3 * (time.perf_counter() - start)
        if not self.due and self.world.rank == 0:
            print(one)

    def _move(self, weights: MovableExperts, copies: list[tuple[int, int]], own: int) -> int:
        """Copies physical experts of all ranks, which have `own` each, to others. -> bytes that came to this rank"""
        rank, ranks = self.world.rank, self.world.size
        leaving = [(to // own, source % own) for source, to in copies if source // own == rank]
        coming = [(source // own, to % own) for source, to in copies if to // own == rank]
        coming.sort(key=lambda move: move[0])  # as they come: by rank, and of a rank in the order of numbers
        sent, received = (np.bincount([there for there, _ in m], minlength=ranks).tolist() for m in (leaving, coming))
        came = self.world.exchange_rows(weights.stored([number for _, number in leaving]), sent, received)
        if coming:
            weights.restore([number for _, number in coming], came)
        return came.nbytes

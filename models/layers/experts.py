"""The experts of a mixture-of-experts layer."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layers.base import ALL, Layer, Piece
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.router import Router
from umbra.ops.formats.quantised import Quantised, floats
from umbra.ops.formats.rows import Alternating, every_other
from umbra.ops.interface import SILU_EXPERTS, ExpertKind, ExpertMatrices, PhysicalExperts, Routed, Scores, fixed
from umbra.ops.parallel.placement import Placement, first_placement, physical_for

ALL_EXPERTS = "gate_up_proj", "down_proj"


class Experts(Layer):
    """All routed experts of one layer, split over `moe_ep` by expert and over `moe_tp` along the intermediate size.

    `forward` gathers the tokens of all data-parallel groups; one sum over all ranks is then over both splits.
    With `build.exchange`, steps that it takes send each row to the ranks of its experts instead.
    With `parallel.expert_slots`, `held` says which expert each physical one is; rows find them by `physical`.
    With `build.shadows` the experts may have shadows: `shadowed` then computes the mixture in place of `ops.moe`.
    Every token also takes the expert `shared`, where a model has one: its parts join the same sum.
    `names` are the checkpoint's names of an expert's gate, up and down matrices. Two `names` are those of tensors of
    all experts: of gates and ups, whose rows alternate, and of downs. Where the checkpoint has tensors of the names
    `ALL_EXPERTS` in place of three for each expert, the first has an expert's gate above its up. Each matrix has a bias
    if `kind` says so.
    """

    def __init__(
        self,
        build: Build,
        experts: int,
        hidden: int,
        intermediate: int,
        names: tuple[str, str, str] | tuple[str, str] = ("gate_proj", "up_proj", "down_proj"),
        kind: ExpertKind = SILU_EXPERTS,
    ):
        super().__init__()
        alternate, stacked = len(names) == 2, build.stored.holds(f"{build.path}.experts.{ALL_EXPERTS[0]}")
        names = ALL_EXPERTS if stacked and not alternate else names
        self.names, self.kind, self.alternate, self.fused = names, kind, alternate, len(names) == 2
        self.ops, self.parallel = build.ops, build.parallel
        self.experts, self.hidden, self.intermediate = experts, hidden, intermediate
        self.ep, per_rank = build.parallel.moe_ep, build.parallel.expert_slots
        self.physical: PhysicalExperts | None = None
        self.here = self.ep.part(
            per_rank * self.ep.size or experts
        )  # of the physical experts, or else the experts, of this rank
        self.held = np.arange(experts)
        if per_rank:
            table = torch.empty(experts, dtype=torch.int32, device=build.device)
            rows = torch.zeros(per_rank, dtype=torch.int64, device=build.device)
            self.physical = PhysicalExperts(fixed(table), fixed(rows))
            self.route_to(first_placement(experts, self.ep.size, per_rank))
        self.part = build.parallel.moe_tp.part(intermediate)
        count, inner = self.here.stop - self.here.start, self.part.stop - self.part.start
        self.first = self.here.start if self.ep.size > 1 else None
        prefixes = [""] if self.fused else [f"{expert}." for expert in range(experts)]
        wide, tall = ([at + name for at in prefixes for name in part] for part in (names[:-1], names[-1:]))
        columns = (hidden, 1), (intermediate, build.parallel.moe_tp.size)
        format = build.at("experts").expert_format(wide, tall, *columns)
        sizes = inner, hidden, format
        self.shadowed = build.shadows.experts(build.path, self.here, *sizes, kind) if build.shadows else None
        self.weights: ExpertMatrices = self.shadowed or build.ops.expert_matrices(count, *sizes, build.device, kind)
        self.exchange = None if self.shadowed else build.exchange
        # Of the ranks that share an expert, the first one adds its last bias to their sum.
        self.last_bias = kind.biased and build.parallel.moe_tp.rank == 0
        self.elements = count * (3 * inner * hidden + 2 * inner * kind.biased + hidden * self.last_bias)
        self.nbytes = self.weights.nbytes

    def route_to(self, held: Placement) -> None:
        """From the next step on, rows go where `held` has their experts. Begins a new count; moves no weights."""
        if self.physical is None:
            raise AssertionError("these experts have one place each")
        self.held = held
        self.physical.rows.zero_()
        self.physical.table.copy_(torch.from_numpy(physical_for(self.ep.rank, self.ep.size, held)))

    def forward(
        self, x: Tensor, routed: Routed, batch: Batch, shared: GatedMLP | None = None, shared_gate: Router | None = None
    ) -> Tensor:
        rows, exchange = batch.rows(self.parallel), self.exchange
        if exchange and (batch.even or exchange.uneven) and exchange.takes(len(x), self.weights):
            y = exchange.mixture(x, *chosen(routed), self.weights, self.physical)  # of its own tokens: no sum follows
            return shared.add_to(y, x, shared_gate) if shared else y
        everyone = rows.gather_all(x)
        if isinstance(routed, Scores) and not (self.shadowed or self.physical):
            y = routed.moe(everyone, rows.gather_all(routed.values), self.weights, self.first)
        else:
            weights, ids = chosen(routed)
            ids = self.physical.of(ids) if self.physical else ids
            weights, ids = rows.gather_all(weights), rows.gather_all(ids)
            if self.shadowed is None:
                y = self.ops.moe(everyone, weights, ids, self.weights, self.first)
            else:
                y = self.shadowed.mixture(everyone, weights, ids, self.first)
        if shared:
            shared.add_to(rows.of_group(y), rows.of_group(everyone), shared_gate)
        return rows.sum_all(y)

    def storages(self) -> Iterator[Tensor]:
        yield from self.weights.storages

    def pieces(self, path: str) -> Iterator[Piece]:
        numbers = {int(expert): number for number, expert in enumerate(self.held[self.here])}
        if self.fused:
            yield from self._fused_pieces(path, numbers)
            return
        wide, tall = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        for expert in range(self.experts):
            for which, module in zip(("gate", "up", "down"), self.names, strict=True):
                name = f"{path}.{expert}.{module}.weight"
                shape, part = (tall, (ALL, self.part)) if which == "down" else (wide, (self.part, ALL))
                if expert in numbers:
                    fill = partial(self.weights.fill, numbers[expert], which)
                    yield Piece(name, shape, part, fill, linear=True)
                else:
                    yield Piece(name, shape, linear=True)

    def _fused_pieces(self, path: str, numbers: dict[int, int]) -> Iterator[Piece]:
        """The pieces of tensors that hold all experts, one for each expert."""
        both, down = (f"{path}.{name}" for name in self.names)
        inner, hidden, experts = self.intermediate, self.hidden, self.experts
        pairs = slice(2 * self.part.start, 2 * self.part.stop)
        ups = slice(inner + self.part.start, inner + self.part.stop)

        def fill_of(which: str) -> Callable[[int, Tensor | Quantised], object]:
            return lambda number, part: self.weights.fill(number, which, of_one(part))

        def fill(number: int, part: Tensor | Quantised | Alternating) -> bool:
            halves = zip(("gate", "up"), halves_of(part), strict=True)
            return False not in [self.weights.fill(number, which, half) for which, half in halves]

        def fill_bias(number: int, part: Tensor | Alternating) -> None:
            for which, half in zip(("gate", "up"), halves_of(part), strict=True):
                self.weights.fill_bias(number, which, floats(half))

        def fill_last(number: int, part: Tensor) -> None:
            self.weights.fill_bias(number, "down", part[0])

        wide, tall = (experts, 2 * inner, hidden), (experts, hidden, inner)
        tensors: list[tuple[str, tuple[int, ...], tuple[slice, ...], Callable[[int, Any], object]]] = [
            (both, wide, (pairs, ALL), fill)
        ]
        if not self.alternate:
            tensors = [(both, wide, (self.part, ALL), fill_of("gate")), (both, wide, (ups, ALL), fill_of("up"))]
        tensors.append((down, tall, (ALL, self.part), fill_of("down")))
        if self.kind.biased:
            tensors += [
                (f"{both}_bias", (experts, 2 * inner), (pairs,), fill_bias),
                (f"{down}_bias", (experts, hidden), (ALL,), fill_last),
            ]
        for expert in range(experts):
            for name, shape, part, fill_one in tensors:
                linear = len(shape) == 3
                if expert in numbers and (fill_one is not fill_last or self.last_bias):
                    cut, write = (slice(expert, expert + 1), *part), partial(fill_one, numbers[expert])
                    yield Piece(name, shape, cut, write, linear=linear, by_input=linear and self.alternate)
                else:
                    yield Piece(name, shape, linear=linear, by_input=linear and self.alternate)


def halves_of(part: Tensor | Quantised | Alternating) -> tuple[Tensor | Quantised, Tensor | Quantised]:
    """The gates and ups of an expert that were read as (1, m, ...)."""
    if isinstance(part, Alternating):
        return of_one(part.even), of_one(part.odd)
    return every_other(of_one(part))


def of_one(part: Tensor | Quantised) -> Tensor | Quantised:
    """The matrix (m, K) of an expert that was read as (1, m, K), or as (m, K) if it is quantised."""
    return part if isinstance(part, Quantised) else part[0]


def chosen(routed: Routed) -> tuple[Tensor, Tensor]:
    """Weights and ids of the experts of each token."""
    return routed.choose(routed.values) if isinstance(routed, Scores) else routed

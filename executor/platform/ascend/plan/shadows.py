"""Shadow experts of an Ascend case on meta: what a step makes on the device for them, as shadow_device.py does."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import cast

import torch
from torch import Tensor

from umbra.cpu_offload.expert_ring import group_count, group_size
from umbra.cpu_offload.manager import layer_number
from umbra.executor.config.case import Case
from umbra.executor.plan.activations import PlanLine, product
from umbra.ops.ascend.counted import AscendCosts
from umbra.ops.ascend.vector_core.blocks import PLACE, BlockLayout, parts_of
from umbra.ops.ascend.weights import unfit
from umbra.ops.counted import CountedOps
from umbra.ops.formats import Format
from umbra.ops.interface import ExpertKind


@dataclass
class CountedBank:
    """Experts that were gathered from their slots."""

    count: int
    inner: int
    kind: ExpertKind
    storages: list[Tensor]


class CountedShadow:
    """The experts of one layer, none of which has memory outside the arena."""

    def __init__(
        self, shadows: "CountedShadows", count: int, inner: int, hidden: int, format: Format, kind: ExpertKind
    ):
        self.shadows, self.count, self.inner, self.format, self.kind = shadows, count, inner, format, kind
        ops, in_planes = shadows.ops, not unfit(format, hidden, inner, kind)
        self.layout = BlockLayout.of(inner, hidden, format, ops.dtype, in_planes, kind.biased)
        self.parts = [part.stop - part.start for part in parts_of(count, self.layout.block_bytes)]
        self.per_group = group_size(self.layout.block_bytes, count)
        self.storages: list[Tensor] = []
        self.nbytes = 0

    def fill(self, expert: int, which: str, part: object) -> None:
        raise NotImplementedError("a counted expert has no weights")

    fill_bias = fill

    def by_pair(self, pairs: int) -> bool:
        return 2 <= pairs < self.count and pairs <= max(self.parts)

    def mixture(self, x: Tensor, weights: Tensor, ids: Tensor, first_expert: int | None) -> Tensor:
        ops = self.shadows.ops
        if len(x) > self.shadows.most:
            return self._long(x, ids)
        sums, here = ops.new("sums of the CPU", x, *x.shape), ops.new("who is resident", ids, self.count)
        by_pair = self.by_pair(ids.numel())
        whole = by_pair or len(self.parts) == 1
        of_parts = (
            ops.moe(x, weights, ids, self.bank(x, count), first_expert if whole else 0)
            for count in ([ids.numel()] if by_pair else self.parts)
        )
        total = reduce(lambda total, of_part: ops.new("sums of parts", x, *x.shape), of_parts)
        del total, here, sums
        return ops.new("sums of both", x, *x.shape)

    def _long(self, x: Tensor, ids: Tensor) -> Tensor:
        """As long_steps.py. All rows may be those of one group."""
        ops, costs, shape = self.shadows.ops, self.shadows.costs, (*ids.shape, x.shape[1])
        _numbers = ops.new("places of rows", ids, 2, *ids.shape)
        rows, out = (ops.new(f"rows {which} experts", x, *shape) for which in ("for", "from"))
        bank = self.bank(x, self.per_group)
        ordered = ops.new("rows in the order of planes", rows, *shape) if self.layout.in_planes else rows
        _made = costs.products(ordered, bank)
        del bank, rows, ordered, _made
        if costs.routing == "tp":
            out = costs.weighted(out, out)
        return ops.new("sums over experts", out, *x.shape)

    def bank(self, x: Tensor, count: int) -> CountedBank:
        """As `ArenaSlots.bank` makes it."""
        new, rows = self.shadows.ops.new, count * self.layout.block_bytes // PLACE
        blocks = new("blocks of a bank's rows", x, rows, dtype=torch.int32)
        index = new("rows of a bank", blocks, rows)
        del blocks
        dtype = torch.int8 if self.layout.int8 else torch.uint8
        bank = new("experts out of their slots", index, rows * PLACE, dtype=dtype)
        del index
        planes = self.layout.planes.values()
        cut = [
            new("planes, cut", x, count, *shape, dtype=dtype)
            for shape, dtype in planes
            if prod(shape) * dtype.itemsize % PLACE
        ]
        return CountedBank(count, self.inner, self.kind, [bank, *cut])


class CountedShadows:
    """Takes the place of `ShadowExperts` while a model is built on meta."""

    def __init__(self, case: Case, ops: CountedOps, top_k: int):
        offload, self.groups, self.longest = case.offload_config, case.attn_dp_size, case.prefill_tokens
        self.ops, self.costs = ops, cast(AscendCosts, ops.costs)
        self.start_layer, self.top_k = offload.start_layer, top_k
        stream = offload.stream_tokens
        # The most tokens of a step whose experts are not streamed.
        self.most = sys.maxsize if stream == 0 else max(case.decode_rows, (stream or 0) - 1)
        self.layers: list[CountedShadow] = []

    def experts(
        self, path: str, here: slice, inner: int, hidden: int, format: Format, kind: ExpertKind
    ) -> CountedShadow | None:
        if layer_number(path) < self.start_layer:
            return None
        self.layers.append(CountedShadow(self, here.stop - here.start, inner, hidden, format, kind))
        return self.layers[-1]

    @property
    def nbytes(self) -> int:
        """The bytes of all experts, as slots have them."""
        return sum(layer.count * layer.layout.block_bytes for layer in self.layers)

    def _pairs(self, rows: Sequence[int]) -> list[int]:
        return [self.groups * tokens * self.top_k for tokens in rows]

    def banks(self, rows: Sequence[int]) -> set[int]:
        """The experts of banks that are gathered, if decode steps have `rows` tokens of each data-parallel group."""
        first, pairs, banks = self.layers[0], self._pairs(rows), set[int]()
        for wanted in pairs:
            banks |= {wanted} if first.by_pair(wanted) else {*first.parts}
        return banks | ({first.per_group} if self.most < sys.maxsize else set())

    def tables(self, rows: Sequence[int]) -> list[PlanLine]:
        """Returns the memory that steps read beside the arena: tables, and experts that long steps copy."""
        first, block_rows = self.layers[0], self.layers[0].layout.block_bytes // PLACE
        parts = [
            product("first rows of experts", layers=len(self.layers), experts=first.count, B=4),
            product("rows of banks", tables=2, rows=sum(self.banks(rows)) * block_rows, B=4),
            product("pairs of tokens and experts", pairs=sum(self._pairs(rows)), B=4),
        ]
        if self.most < sys.maxsize:
            size = sum(prod(shape) * dtype.itemsize for shape, dtype in first.layout.planes.values())
            groups = group_count(self.longest, first.layout.block_bytes, first.count)
            parts.append(product("experts copied for prompts", groups=groups, experts=first.per_group, B=size))
        return parts

"""The ops without a device: a model that runs on them, on PyTorch's meta device, shows what a step takes.

*Work*, on any platform: kernels, bytes and products of each op, from its spec (specs.py), as `Notes` has them.

*Memory*, as a device's ops use it: its `OpCosts` makes the outputs and temporaries of each op as tensors on meta, with
the shapes, types and lifetimes that they have on the device. Where it has none for an op, the op makes its result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from umbra.ops.interface import PhysicalExperts, RoundingNorm
from umbra.ops.specs import SPECS, Spec, Work, applied, in_int8, mixture

# Kernels of a mixture whose rows are exchanged: dispatch, the experts' three (two by int8), a cast, combine; and a
# look-up and a count where experts are copied among physical ones.
EXCHANGED, AMONG_PHYSICAL = 6, 2


@dataclass(frozen=True)
class Done:
    """The work of one op of a step on a rank, done `times` times in a step."""

    name: str
    times: int
    kernels: int
    weights: float = 0.0  # this and the next as in specs.Work
    cached: float = 0.0
    rows: float = 0.0  # bytes of activations that it reads and writes
    macs: float = 0.0
    mixture: bool = False
    plain: bool = True
    few: bool = True  # whether the device's kernels for few rows by 4-bit weights compute it


@dataclass(frozen=True)
class Collective:
    """A collective of a step, `times` times in a step."""

    kind: str  # all_reduce, all_gather, reduce_scatter, dispatch or combine
    group: str  # name of the rank group
    ranks: int
    nbytes: int  # of this rank's input
    times: int


class Notes:
    """The work that a step asked its ops for, each `multiple` times."""

    def __init__(self) -> None:
        self.done: list[Done] = []
        self.messages: list[Collective] = []
        self.multiple = 1


class OpCosts:
    """The costs of a device's ops beyond their specs: here none, each op being one kernel that makes its result. A
    method of an op's name, with its parameters, makes the op's tensors and returns its result."""

    def __init__(self, ops: "CountedOps"):
        self.ops = ops

    def kernels(self, work: Work) -> int:
        """Returns the number of kernels that compute `work`."""
        return 1

    def few(self, bank: Any) -> bool:
        """Returns whether there are kernels for few rows that multiply by these matrices, if they have 4 bits."""
        return True

    def rounding_norm(self, reader: Any) -> RoundingNorm | None:
        return None

    def exchange(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Any, exchange: "CountedExchange") -> Tensor:
        """Makes the tensors of a mixture whose rows are exchanged."""
        return x.new_empty(x.shape)


class CountedOps:
    """`layout` stores weights and caches, of pages of `page_size` tokens, as the platform does; activations are of
    `dtype`. `experts` is the number of a layer's experts on all ranks, with copies. `name(tensor, what)` is called for
    every tensor that `costs` makes."""

    def __init__(
        self,
        layout: Any,
        dtype: torch.dtype,
        page_size: int,
        experts: int,
        costs: Callable[["CountedOps"], OpCosts] = OpCosts,
        name: Callable[[Tensor, str], object] | None = None,
    ):
        self.layout, self.dtype, self.page_size, self.experts = layout, dtype, page_size, experts
        self.name, self.notes, self.costs = name, Notes(), costs(self)

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, SPECS[name]) if name in SPECS else getattr(self.layout, name)

    def new(self, what: str, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a tensor that is `what`, of `dtype` or the type of `like`."""
        tensor = like.new_empty(shape, dtype=dtype or like.dtype)
        if self.name:
            self.name(tensor, what)
        return tensor

    def note(self, work: Work, kernels: int | None = None) -> None:
        """Notes an op; `kernels`: if not as many as the device has for it."""
        kernels = self.costs.kernels(work) if kernels is None else kernels
        few = work.bank is None or self.costs.few(work.bank)
        sizes = work.weights, work.cached, work.values * self.dtype.itemsize, work.macs, work.mixture, work.plain
        self.notes.done.append(Done(work.label, self.notes.multiple, kernels, *sizes, few))

    def rounding_norm(self, reader: Any) -> RoundingNorm | None:
        return self.costs.rounding_norm(reader)

    def argmax(self, x: Tensor) -> Tensor:
        return self.new("argmax", x, len(x), dtype=torch.int64)

    def _call(self, spec: Spec, *given: Any, **named: Any) -> Any:
        operands = spec.bound(*given, **named)
        make = getattr(self.costs, spec.name, None)
        facts = operands | dict(dtype=self.dtype, page_size=self.page_size, everyone=self.experts)
        facts["out"] = out = make(**operands) if make else applied(spec.result, facts)
        for work in spec.work(facts):
            self.note(work)
        return out


class CountedExchange:
    """An exchange over `size` ranks of steps of at most `most_rows` rows, in which all ranks have as many."""

    uneven = False

    def __init__(self, ops: CountedOps, size: int, most_rows: int):
        self.ops, self.size, self.most_rows = ops, size, most_rows

    def takes(self, rows: int, experts: object) -> bool:
        return 0 < rows <= self.most_rows

    def mixture(
        self, x: Tensor, weights: Tensor, ids: Tensor, experts: Any, physical: PhysicalExperts | None = None
    ) -> Tensor:
        notes, top_k, sent = self.ops.notes, ids.shape[1], torch.int8 if in_int8(experts) else x.dtype
        for kind, dtype in (("dispatch", sent), ("combine", x.dtype)):
            nbytes = top_k * x.numel() * dtype.itemsize
            notes.messages.append(Collective(kind, "world", self.size, nbytes, notes.multiple))
        kernels = EXCHANGED + (AMONG_PHYSICAL if physical else 0) - in_int8(experts)
        work = mixture("exchanged moe", (self.size * len(x), x.shape[1], top_k), experts, self.ops.experts)
        self.ops.note(work, kernels)
        _physical = self.ops.new("physical experts", ids, *ids.shape) if physical else None
        return self.ops.costs.exchange(x, weights, ids, experts, self)

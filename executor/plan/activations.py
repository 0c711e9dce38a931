"""Counts the memory of a step's tensors by running the model on PyTorch's meta device. Tensors there have shapes but no
memory, so every tensor that the model's code makes and holds is counted while nothing is allocated.
"""

import dataclasses
import re
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from umbra.models.batch import Batch, Subset
from umbra.models.causal_lm import CausalLM
from umbra.models.eagle3_config import TAPS
from umbra.models.layers.base import layers_of
from umbra.ops.interface import Ops, Paged, Recurrent
from umbra.ops.parallel.groups import Group, Parallel


@dataclass(frozen=True)
class PlanLine:
    """One line of a memory plan: what takes memory, and how much. `how` is the arithmetic behind `nbytes`."""

    name: str
    nbytes: int
    how: str = ""


def product(name: str, **factors: int) -> PlanLine:
    """A part whose bytes are the product of `factors`, which are printed by their names."""
    how = " x ".join(f"{value:,} {factor.replace('_', ' ')}" for factor, value in factors.items())
    return PlanLine(name, prod(factors.values()), how)


@dataclass(frozen=True)
class CountedGroup(Group):
    """A rank group of which only this rank runs: collectives allocate their outputs and exchange nothing."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def _gather(self, x: Tensor) -> Tensor:
        return x.new_empty(self.size, *x.shape)

    def _sum_parts(self, x: Tensor) -> Tensor:
        return x.new_empty(len(x) // self.size, *x.shape[1:])


def counted(parallel: Parallel) -> Parallel:
    """This rank's position in the same splits, for a process that runs without the other ranks."""
    groups = {field.name: getattr(parallel, field.name) for field in dataclasses.fields(parallel)}
    mine: dict[str, Any] = {n: CountedGroup(g.rank, g.size) for n, g in groups.items() if isinstance(g, Group)}
    return dataclasses.replace(parallel, **mine)


@dataclass
class AllocatedTensor:
    """A tensor with memory of its own, and the module and op that made it."""

    module: str  # path of the innermost module that was running
    what: str  # the tensor's meaning, if an op of Umbra made it, or the name of the PyTorch op that made it
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int

    @property
    def name(self) -> str:
        """`module: what`, with only the module's path inside its layer, so that names are the same in all layers."""
        inner = re.sub(r".*\.\d+(\.|$)", "", self.module)
        return f"{inner or 'a layer'}: {self.what}"


@dataclass(frozen=True)
class Moment:
    """A moment of a step: the name of the tensor made last, and all tensors alive then."""

    name: str
    parts: list[PlanLine]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Ledger(TorchDispatchMode):
    """While active, records the memory of every tensor that is made, from its allocation until the last tensor that
    shares it is gone. Views and results written in place have no memory of their own."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch imports its compiler at the first op, which takes seconds

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._modules: list[str] = []
        self._live: dict[int, AllocatedTensor] = {}
        self._total = self._most = 0
        self._fullest: list[AllocatedTensor] = []

    def note(self, tensor: Tensor, what: str) -> None:
        """Records `what` as the meaning of `tensor`, which was just made."""
        if allocated := self._live.get(tensor.untyped_storage()._cdata):
            allocated.what = what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._add(tensor, func.overloadpacket.__name__)
        return result

    def _add(self, tensor: Tensor, what: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._live:
            return
        path = self._modules[-1] if self._modules else ""
        allocated = AllocatedTensor(path, what, tuple(tensor.shape), tensor.itemsize, storage.nbytes())
        self._live[storage._cdata] = allocated
        self._total += allocated.nbytes
        weakref.finalize(storage, self._end, storage._cdata).atexit = False
        if self._total > self._most:
            self._most, self._fullest = self._total, list(self._live.values())

    def _end(self, key: int) -> None:
        self._total -= self._live.pop(key).nbytes

    def fullest(self, model: nn.Module, step: Callable[[Batch], object], batch: Batch) -> Moment:
        """Runs `step`, a method of `model`, which is on meta. -> the moment at which the live tensors take the most
        memory, without those of `model` and `batch`"""
        self._most, self._fullest = 0, []
        with self._paths_of(model), self, torch.inference_mode():
            step(batch)
        return Moment(self._fullest[-1].name, parts_of(self._fullest))

    @contextmanager
    def _paths_of(self, model: nn.Module) -> Iterator[None]:
        """Keeps `_modules` up to date while a step runs."""

        def leave(*_: object) -> None:
            self._modules.pop()

        hooks = []
        for path, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, path=path: self._modules.append(path)))
            hooks.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def shorten(model: CausalLM) -> None:
    """Removes layers of `model` that repeat others, so that a step runs sooner with the same fullest moment. Two of
    each kind in an nn.ModuleList stay: the second runs with the outputs of a layer before it, the first may not. Where
    a head reads hidden states of layers, the first ones are read, and one layer more stays."""
    kept_of_kind = 2
    if head := model.eagle3:
        kept_of_kind = TAPS + 1
        head.config = dataclasses.replace(head.config, taps=tuple(range(1, TAPS + 1)))
    for module in list(model.modules()):
        for name, layers in module.named_children():
            if isinstance(layers, nn.ModuleList):
                seen: Counter[object] = Counter()
                kept = nn.ModuleList()
                for number, layer in layers.named_children():
                    seen[kind := _kind_of(layer)] += 1
                    if seen[kind] <= kept_of_kind:
                        kept.add_module(number, layer)
                setattr(module, name, kept)


def _kind_of(module: nn.Module) -> object:
    """A value that is equal for modules of the same classes with weights of the same shapes."""
    shapes = [(path, *(tuple(t.shape) for t in layer.storages())) for path, layer in layers_of(module)]
    return tuple(shapes), tuple(type(child) for child in module.modules())


def parts_of(tensors: Sequence[AllocatedTensor]) -> list[PlanLine]:
    """A part for each name, with the arithmetic of the shapes of all tensors that have it."""
    parts: dict[str, list[AllocatedTensor]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.name, []).append(tensor)
    return [PlanLine(name, sum(tensor.nbytes for tensor in group), _arithmetic(group)) for name, group in parts.items()]


def _arithmetic(group: Sequence[AllocatedTensor]) -> str:
    shapes = Counter((*tensor.shape, tensor.itemsize) for tensor in group)
    terms = []
    for (*shape, itemsize), count in shapes.items():
        factors = [f"{count} tensors"] * (count > 1) + [f"{size:,}" for size in shape] + [f"{itemsize} B"]
        terms.append(" x ".join(factors))
    return " + ".join(terms)


def sampling(vocabulary: int, sequences: int, itemsize: int) -> Moment:
    """The tensors alive while tokens are chosen after a prefill: the model's logits, those rows that belong to finished
    prompts, and these rows in float32."""
    rows = dict(sequences=sequences, columns=vocabulary)
    logits, floats = product("logits", copies=2, **rows, B=itemsize), product("float32", **rows, B=4)
    return Moment("the choice of tokens", [logits, floats])


def batch_of(
    ops: Ops,
    tokens: int,
    sequences: int,
    table_width: int,
    page_size: int,
    groups: int | None,
    sets: int = 1,
    stateful: int = 0,
    expanded: bool = False,
) -> Batch:
    """A step's batch on meta: `tokens` new tokens of `sequences` sequences with block tables of `table_width` pages for
    each of `sets` sets of layers, and `stateful` layers with states; `expanded`: of prompts whose latents are.
    If `groups` is given, the batch says, as for a prefill, that each of `groups` data-parallel groups has `tokens`
    tokens; None: it says nothing, as in a graph."""
    one = array("q", [1])
    slot_mapping, tables, *_ = ops.paging(one, torch.zeros(1, table_width, dtype=torch.int64), one, one, page_size)
    number = partial(torch.empty, dtype=torch.int64, device="meta")
    length = tokens // sequences
    places = (torch.empty(stateful, sequences, dtype=torch.int32, device="meta") for _ in Recurrent._fields[1:])
    paged = tuple(
        Paged(
            torch.empty(tokens, *slot_mapping.shape[1:], dtype=slot_mapping.dtype, device="meta"),
            torch.empty(sequences, *tables.shape[1:], dtype=tables.dtype, device="meta"),
            tuple(range(0, length * sequences + 1, length)),
            (length,) * sequences,
        )
        for _ in range(sets)
    )
    return Batch(
        token_ids=number(tokens),
        positions=number(tokens),
        paged=paged,
        logit_rows=number(sequences),
        tokens_per_group=None if groups is None else (tokens,) * groups,
        recurrent=Recurrent(number(sequences + 1), *places) if stateful else None,
        expanded=Subset(number(tokens), paged) if expanded else None,
    )

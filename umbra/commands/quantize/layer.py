"""A decoder layer of the real model on ops/reference, for calibration: each of its two blocks, attention and MLP, can
be computed with other weights, and what its matrices multiply is seen.

Shapes: B windows of L tokens, hidden size H. Names of tensors are those of the checkpoint without `model.layers.N.`.
Routed experts are not held in memory: each is read when it is used.
"""

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from umbra.commands.quantize.source import PLAIN, CheckpointSource
from umbra.commands.quantize.workers import ParallelMap
from umbra.models.batch import Batch
from umbra.models.build import Build, Formats, StoredModules
from umbra.models.layers.attention import PagedCache
from umbra.models.layers.base import Piece, layers_of
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.experts import Experts
from umbra.models.layers.rotary import rotary_angles
from umbra.models.layers.states import LayerStates
from umbra.models.registry import model_class
from umbra.ops import reference
from umbra.ops.formats import Format
from umbra.ops.interface import ExpertKind, Ops, Paged, Recurrent, fixed
from umbra.ops.parallel.groups import Parallel

Weights = Callable[[str], Tensor]  # maps a tensor's name to its values in float32
PARTS = ("gate_proj", "up_proj", "down_proj")  # names of an expert's matrices where one tensor has those of all


@dataclass(frozen=True)
class OneLayer(Build):
    """A Build that gives memory to the modules of the layer at the path `layer` alone."""

    layer: str = ""

    def at(self, name: str) -> Build:
        child = super().at(name)
        device = "cpu" if f"{child.path}.".startswith(f"{self.layer}.") else "meta"
        return dataclasses.replace(child, device=torch.device(device))


@dataclass(frozen=True)
class Routing:
    weights: Tensor  # (tokens, k)
    ids: Tensor  # (tokens, k)

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Returns the rows of the tokens that are routed to the expert, and its weight for each of them."""
        rows, columns = (self.ids == expert).nonzero(as_tuple=True)
        return rows, self.weights[rows, columns, None]


@dataclass
class Seen:
    """The ops of a block in one window."""

    inputs: dict[int, Tensor] = field(default_factory=dict)  # what each matrix multiplies, by the matrix's identity
    normed: list[tuple[Tensor, int]] = field(default_factory=list)  # each norm's result and the identity of its weight
    routing: Routing | None = None
    gate: Tensor | None = None  # (rows, 1), of a shared expert

    def norm_of(self, x: Tensor) -> int | None:
        return next((weight for out, weight in self.normed if out.data_ptr() == x.data_ptr()), None)


class WatchedOps:
    """ops/reference, noting in `seen` of the calling thread, if it is set, what the module says of `Seen`."""

    def __init__(self) -> None:
        self.thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    @property
    def seen(self) -> Seen:
        seen: Seen = self.thread.seen
        return seen

    def linear(self, x: Tensor, weight: reference.DenseMatrix, bias: Tensor | None) -> Tensor:
        self.seen.inputs[id(weight)] = x
        return reference.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        out = reference.rms_norm(x, weight, eps, bias)
        self.seen.normed.append((out, id(weight)))
        return out

    def add_gated(self, x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
        self.seen.gate = gate
        return reference.add_gated(x, y, gate)


@dataclass
class UnreadExperts:
    """Experts without memory, whose mixture is zeros: it notes the routing, for `CalibratedLayer.mixtures`. As
    `Build.shadows` it makes those of a layer."""

    ops: WatchedOps
    count: int = 0
    nbytes = 0

    @property
    def storages(self) -> list[Tensor]:
        return []

    def experts(
        self, path: str, here: slice, inner: int, hidden: int, format: Format, kind: ExpertKind
    ) -> "UnreadExperts":
        return UnreadExperts(self.ops, here.stop - here.start)

    def fill(self, expert: int, which: str, part: object) -> None:
        raise AssertionError("these experts are not held")

    def fill_bias(self, expert: int, which: str, part: Tensor) -> None:
        raise AssertionError("these experts are not held")

    def mixture(self, x: Tensor, weights: Tensor, ids: Tensor, first_expert: int | None) -> Tensor:
        self.ops.seen.routing = Routing(weights, ids)
        return torch.zeros_like(x)


@dataclass(frozen=True)
class Product:
    """Matrices with the same input, over the rows of all windows."""

    names: tuple[str, ...]
    x: Tensor  # (tokens, in)
    norm: str | None  # the norm's weight that makes the input, if a norm does


@dataclass(frozen=True)
class Watched:
    """A block with its exact weights."""

    out: Tensor  # (B, L, H)
    norm: str  # the weight of the norm before it
    products: list[Product]
    routing: Routing | None
    gate: Tensor | None  # (tokens, 1), of a shared expert


class CalibratedLayer:
    """Layer `index` of the source's parts for `windows` windows of `length` tokens."""

    def __init__(
        self, source: CheckpointSource, index: int, windows: int, length: int, parallel_map: ParallelMap = map
    ):
        self.parallel_map, self.config, self.ops, path = parallel_map, source.config, WatchedOps(), source.parts[index]
        build = OneLayer(
            cast(Ops, self.ops),
            Parallel(),
            Formats(PLAIN, PLAIN, PLAIN),
            torch.float32,
            torch.device("meta"),
            max_positions=1,
            stored=StoredModules(holds=source.scheme.holds),
            shadows=UnreadExperts(self.ops),
            layer=path,
        )
        model = model_class(source.name)(source.whole_config, build)
        self.layer = cast(DecoderLayer, model.get_submodule(path))
        self.attention: nn.Module = getattr(self.layer, self.layer.attention_name)
        self.mlp: nn.Module = getattr(self.layer, self.layer.mlp_name)
        self.angles = rotary_angles(source.config.rope, source.config.head_dim, length)
        self.pieces: dict[str, list[Piece]] = {}
        self.names: dict[int, tuple[str, ...]] = {}  # the tensors that a weight holds, by the weight's identity
        self.experts: dict[int, tuple[str, str, str]] = {}  # names of each routed expert's gate, up and down
        for at, layer in layers_of(self.layer):
            if isinstance(layer, Experts):
                parts = layer.names if len(layer.names) == 3 else PARTS
                gate, up, down = ([f"{at}.{e}.{part}.weight" for e in range(layer.experts)] for part in parts)
                self.experts, self.kind = dict(enumerate(zip(gate, up, down, strict=True))), layer.kind
                continue
            for piece in layer.pieces(at):
                self.pieces.setdefault(piece.name, []).append(piece)
            names = dict.fromkeys(piece.name for piece in layer.pieces(at) if piece.name.endswith(".weight"))
            self.names[id(getattr(layer, "weight", None))] = tuple(names)
        self._bind(windows, length)

    def _bind(self, windows: int, length: int) -> None:
        """Gives each window a page of every cache, and no state before or after it."""
        for module in self.layer.modules():
            if isinstance(module, PagedCache):
                sizes = windows, length, torch.float32, torch.device("cpu")
                module.bind(*(fixed(module.new_cache(part, *sizes)) for part in range(module.tensors)))
            elif isinstance(module, LayerStates):
                module.bind(0, *(fixed(torch.empty(1, *shape)) for shape in module.shapes))
        none, starts = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, length])
        states = Recurrent(starts, none - 1, none - 1, none, none, none)
        rows, ids = torch.arange(length), torch.zeros(length, dtype=torch.int64)
        self.batches = [
            Batch(
                ids,
                rows,
                (Paged(rows + window * length, torch.tensor([[window]]), starts, torch.tensor([length])),),
                None,
                None,
                recurrent=states,
            )
            for window in range(windows)
        ]

    def fill(self, weights: Weights, names: Collection[str] | None = None) -> None:
        """Writes the weights, or those of `names`, that are held here."""
        for name in self.pieces if names is None else self.pieces.keys() & set(names):
            value = weights(name)
            for piece in self.pieces[name]:
                if piece.fill:
                    piece.fill(value[piece.part])

    def normed(self, norm: str, x: Tensor) -> Tensor:
        self.ops.thread.seen = Seen()
        out: Tensor = getattr(self.layer, norm)(x)
        return out

    def _run(self, block: nn.Module, x: Tensor) -> Iterator[tuple[Tensor, Seen]]:
        """The output (L, H) of each window of x (B, L, H), without routed experts, and what was seen."""

        def window(number: int) -> tuple[Tensor, Seen]:
            self.ops.thread.seen = seen = Seen()
            angles = self.angles if block is self.attention else ()
            return block(x[number], *angles, self.batches[number]), seen

        return self.parallel_map(window, range(len(x)))

    def watch(self, block: nn.Module, x: Tensor, weights: Weights) -> Watched:
        """The block of x (B, L, H), which the norm before it has made."""
        outs, seen = zip(*self._run(block, x), strict=True)
        own = "input_layernorm.weight" if block is self.attention else "post_attention_layernorm.weight"
        together: dict[int, list[int]] = {}  # matrices by the address of their input
        for matrix, rows in seen[0].inputs.items():
            together.setdefault(rows.data_ptr(), []).append(matrix)
        products = []
        for address, matrices in together.items():
            names, norm = [name for matrix in matrices for name in self.names[matrix]], None
            if address == x[0].data_ptr():
                norm = own
                names += [name for expert in self.experts.values() for name in expert[:2] if seen[0].routing]
            elif scale := seen[0].norm_of(seen[0].inputs[matrices[0]]):
                [norm] = self.names[scale]
            products.append(Product(tuple(names), torch.cat([s.inputs[matrices[0]] for s in seen]), norm))
        routings, gates = [s.routing for s in seen if s.routing], [s.gate for s in seen if s.gate is not None]
        gate, routing = torch.cat(gates) if gates else None, None
        if routings:
            routing = Routing(torch.cat([r.weights for r in routings]), torch.cat([r.ids for r in routings]))
        out = torch.stack(outs)
        if routing:
            out = out + next(self.mixtures([weights], x.flatten(0, 1), routing)).view_as(out)
        return Watched(out, own, products, routing, gate)

    def outputs(
        self,
        block: nn.Module,
        x: Tensor,
        names: Collection[str],
        routing: Routing | None,
        candidates: Iterable[Weights],
    ) -> Iterator[Tensor]:
        """The block's output (B, L, H) with each candidate's weights of `names`, of which the last ones stay."""
        for weights in candidates:
            self.fill(weights, names)
            out = torch.stack([out for out, _ in self._run(block, x)])
            if routing:
                out = out + next(self.mixtures([weights], x.flatten(0, 1), routing)).view_as(out)
            yield out

    def routed(self, routing: Routing) -> Iterator[tuple[tuple[str, str, str], Tensor, Tensor]]:
        """(names, rows, weights) of each expert that has tokens."""
        for expert, names in self.experts.items():
            rows, share = routing.of(expert)
            if len(rows):
                yield names, rows, share

    def inner(self, weights: Weights, names: tuple[str, str, str], x: Tensor) -> Tensor:
        """The input of an expert's down projection."""
        gate, up, _ = names
        return reference.gated(torch.cat([x @ weights(gate).T, x @ weights(up).T], 1), self.kind)

    def mixtures(self, candidates: Iterable[Weights], x: Tensor, routing: Routing) -> Iterator[Tensor]:
        """The routed experts' mixture (tokens, H) for x (tokens, H) with each of the weights."""

        def expert(task: tuple[Weights, tuple[str, str, str], Tensor, Tensor]) -> Tensor:
            weights, names, rows, share = task
            return self.inner(weights, names, x[rows]) @ weights(names[2]).T * share

        experts = list(self.routed(routing))
        outputs = self.parallel_map(expert, ((weights, *one) for weights in candidates for one in experts))
        for first in outputs:
            out = torch.zeros_like(x)
            for (_, rows, _), y in zip(experts, chain([first], outputs), strict=False):  # takes one for each expert
                out.index_add_(0, rows, y)
            yield out

    def forward(self, weights: Weights, x: Tensor) -> Tensor:
        """x (B, L, H) -> (B, L, H), residual connections included."""
        self.fill(weights)
        for norm, block in (("input_layernorm", self.attention), ("post_attention_layernorm", self.mlp)):
            x = x + self.watch(block, self.normed(norm, x), weights).out
        return x

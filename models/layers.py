"""The layers that architectures are made of.

Each layer owns its weights, knows which checkpoint tensors fill them (`pieces`), cuts its share of a split model
and adds up what a split leaves apart, so that a model file says none of that.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from cpu_offload.experts import ShadowedExperts
from executor.parallel.groups import Group
from models.batch import Batch
from models.build import Build
from models.rope import RopeConfig
from ops.fixed import fixed

ALL = slice(None)
HEAD = "lm_head.weight"  # where it is not the embedding


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor of `shape`, of which this rank keeps `part`: `fill` takes it. None: another rank's.
    `linear`: the weight of a linear module, which a checkpoint may have quantised; `fill` takes those as well.
    `router`: one that seldom is, whatever the checkpoint's config says."""

    name: str
    shape: tuple[int, ...]
    part: tuple[slice, ...] = ()
    fill: Callable[[Any], object] | None = None
    linear: bool = False
    router: bool = False

    @property
    def kept_shape(self) -> tuple[int, ...]:
        sizes = zip(self.part, self.shape, strict=True)
        return tuple(len(range(*part.indices(size))) for part, size in sizes)

    @property
    def kept_elements(self) -> int:
        return prod(self.kept_shape) if self.fill else 0


class Layer(nn.Module):
    """A module with weights of its own: `elements` in all, which its pieces fill exactly, in `nbytes` of memory."""

    elements: int
    nbytes: int

    def pieces(self, path: str) -> Iterator[Piece]:
        """`path` is the layer's place in the model, as in the checkpoint."""
        raise NotImplementedError

    def storages(self) -> Iterator[Tensor]:
        """Everything the layer keeps, in the ops implementation's own layout."""
        yield from self.parameters(recurse=False)
        for value in vars(self).values():
            yield from getattr(value, "storages", ())


def layers_of(model: nn.Module) -> list[tuple[str, Layer]]:
    return [(path, layer) for path, layer in model.named_modules() if isinstance(layer, Layer)]


class RMSNorm(Layer):
    def __init__(self, build: Build, size: int, eps: float):
        super().__init__()
        self.ops, self.eps = build.ops, eps
        self.weight = build.vector(size)
        self.elements, self.nbytes = size, self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum); the first layer has no residual yet."""
        if residual is None:
            return self(x), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def pieces(self, path: str) -> Iterator[Piece]:
        yield Piece(f"{path}.weight", tuple(self.weight.shape), (ALL,), self.weight.copy_)


@dataclass(frozen=True)
class Source:
    """One checkpoint matrix of `rows` output rows, of which this rank keeps `part`."""

    name: str
    rows: int
    part: slice

    @property
    def kept(self) -> int:
        return self.part.stop - self.part.start


class MergedLinear(Layer):
    """Matrices with the same input, stacked by output rows: y = x [W1; W2; ...]^T. Fully local."""

    def __init__(self, build: Build, inputs: int, sources: Sequence[Source], bias: bool = False, router: bool = False):
        super().__init__()
        self.ops, self.sources, self.router = build.ops, sources, router
        outputs = sum(s.kept for s in sources)
        names, formats = [source.name for source in sources], build.formats
        self.weight = build.matrix(outputs, inputs, formats.plain if router else build.linear(names, (inputs, 1)))
        self.bias = build.vector(outputs) if bias else None
        self.elements = outputs * (inputs + bias)
        self.nbytes = self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def pieces(self, path: str) -> Iterator[Piece]:
        parent, inputs = path.rpartition(".")[0], self.weight.columns
        row = 0
        for source in self.sources:
            fill = partial(self.weight.fill, row)
            name, shape, part = f"{parent}.{source.name}.weight", (source.rows, inputs), (source.part, ALL)
            yield Piece(name, shape, part, fill, linear=True, router=self.router)
            if self.bias is not None:
                into = self.bias[row : row + source.kept]
                yield Piece(f"{parent}.{source.name}.bias", (source.rows,), (source.part,), into.copy_)
            row += source.kept


class RowLinear(Layer):
    """A matrix split by input columns; every rank's partial result is summed over the group, then the bias added."""

    def __init__(self, build: Build, name: str, group: Group, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.ops, self.group, self.inputs, self.part = build.ops, group, inputs, group.part(inputs)
        format = build.linear([name], (inputs, group.size))
        self.weight = build.matrix(outputs, self.part.stop - self.part.start, format)
        self.bias = build.vector(outputs) if bias else None
        self.elements = outputs * (self.weight.columns + bias)
        self.nbytes = self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        # The bias belongs to the sum: one rank of the group adds it.
        return self.group.all_reduce(self.ops.linear(x, self.weight, self.bias if self.group.rank == 0 else None))

    def pieces(self, path: str) -> Iterator[Piece]:
        outputs = self.weight.rows
        fill = partial(self.weight.fill, 0)
        yield Piece(f"{path}.weight", (outputs, self.inputs), (ALL, self.part), fill, linear=True)
        if self.bias is not None:
            yield Piece(f"{path}.bias", (outputs,), (ALL,), self.bias.copy_)


class VocabEmbedding(Layer):
    """The embedding table, split by vocabulary."""

    def __init__(self, build: Build, vocabulary: int, hidden: int):
        super().__init__()
        self.ops, self.group, self.vocabulary = build.ops, build.parallel.embed_tp, vocabulary
        self.part = self.group.part(vocabulary)
        self.table = build.table(self.part.stop - self.part.start, hidden)
        self.elements, self.nbytes = self.table.numel(), self.table.nbytes

    def forward(self, token_ids: Tensor) -> Tensor:
        first = self.part.start if self.group.size > 1 else None
        return self.group.all_reduce(self.ops.embedding(token_ids, self.table, first))

    def pieces(self, path: str) -> Iterator[Piece]:
        yield Piece(f"{path}.weight", (self.vocabulary, self.table.shape[1]), (self.part, ALL), self.table.copy_)


class LMHead(Layer):
    """Logits over the whole vocabulary, each rank computing its part; `source` is the checkpoint tensor."""

    def __init__(self, build: Build, vocabulary: int, hidden: int, source: str):
        super().__init__()
        self.ops, self.group, self.vocabulary, self.source = build.ops, build.parallel.lmhead_tp, vocabulary, source
        self.part = self.group.part(vocabulary)
        self.weight = build.matrix(self.part.stop - self.part.start, hidden, build.formats.head)
        self.elements, self.nbytes = self.weight.rows * hidden, self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return self.group.gather_columns(self.ops.linear(x, self.weight, None))

    def pieces(self, path: str) -> Iterator[Piece]:
        shape = (self.vocabulary, self.weight.columns)
        yield Piece(self.source, shape, (self.part, ALL), partial(self.weight.fill, 0), linear=self.source == HEAD)


class Experts(Layer):
    """All experts of one layer: split over `moe_ep` by expert, over `moe_tp` along the intermediate size.

    The tokens of all data-parallel groups meet here, and one all-reduce over all ranks adds up both splits.
    """

    def __init__(self, build: Build, experts: int, hidden: int, intermediate: int):
        super().__init__()
        self.ops, self.world, self.dp = build.ops, build.parallel.world, build.parallel.attn_dp
        self.experts, self.hidden, self.intermediate = experts, hidden, intermediate
        self.here = build.parallel.moe_ep.part(experts)
        self.part = build.parallel.moe_tp.part(intermediate)
        count, inner = self.here.stop - self.here.start, self.part.stop - self.part.start
        self.first = self.here.start if count < experts else None
        names = [f"{expert}.{which}_proj" for expert in range(experts) for which in ("gate", "up", "down")]
        format = build.at("experts").linear(names, (hidden, 1), (intermediate, build.parallel.moe_tp.size))
        sizes = inner, hidden, format
        shadowed = build.offload.experts(build.path, self.here, *sizes) if build.offload else None
        self.weights = shadowed or build.ops.expert_matrices(count, *sizes, build.device)
        self.elements, self.nbytes = 3 * count * inner * hidden, self.weights.nbytes

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor, batch: Batch) -> Tensor:
        x, weights, ids = (self.dp.gather_rows(t, batch.tokens_per_group) for t in (x, weights, ids))
        if isinstance(self.weights, ShadowedExperts):
            y = self.weights.mixture(x, weights, ids, self.first)
        else:
            y = self.ops.moe(x, weights, ids, self.weights, self.first)
        return self.dp.own_rows(self.world.all_reduce(y), batch.tokens_per_group)

    def pieces(self, path: str) -> Iterator[Piece]:
        wide, tall = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        for expert in range(self.experts):
            for which in ("gate", "up", "down"):
                name = f"{path}.{expert}.{which}_proj.weight"
                shape, part = (tall, (ALL, self.part)) if which == "down" else (wide, (self.part, ALL))
                if self.here.start <= expert < self.here.stop:
                    fill = partial(self.weights.fill, expert - self.here.start, which)
                    yield Piece(name, shape, part, fill, linear=True)
                else:
                    yield Piece(name, shape, linear=True)


class PagedAttention(nn.Module):
    """Attention over a paged cache that the runner gives it with `bind`."""

    k_cache: Tensor  # ops.kv_cache(...)
    v_cache: Tensor

    def __init__(self, build: Build, kv_heads: int, head_dim: int):
        super().__init__()
        self.ops, self.kv_heads, self.head_dim = build.ops, kv_heads, head_dim

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        self.k_cache, self.v_cache = fixed(k_cache), fixed(v_cache)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """q (T, heads, D), k and v (T, kv_heads, D). -> (T, heads * D)"""
        self.ops.write_kv(k, v, self.k_cache, self.v_cache, batch.slots)
        out = self.ops.attention(
            q, self.k_cache, self.v_cache, batch.block_tables, batch.query_starts, batch.kv_lens, self.head_dim**-0.5
        )
        return out.flatten(1)


def rotary_angles(config: RopeConfig, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the first `positions`, each (positions, dim) float32."""
    scale = config.yarn.attention_factor if config.yarn else 1.0
    frequencies = torch.tensor(config.inverse_frequencies(), dtype=torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies.repeat(2)
    return angles.cos() * scale, angles.sin() * scale


class RotaryTable(nn.Module):
    """cos and sin of every position the case can reach, each (positions, dim)."""

    def __init__(self, build: Build, config: RopeConfig):
        super().__init__()
        self.ops = build.ops
        dtype = build.ops.vector_type(build.dtype)
        self.cos, self.sin = (fixed(t.to(build.device, dtype)) for t in rotary_angles(config, build.max_positions))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.embedding(positions, self.cos, None), self.ops.embedding(positions, self.sin, None)

"""The layers that architectures are made of.

Each layer owns its parameters, knows which checkpoint tensors fill them (`pieces`), cuts its share of a split model
and adds up what a split leaves apart, so that a model file says none of that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.batch import Batch
from models.parallel import Group, Parallel
from models.rope import RopeConfig
from ops.interface import Ops

ALL = slice(None)


@dataclass(frozen=True)
class Build:
    """What layers need to know to be made."""

    ops: Ops
    parallel: Parallel
    dtype: torch.dtype
    device: torch.device
    max_positions: int  # longest sequence that the case allows

    def parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor of `shape`, of which `part` fills `into`; both None where another rank holds it."""

    name: str
    shape: tuple[int, ...]
    part: tuple[slice, ...] | None
    into: Tensor | None


class Layer(nn.Module):
    """A module with parameters of its own. `path` in `pieces` is its place in the model, as in the checkpoint."""

    def pieces(self, path: str) -> Iterator[Piece]:
        raise NotImplementedError


def all_pieces(model: nn.Module) -> list[Piece]:
    return [p for path, layer in model.named_modules() if isinstance(layer, Layer) for p in layer.pieces(path)]


class RMSNorm(Layer):
    def __init__(self, build: Build, size: int, eps: float):
        super().__init__()
        self.ops, self.eps = build.ops, eps
        self.weight = build.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum); the first layer has no residual yet."""
        if residual is None:
            return self(x), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def pieces(self, path: str) -> Iterator[Piece]:
        yield Piece(f"{path}.weight", tuple(self.weight.shape), (ALL,), self.weight)


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

    def __init__(self, build: Build, inputs: int, sources: Sequence[Source], bias: bool = False):
        super().__init__()
        self.ops, self.sources = build.ops, sources
        outputs = sum(s.kept for s in sources)
        self.weight = build.parameter(outputs, inputs)
        self.bias = build.parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def pieces(self, path: str) -> Iterator[Piece]:
        parent, inputs = path.rpartition(".")[0], self.weight.shape[1]
        sizes = [s.kept for s in self.sources]
        for source, into in zip(self.sources, self.weight.split(sizes), strict=True):
            yield Piece(f"{parent}.{source.name}.weight", (source.rows, inputs), (source.part, ALL), into)
        if self.bias is not None:
            for source, into in zip(self.sources, self.bias.split(sizes), strict=True):
                yield Piece(f"{parent}.{source.name}.bias", (source.rows,), (source.part,), into)


class RowLinear(Layer):
    """A matrix split by input columns; every rank's partial result is summed over the group, then the bias added."""

    def __init__(self, build: Build, group: Group, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.ops, self.group, self.inputs, self.part = build.ops, group, inputs, group.part(inputs)
        self.weight = build.parameter(outputs, self.part.stop - self.part.start)
        self.bias = build.parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.group.all_reduce(self.ops.linear(x, self.weight, None))
        return y if self.bias is None else y + self.bias

    def pieces(self, path: str) -> Iterator[Piece]:
        outputs = self.weight.shape[0]
        yield Piece(f"{path}.weight", (outputs, self.inputs), (ALL, self.part), self.weight)
        if self.bias is not None:
            yield Piece(f"{path}.bias", (outputs,), (ALL,), self.bias)


class VocabEmbedding(Layer):
    """The embedding table, split by vocabulary."""

    def __init__(self, build: Build, vocabulary: int, hidden: int):
        super().__init__()
        self.ops, self.group, self.vocabulary = build.ops, build.parallel.embed_tp, vocabulary
        self.part = self.group.part(vocabulary)
        self.weight = build.parameter(self.part.stop - self.part.start, hidden)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.group.all_reduce(self.ops.embedding(token_ids, self.weight, self.part.start))

    def pieces(self, path: str) -> Iterator[Piece]:
        yield Piece(f"{path}.weight", (self.vocabulary, self.weight.shape[1]), (self.part, ALL), self.weight)


class LMHead(Layer):
    """Logits over the whole vocabulary, each rank computing its part; `source` is the checkpoint tensor."""

    def __init__(self, build: Build, vocabulary: int, hidden: int, source: str):
        super().__init__()
        self.ops, self.group, self.vocabulary, self.source = build.ops, build.parallel.lmhead_tp, vocabulary, source
        self.part = self.group.part(vocabulary)
        self.weight = build.parameter(self.part.stop - self.part.start, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.group.gather_columns(self.ops.linear(x, self.weight, None))

    def pieces(self, path: str) -> Iterator[Piece]:
        yield Piece(self.source, (self.vocabulary, self.weight.shape[1]), (self.part, ALL), self.weight)


class Experts(Layer):
    """All experts of one layer: split over `moe_ep` by expert, over `moe_tp` along the intermediate size.

    w13 stacks gate and up of each expert here, w2 is its down projection. The tokens of all data-parallel groups meet
    here, and one all-reduce over all ranks adds up both splits.
    """

    def __init__(self, build: Build, experts: int, hidden: int, intermediate: int):
        super().__init__()
        self.ops, self.world, self.dp = build.ops, build.parallel.world, build.parallel.attn_dp
        self.experts, self.hidden, self.intermediate = experts, hidden, intermediate
        self.here = build.parallel.moe_ep.part(experts)
        self.part = build.parallel.moe_tp.part(intermediate)
        count, rows = self.here.stop - self.here.start, self.part.stop - self.part.start
        self.w13 = build.parameter(count, 2 * rows, hidden)
        self.w2 = build.parameter(count, hidden, rows)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor, batch: Batch) -> Tensor:
        x, weights, ids = (self.dp.gather_rows(t, batch.tokens_per_group) for t in (x, weights, ids))
        y = self.world.all_reduce(self.ops.moe(x, weights, ids, self.w13, self.w2, self.here.start))
        return self.dp.own_rows(y, batch.tokens_per_group)

    def pieces(self, path: str) -> Iterator[Piece]:
        wide, tall = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        for expert in range(self.experts):
            name = f"{path}.{expert}"
            if self.here.start <= expert < self.here.stop:
                gate, up = self.w13[expert - self.here.start].chunk(2)
                down = self.w2[expert - self.here.start]
                yield Piece(f"{name}.gate_proj.weight", wide, (self.part, ALL), gate)
                yield Piece(f"{name}.up_proj.weight", wide, (self.part, ALL), up)
                yield Piece(f"{name}.down_proj.weight", tall, (ALL, self.part), down)
            else:
                yield Piece(f"{name}.gate_proj.weight", wide, None, None)
                yield Piece(f"{name}.up_proj.weight", wide, None, None)
                yield Piece(f"{name}.down_proj.weight", tall, None, None)


class PagedAttention(nn.Module):
    """Attention over a paged cache that the runner gives it with `bind`."""

    k_cache: Tensor  # (pages, page_size, kv_heads, head_dim)
    v_cache: Tensor

    def __init__(self, build: Build, kv_heads: int, head_dim: int):
        super().__init__()
        self.ops, self.kv_heads, self.head_dim = build.ops, kv_heads, head_dim

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        self.k_cache, self.v_cache = k_cache, v_cache

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """q (T, heads, D), k and v (T, kv_heads, D). -> (T, heads * D)"""
        self.ops.write_kv(k, v, self.k_cache, self.v_cache, batch.slots)
        out = self.ops.attention(
            q, self.k_cache, self.v_cache, batch.block_tables, batch.query_starts, batch.kv_lens, self.head_dim**-0.5
        )
        return out.flatten(1)


class RotaryTable(nn.Module):
    """cos and sin of every position the case can reach, each (positions, dim) float32."""

    def __init__(self, build: Build, config: RopeConfig):
        super().__init__()
        scale = config.yarn.attention_factor if config.yarn else 1.0
        frequencies = torch.tensor(config.inverse_frequencies(), dtype=torch.float32)
        angles = torch.arange(build.max_positions, dtype=torch.float32)[:, None] * frequencies.repeat(2)
        self.cos = (angles.cos() * scale).to(build.device)
        self.sin = (angles.sin() * scale).to(build.device)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]

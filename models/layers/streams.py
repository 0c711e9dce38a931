"""Residual streams: what passes from layer to layer of a decoder. Before each attention and each MLP one row of every
token is read from them, and the result is written to them.

*Residual* is the usual kind: one stream, which a norm reads and the result is added to. The sum is left to the next
norm, which adds in the same kernel; so a result and the residual pass on side by side.

*Summed*: one stream, to which layers of a kind of their own add results themselves.

*Gated*: S streams, which all begin as the embedding. A row is the mean of the streams, each normalised alone and times
a gate of low rank; each stream adds the result times a weight of its own. The last reading replaces the last norm.

Streams are computed with a rank's own rows, as norms are, and whole on every rank that shares attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layers.base import ALL, Layer, Piece
from umbra.models.layers.linear import MergedLinear, Source
from umbra.models.layers.norm import RMSNorm
from umbra.ops.interface import Ops, RoundingNorm, Rows

Carried = tuple[Tensor, ...]  # what passes on, each (rows, ...)


class Reading(Protocol):
    """The reading before one attention or MLP, and the writing after it; or the last reading."""

    def read(self, carried: Carried, reader: MergedLinear | None, batch: Batch) -> tuple[Rows, Carried]:
        """Returns the rows (T, H) that are read, and what `write` needs beside their result. `reader` is the layer that
        alone reads the rows, if there is such a one: they may be rounded as it would round them."""

    def write(self, y: Tensor, carried: Carried) -> Carried:
        """Returns what passes on after `y` (T, H) was written."""

    def collapse(self, carried: Carried) -> Tensor:
        """Returns the rows that the output head reads."""

    def tap(self, carried: Carried) -> Tensor:
        """Returns one row of every token for a head that guesses: the residual, or the mean of the streams."""

    def kept(self, carried: Carried) -> Tensor | None:
        """Returns what a layer that predicts further tokens begins with; None: the rows that the output head reads."""


class Streams(Protocol):
    """A kind of residual streams."""

    @property
    def count(self) -> int:
        """The number of streams."""

    @property
    def names(self) -> tuple[str, str, str]:
        """The checkpoint's names of the readings before attention and MLP, and of the last one."""

    def reading(self, build: Build, hidden: int, eps: float, last: bool = False) -> nn.Module:
        """Makes a `Reading`; `build` is at its path."""

    def start(self, ops: Ops, embedded: Tensor) -> Carried:
        """Returns what passes to the first layer."""


class Residual(RMSNorm):
    """`carried` is (x,) before the first layer, then (result, residual), and the residual alone between a reading and
    the writing after it."""

    def read(self, carried: Carried, reader: MergedLinear | None, batch: Batch) -> tuple[Rows, Carried]:
        x, *rest = carried
        if not rest:
            return self(x), (x,)
        norm: RoundingNorm = self.ops.add_rms_norm
        if reader is not None and not batch.sequence_parallel:  # else it has to gather the rows first
            norm = self.ops.rounding_norm(reader.weight) or norm
        rows, residual = norm(x, rest[0], self.weight, self.eps, self.bias)
        return rows, (residual,)

    def write(self, y: Tensor, carried: Carried) -> Carried:
        return y, *carried

    def collapse(self, carried: Carried) -> Tensor:
        return self.add(*carried)[0]

    def tap(self, carried: Carried) -> Tensor:
        return self.add(*carried)[1]  # one kernel for the sum

    def kept(self, carried: Carried) -> Tensor | None:
        return None


class ResidualStreams:
    count: ClassVar[int] = 1
    names: ClassVar[tuple[str, str, str]] = "input_layernorm", "post_attention_layernorm", "norm"

    def reading(self, build: Build, hidden: int, eps: float, last: bool = False) -> RMSNorm:
        return Residual(build, hidden, eps)

    def start(self, ops: Ops, embedded: Tensor) -> Carried:
        return (embedded,)


RESIDUAL = ResidualStreams()


class Sum(RMSNorm):
    """The last norm where `carried` begins with the sum of the embedding and all results, which layers make."""

    def collapse(self, carried: Carried) -> Tensor:
        return self(carried[0])

    def tap(self, carried: Carried) -> Tensor:
        return carried[0]

    def kept(self, carried: Carried) -> Tensor | None:
        return None


class SummedStreams(ResidualStreams):
    def reading(self, build: Build, hidden: int, eps: float, last: bool = False) -> Sum:
        return Sum(build, hidden, eps)


SUMMED = SummedStreams()


class StreamNorm(Layer):
    """RMSNorm of each of several streams alone, with weights of its own, of which the checkpoint has one vector."""

    def __init__(self, build: Build, streams: int, hidden: int, eps: float):
        super().__init__()
        self.ops, self.eps, self.base, self.shape = build.ops, eps, build.norm_base, (streams, hidden)
        self.weight = build.vector(streams * hidden, torch.float32 if self.base else None)
        self.elements, self.nbytes = self.weight.numel(), self.weight.nbytes

    def forward(self, streams: Tensor) -> Tensor:
        """streams (T, S * H) -> the same shape"""
        return self.ops.stream_norm(streams, self.weight.view(self.shape), self.eps)

    def pieces(self, path: str) -> Iterator[Piece]:
        fill = partial(_fill, self.weight, self.base)
        yield Piece(f"{path}.weight", (len(self.weight),), (ALL,), fill, mean=1 - self.base)


def _fill(weight: Tensor, base: float, part: Tensor) -> None:
    weight.copy_(part.float() + base)


class GatedReading(nn.Module):
    """`carried` is the streams (T, S * H); between a reading and the writing after it also what the weights of the
    result are computed from."""

    def __init__(self, build: Build, streams: int, rank: int, hidden: int, eps: float, last: bool):
        super().__init__()
        self.ops, self.streams, self.rank, wide = build.ops, streams, rank, streams * hidden
        self.hc_norm = StreamNorm(build.at("hc_norm"), streams, hidden, eps)
        sources = [Source("input_mix_weight_down", rank, slice(0, rank))]
        if not last:
            sources.append(Source("block_inject_weight", streams, slice(0, streams)))
        self.down = MergedLinear(build, wide, sources, floats=True)
        self.up = MergedLinear(build, rank, [Source("input_mix_weight_up", wide, slice(0, wide))], floats=True)

    def _read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hc_norm(streams)
        products = self.down.of_all_rows(normed)
        low = self.ops.scaled_silu(products[:, : self.rank], 1 / self.streams)
        return self.ops.gated_read(self.up.of_all_rows(low), normed, self.streams), products[:, self.rank :]

    def read(self, carried: Carried, reader: MergedLinear | None, batch: Batch) -> tuple[Rows, Carried]:
        (streams,) = carried
        rows, logits = self._read(streams)
        return rows, (streams, logits)

    def write(self, y: Tensor, carried: Carried) -> Carried:
        streams, logits = carried
        return (self.ops.gated_write(streams, y, logits),)

    def collapse(self, carried: Carried) -> Tensor:
        return self._read(*carried)[0]

    def tap(self, carried: Carried) -> Tensor:
        return carried[0].unflatten(1, (self.streams, -1)).mean(1)

    def kept(self, carried: Carried) -> Tensor | None:
        return carried[0]


@dataclass(frozen=True)
class GatedStreams:
    """`rank` is that of the gates."""

    count: int
    rank: int
    names: ClassVar[tuple[str, str, str]] = "attn_hyper_connection", "mlp_hyper_connection", "hyper_connection_mixer"

    def reading(self, build: Build, hidden: int, eps: float, last: bool = False) -> GatedReading:
        return GatedReading(build, self.count, self.rank, hidden, eps, last)

    def start(self, ops: Ops, embedded: Tensor) -> Carried:
        return (ops.spread(embedded, self.count),)

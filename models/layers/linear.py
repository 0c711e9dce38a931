"""Matrix products whose weights are split over ranks by output rows or by input columns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layers.base import ALL, Layer, Piece, nbytes_of
from umbra.ops.formats import GROUP_SIZES
from umbra.ops.formats.rows import in_order
from umbra.ops.interface import Rounded, Rows


@dataclass(frozen=True)
class Source:
    """A checkpoint matrix of `rows` output rows, or vector of as many elements, of which this rank keeps the range
    `part`. `order` is the order of rows within each head, if it is not the checkpoint's (models/layers/rotary.py)."""

    name: str
    rows: int
    part: slice
    order: tuple[int, ...] | None = None

    @property
    def kept(self) -> int:
        return self.part.stop - self.part.start

    def fills(self, fill: Callable[[Any], object]) -> Callable[[Any], object]:
        """A function that calls `fill` with the rows it is given, which are this rank's, in the order of this rank."""
        if self.order is None:
            return fill
        order, dim = self.order, len(self.order)
        rows = [head + row for head in range(0, self.kept, dim) for row in order]
        return lambda part: fill(in_order(part, rows))


def grouped(name: str, parts: Sequence[tuple[int, slice]], groups: int = 1) -> list[list[Source]]:
    """The sources of each of `parts`, (rows, range of them that this rank keeps), of a checkpoint matrix that holds an
    equal share of each part in each of `groups` groups of rows."""
    rows, first, by_part = sum(count for count, _ in parts), 0, []
    for count, kept in parts:
        per_group, sources = count // groups, []
        for group in range(kept.start // per_group, -(-kept.stop // per_group)):
            at, begin = group * rows // groups + first, group * per_group
            part = slice(at + max(kept.start - begin, 0), at + min(kept.stop - begin, per_group))
            sources.append(Source(name, rows, part))
        by_part.append(sources)
        first += per_group
    return by_part


class MergedLinear(Layer):
    """Matrices with the same input, stacked by output rows: y = x [W1; W2; ...]^T. The outputs stay split. `small` ones
    are never quantised, as routers; `floats` are those that checkpoints may leave in floats without saying so."""

    def __init__(
        self,
        build: Build,
        inputs: int,
        sources: Sequence[Source],
        bias: bool = False,
        small: bool = False,
        floats: bool = False,
    ):
        super().__init__()
        self.ops, self.parallel, self.sources, self.unsaid = build.ops, build.parallel, sources, small or floats
        outputs = sum(s.kept for s in sources)
        if small:
            self.weight = build.matrix(outputs, inputs, build.formats.plain)
        else:
            self.weight = build.stack([(source.name, source.kept) for source in sources], inputs)
        bias = bias or any(build.stored.biased(build.at(source.name).path) for source in sources)
        self.bias = build.vector(outputs) if bias else None
        self.elements = outputs * (inputs + bias)
        self.nbytes = nbytes_of(self.weight, self.bias)

    def forward(self, x: Rows, batch: Batch) -> Tensor:
        if isinstance(x, Rounded):
            return x.linear(self.weight, self.bias)
        return self.of_all_rows(batch.rows(self.parallel).gather(x))

    def of_all_rows(self, x: Tensor) -> Tensor:
        """The products of `x`, which has all rows of this rank's group."""
        return self.ops.linear(x, self.weight, self.bias)

    def pieces(self, path: str) -> Iterator[Piece]:
        above, inputs = path[: path.rfind(".") + 1], self.weight.columns
        row = 0
        for source in self.sources:
            fill = source.fills(partial(self.weight.fill, row))
            name, shape, part = f"{above}{source.name}.weight", (source.rows, inputs), (source.part, ALL)
            yield Piece(name, shape, part, fill, linear=True, router=self.unsaid)
            if self.bias is not None:
                into = self.bias[row : row + source.kept]
                yield Piece(f"{above}{source.name}.bias", (source.rows,), (source.part,), source.fills(into.copy_))
            row += source.kept


class RowLinear(Layer):
    """A matrix split by input columns over the ranks of `attn_tp`, which sum their partial products. `part` is this
    rank's range of them, if parts are not equal; they are then made of whole quantisation groups."""

    def __init__(
        self, build: Build, name: str, inputs: int, outputs: int, bias: bool = False, part: slice | None = None
    ):
        super().__init__()
        tp = build.parallel.attn_tp
        self.ops, self.parallel, self.inputs, self.part = build.ops, build.parallel, inputs, part or tp.part(inputs)
        kept = self.part.stop - self.part.start
        parts = tp.size if kept * tp.size == inputs else inputs // GROUP_SIZES[0]
        self.weight = build.matrix(outputs, kept, build.linear([name], (inputs, parts)))
        bias = bias or build.stored.biased(build.at(name).path)
        self.bias = build.vector(outputs) if bias else None
        self.elements = outputs * (self.weight.columns + bias)
        self.nbytes = nbytes_of(self.weight, self.bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return batch.rows(self.parallel).sum(self.part_of(x))

    def part_of(self, x: Tensor) -> Tensor:
        """This rank's part of the sum."""
        bias = self.bias if self.parallel.attn_tp.rank == 0 else None  # added once to the sum
        return self.ops.linear(x, self.weight, bias)

    def pieces(self, path: str) -> Iterator[Piece]:
        outputs = self.weight.rows
        fill = partial(self.weight.fill, 0)
        yield Piece(f"{path}.weight", (outputs, self.inputs), (ALL, self.part), fill, linear=True)
        if self.bias is not None:
            yield Piece(f"{path}.bias", (outputs,), (ALL,), self.bias.copy_)

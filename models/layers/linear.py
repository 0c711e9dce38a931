"""Matrix products whose weights are split over ranks by output rows or by input columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from executor.parallel.groups import Group
from models.build import Build
from models.layers.base import ALL, Layer, Piece


@dataclass(frozen=True)
class Source:
    """A checkpoint matrix of `rows` output rows, of which this rank keeps the range `part`."""

    name: str
    rows: int
    part: slice

    @property
    def kept(self) -> int:
        return self.part.stop - self.part.start


class MergedLinear(Layer):
    """Matrices with the same input, stacked by output rows: y = x [W1; W2; ...]^T. No communication is needed."""

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
    """A matrix split by input columns over the ranks of `group`, which sum their partial products."""

    def __init__(self, build: Build, name: str, group: Group, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.ops, self.group, self.inputs, self.part = build.ops, group, inputs, group.part(inputs)
        format = build.linear([name], (inputs, group.size))
        self.weight = build.matrix(outputs, self.part.stop - self.part.start, format)
        self.bias = build.vector(outputs) if bias else None
        self.elements = outputs * (self.weight.columns + bias)
        self.nbytes = self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        # The bias is added once to the sum, so one rank of the group adds it.
        return self.group.all_reduce(self.ops.linear(x, self.weight, self.bias if self.group.rank == 0 else None))

    def pieces(self, path: str) -> Iterator[Piece]:
        outputs = self.weight.rows
        fill = partial(self.weight.fill, 0)
        yield Piece(f"{path}.weight", (outputs, self.inputs), (ALL, self.part), fill, linear=True)
        if self.bias is not None:
            yield Piece(f"{path}.bias", (outputs,), (ALL,), self.bias.copy_)

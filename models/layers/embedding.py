"""The two tables over the vocabulary: the embedding of token ids and the output head."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from umbra.models.build import Build
from umbra.models.layers.base import ALL, Layer, Piece
from umbra.ops.interface import fixed

HEAD = "lm_head.weight"  # the checkpoint tensor of an output head that is not tied to the embedding


class VocabEmbedding(Layer):
    """The embedding table, split by vocabulary over `embed_tp`. A rank returns zeros for ids outside its part,
    and an all-reduce sums the ranks' rows. Rows are multiplied by `scale`, rounded to the type of the table."""

    def __init__(self, build: Build, vocabulary: int, hidden: int, scale: float = 1.0):
        super().__init__()
        self.ops, self.group, self.vocabulary = build.ops, build.parallel.embed_tp, vocabulary
        self.part = self.group.part(vocabulary)
        rows, self.hidden = self.part.stop - self.part.start, hidden
        self.table = build.embedding(rows, hidden)
        scales = torch.full((1,), scale, dtype=build.dtype, device=build.device)
        self.scale = fixed(scales.to(build.ops.vector_type(build.dtype))) if scale != 1 else None
        self.elements, self.nbytes = rows * hidden, self.table.nbytes

    def forward(self, token_ids: Tensor) -> Tensor:
        first = self.part.start if self.group.size > 1 else None
        rows = self.group.all_reduce(self.ops.embedding(token_ids, self.table, first))
        return rows if self.scale is None else self.ops.scale_by(rows, self.scale)

    def pieces(self, path: str) -> Iterator[Piece]:
        table = self.table
        fill = partial(self.ops.fill_table, table) if isinstance(table, Tensor) else partial(table.fill, 0)
        yield Piece(f"{path}.weight", (self.vocabulary, self.hidden), (self.part, ALL), fill)


class LMHead(Layer):
    """Logits over the whole vocabulary: each rank of `lmhead_tp` computes a part of them, and the parts are gathered.
    `source` is the name of the checkpoint tensor. A `softcap` bounds the logits, by tanh."""

    def __init__(self, build: Build, vocabulary: int, hidden: int, source: str, softcap: float | None = None):
        super().__init__()
        self.ops, self.group, self.vocabulary, self.source = build.ops, build.parallel.lmhead_tp, vocabulary, source
        self.part, self.softcap = self.group.part(vocabulary), softcap
        self.weight = build.matrix(self.part.stop - self.part.start, hidden, build.formats.head)
        self.elements, self.nbytes = self.weight.rows * hidden, self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        logits = self.ops.linear(x, self.weight, None)
        logits = logits if self.softcap is None else self.ops.softcap(logits, self.softcap)
        return self.group.gather_columns(logits)

    def pieces(self, path: str) -> Iterator[Piece]:
        shape = (self.vocabulary, self.weight.columns)
        yield Piece(self.source, shape, (self.part, ALL), partial(self.weight.fill, 0), linear=self.source == HEAD)

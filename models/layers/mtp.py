"""Multi-token prediction (arXiv 2412.19437, section 2.2): one more decoder layer that guesses the token
after the next one, from a token's last hidden state and the next token. The embedding, the rotary table and the output
head are the model's.
"""

from typing import cast

import torch
from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.linear import MergedLinear, Source
from umbra.models.layers.norm import RMSNorm
from umbra.models.layers.streams import Carried, Reading, Residual, StreamNorm, Streams
from umbra.models.mtp_names import MtpNames


class MultiTokenPrediction(nn.Module):
    """`layer` is its decoder layer, `build` is at its path."""

    def __init__(self, build: Build, hidden: int, eps: float, layer: DecoderLayer, names: MtpNames):
        super().__init__()
        self.parallel = build.parallel
        of_embedding, of_hidden = (RMSNorm(build.at(name), hidden, eps) for name in (names.embedding, names.hidden))
        last = Residual(build.at(names.norm), hidden, eps)
        projection = MergedLinear(build, 2 * hidden, [Source(names.projection, hidden, slice(0, hidden))], floats=True)
        self.parts = of_embedding, of_hidden, projection, layer, last  # which the checkpoint's names are added to
        paths = names.embedding, names.hidden, names.projection, names.layer, names.norm
        named = dict(zip(paths, self.parts, strict=True))
        if not names.layer:
            named |= dict(layer.named_children())
        for name, part in named.items():
            if name:
                add_at(self, name, part)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """`hidden` (T, H) has the hidden states after the final norm of the tokens before those of `embedded` (T, H);
        both have the rows of the whole group. -> of the rows that are wanted, the hidden states of which the output
        head makes guesses, and the states from which further ones go on, which are the same"""
        rows, (of_embedding, of_hidden, projection, layer, last) = batch.rows(self.parallel), self.parts
        both = torch.cat((of_embedding(rows.own(embedded)), of_hidden(rows.own(hidden))), -1)
        after = rows.gather(last.collapse(layer((projection.of_all_rows(both),), cos, sin, batch)))
        return after, after


class StreamedPrediction(nn.Module):
    """The same of a model with several residual streams: each stream of a token's goes through a projection, and the
    next token's embedding, through another one, is added to it."""

    def __init__(self, build: Build, hidden: int, eps: float, layer: DecoderLayer, names: MtpNames, streams: Streams):
        super().__init__()
        self.ops, self.parallel, self.shape = build.ops, build.parallel, (streams.count, hidden)
        of_embedding = RMSNorm(build.at(names.embedding), hidden, eps)
        of_hidden = StreamNorm(build.at(names.hidden), streams.count, hidden, eps)
        embedding, projection = (
            MergedLinear(build, hidden, [Source(name, hidden, slice(0, hidden))], floats=True)
            for name in (names.embedding_projection, names.projection)
        )
        last = streams.reading(build.at(names.norm), hidden, eps, last=True)
        self.parts = of_embedding, of_hidden, embedding, projection, layer, last
        paths = (
            *(names.embedding, names.hidden, names.embedding_projection),
            *(names.projection, names.layer, names.norm),
        )
        for path, part in zip(paths, self.parts, strict=True):
            add_at(self, path, part)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """As `MultiTokenPrediction.forward`, but `hidden` (T, S * H) has the streams after the last layer, and so have
        the states from which further guesses go on."""
        rows, (of_embedding, of_hidden, embedding, projection, layer, last) = batch.rows(self.parallel), self.parts
        count, width = self.shape
        next_tokens = self.ops.spread(embedding.of_all_rows(of_embedding(rows.own(embedded))), count)
        normed = of_hidden(rows.own(hidden))
        streams = projection.of_all_rows(normed.view(-1, width)).view(normed.shape)
        carried: Carried = layer((self.ops.add_gated(streams, next_tokens, None),), cos, sin, batch)
        reading = cast(Reading, last)
        return rows.gather(reading.collapse(carried)), rows.gather(carried[0])


def add_at(module: nn.Module, path: str, child: nn.Module) -> None:
    """Adds `child` to `module` at a path with dots."""
    *above, name = path.split(".")
    for part in above:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.add_module(name, child)

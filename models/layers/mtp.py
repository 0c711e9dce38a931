"""Multi-token prediction (arXiv 2412.19437, section 2.2): one more decoder layer that guesses the token
after the next one, from a token's last hidden state and the next token. The embedding, the rotary table and the output
head are the model's.
"""

import torch
from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.linear import MergedLinear, Source
from umbra.models.layers.norm import RMSNorm
from umbra.models.mtp_names import MtpNames


class MultiTokenPrediction(nn.Module):
    """`layer` is its decoder layer, `build` is at its path."""

    def __init__(self, build: Build, hidden: int, eps: float, layer: DecoderLayer, names: MtpNames):
        super().__init__()
        self.parallel = build.parallel
        of_embedding, of_hidden, last = (
            RMSNorm(build.at(name), hidden, eps) for name in (names.embedding, names.hidden, names.norm)
        )
        projection = MergedLinear(build, 2 * hidden, [Source(names.projection, hidden, slice(0, hidden))], floats=True)
        self.parts = of_embedding, of_hidden, projection, layer, last  # which the checkpoint's names are added to
        paths = names.embedding, names.hidden, names.projection, names.layer, names.norm
        named = dict(zip(paths, self.parts, strict=True))
        if not names.layer:
            named |= dict(layer.named_children())
        for name, part in named.items():
            if name:
                add_at(self, name, part)

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        """`hidden` (T, H) has the hidden states after the final norm of the tokens before those of `embedded` (T, H);
        both have the rows of the whole group. -> the hidden states of the rows that are wanted, of which the output
        head makes guesses, and from which further ones go on"""
        rows, (of_embedding, of_hidden, projection, layer, last) = batch.rows(self.parallel), self.parts
        both = torch.cat((of_embedding(rows.own(embedded)), of_hidden(rows.own(hidden))), -1)
        x, residual = layer(projection.of_all_rows(both), None, cos, sin, batch)
        return rows.gather(last.add(x, residual)[0])


def add_at(module: nn.Module, path: str, child: nn.Module) -> None:
    """Adds `child` to `module` at a path with dots."""
    *above, name = path.split(".")
    for part in above:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.add_module(name, child)

"""The usual decoder layer: attention, then an MLP or a mixture of experts, each of which reads a row of the residual
streams and writes its result to them."""

from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layers.ngram import NgramLayer
from umbra.models.layers.norm import RMSNorm
from umbra.models.layers.streams import RESIDUAL, Carried, Streams


class DecoderLayer(nn.Module):
    """`attention` takes (x, cos, sin, batch), and only its `qkv_proj`, if it has one, reads x. `mlp` takes (x, batch).
    `mlp_name` and `attention_name` are the checkpoint's names of them, and `streams` the kind of residual streams, to
    which `ngrams`, if there is such a layer, adds first."""

    input_layernorm: RMSNorm  # these two where there is one stream
    post_attention_layernorm: RMSNorm

    def __init__(
        self,
        build: Build,
        hidden: int,
        eps: float,
        attention: nn.Module,
        mlp: nn.Module,
        mlp_name: str = "mlp",
        attention_name: str = "self_attn",
        streams: Streams = RESIDUAL,
        ngrams: NgramLayer | None = None,
    ):
        super().__init__()
        self.mlp_name, self.attention_name, self.readings = mlp_name, attention_name, streams.names[:2]
        self.ple = ngrams
        for reading, name, block in zip(self.readings, (attention_name, mlp_name), (attention, mlp), strict=True):
            self.add_module(reading, streams.reading(build.at(reading), hidden, eps))
            self.add_module(name, block)

    def forward(self, carried: Carried, cos: Tensor, sin: Tensor, batch: Batch) -> Carried:
        if self.ple:
            carried = self.ple(carried, batch)
        before_attention, before_mlp = (getattr(self, name) for name in self.readings)
        attention = getattr(self, self.attention_name)
        rows, carried = before_attention.read(carried, getattr(attention, "qkv_proj", None), batch)
        y = attention(rows, cos, sin, batch)
        del rows  # no tensor is kept longer than it is read
        y, carried, batch = batch.wanted(y, carried)
        carried = before_attention.write(y, carried)
        del y
        rows, carried = before_mlp.read(carried, None, batch)
        written: Carried = before_mlp.write(getattr(self, self.mlp_name)(rows, batch), carried)
        return written

"""The usual decoder layer: attention, then an MLP or a mixture of experts, each after a norm and with a residual."""

from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layers.norm import RMSNorm


class DecoderLayer(nn.Module):
    """`attention` takes (x, cos, sin, batch), and only its `qkv_proj`, if it has one, reads x. `mlp` takes (x, batch).
    `mlp_name` and `attention_name` are the checkpoint's names of them."""

    def __init__(
        self,
        build: Build,
        hidden: int,
        eps: float,
        attention: nn.Module,
        mlp: nn.Module,
        mlp_name: str = "mlp",
        attention_name: str = "self_attn",
    ):
        super().__init__()
        self.input_layernorm = RMSNorm(build.at("input_layernorm"), hidden, eps)
        self.mlp_name, self.attention_name = mlp_name, attention_name
        self.add_module(attention_name, attention)
        self.post_attention_layernorm = RMSNorm(build.at("post_attention_layernorm"), hidden, eps)
        self.add_module(mlp_name, mlp)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        attention = getattr(self, self.attention_name)
        reader = getattr(attention, "qkv_proj", None)
        rows, residual = self.input_layernorm.add_for(reader, x, residual, batch)
        del x  # no tensor is kept longer than it is read
        x = attention(rows, cos, sin, batch)
        del rows
        x, residual, batch = batch.wanted(x, residual)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return getattr(self, self.mlp_name)(x, batch), residual

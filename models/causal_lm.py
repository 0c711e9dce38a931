"""A decoder-only language model: embedding, a family's decoder layers, output head."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from models.batch import Batch
from models.build import Build
from models.layers.embedding import HEAD, LMHead, VocabEmbedding
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryTable
from models.rope import RopeConfig


class DecoderConfig(Protocol):
    """The part of a family's config that is used outside its decoder layers."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def rope(self) -> RopeConfig: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


class Decoder(nn.Module):
    """The hidden states of those of a step's tokens whose logits are wanted. Each of `layers` takes
    (x, residual, cos, sin, batch), where x + residual is its input and residual is None before the first, and returns
    (x, residual) for the next."""

    def __init__(self, config: DecoderConfig, build: Build, layers: Iterable[nn.Module]):
        super().__init__()
        self.parallel = build.parallel
        self.embed_tokens = VocabEmbedding(build, config.vocab_size, config.hidden_size)
        self.rotary = RotaryTable(build, config.rope, config.head_dim)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(build.at("model.norm"), config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        rows = batch.rows(self.parallel)
        x, residual = rows.own(self.embed_tokens(batch.token_ids)), None  # (T, H)
        cos, sin = self.rotary(batch.positions)
        *layers, last = self.layers
        for layer in layers:
            x, residual = layer(x, residual, cos, sin, batch.with_all_rows)
        x, residual = last(x, residual, cos, sin, batch)
        x = rows.gather(self.norm.add(x, residual)[0])
        return x if batch.logit_rows is None or batch.wanted_per_group is not None else x[batch.logit_rows]


class CausalLM(nn.Module):
    """A family's model; the family's own class takes (config, build). The weights of a new model are undefined until
    they are filled, and its attention layers need their caches. `mtp_layers` layers that predict further tokens may
    follow in a checkpoint; they are not used."""

    def __init__(self, config: DecoderConfig, build: Build, layers: Iterable[nn.Module], mtp_layers: int = 0):
        super().__init__()
        self.model = Decoder(config, build, layers)
        source = "model.embed_tokens.weight" if config.tie_word_embeddings else HEAD
        depth = len(self.model.layers)
        self.mtp_layers = tuple(f"model.layers.{depth + i}." for i in range(mtp_layers))
        self.lm_head = LMHead(build, config.vocab_size, config.hidden_size, source)

    def forward(self, batch: Batch) -> Tensor:
        """Runs a step's tokens; of decode steps graphs are captured. -> logits (rows wanted, vocabulary)"""
        return self.lm_head(self.model(batch))

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold the tensor `name` although the model does not use it, such as the output head
        next to a tied embedding."""
        return name.startswith(self.mtp_layers) or (name == HEAD and self.lm_head.source != HEAD)

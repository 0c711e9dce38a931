"""EAGLE3 (arXiv 2503.01840): a head, trained for a model, that guesses the token after the next one, from hidden states
of three of the model's layers and the next token. Further guesses go on from the state that its one layer leaves.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from umbra.base.errors import UserError
from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.eagle3_config import TAPS, Eagle3Config
from umbra.models.layers.attention import GroupedAttention
from umbra.models.layers.base import ALL, Layer, Piece, Separate
from umbra.models.layers.embedding import HEAD, LMHead, VocabEmbedding
from umbra.models.layers.linear import MergedLinear, Source
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.norm import RMSNorm
from umbra.models.layers.rotary import RotaryTable
from umbra.ops.interface import fixed

TOKENS = "d2t"  # the tensor of tokens that the head can guess


class DraftTokens(Layer):
    """The model's token for each that the head can guess. The checkpoint has it less the number of its place."""

    def __init__(self, build: Build, count: int, vocabulary: int):
        super().__init__()
        self.vocabulary = vocabulary
        self.ids = fixed(torch.arange(count, device=build.device))
        self.elements, self.nbytes = count, self.ids.nbytes

    def forward(self, drafted: Tensor) -> Tensor:
        return self.ids.index_select(0, drafted)

    def pieces(self, path: str) -> Iterator[Piece]:
        yield Piece(path, (self.elements,), (ALL,), self._fill)

    def _fill(self, part: Tensor) -> None:
        ids = part.long() + torch.arange(self.elements)
        if len(wrong := ids[(ids < 0) | (ids >= self.vocabulary)]):
            raise UserError(f"names token {wrong[0]}, outside the model's vocabulary of {self.vocabulary}")
        self.ids.copy_(ids)


class HeadLayer(nn.Module):
    """A decoder layer whose attention reads the next token's embedding beside the hidden state."""

    def __init__(self, config: Eagle3Config, build: Build):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.parallel, self.norm_before_residual = build.parallel, config.norm_before_residual
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            RMSNorm(build, hidden, eps) for _ in range(3)
        )
        self.self_attn = GroupedAttention(config, build, bias=False, out_bias=False, normed=False, inputs=2 * hidden)
        self.self_attn.attention.aside = True
        self.mlp = GatedMLP(build, hidden, config.intermediate_size)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat((self.input_layernorm(embedded), normed), -1)
        x, (residual,), batch = batch.wanted(self.self_attn(both, cos, sin, batch), (residual,))
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x, batch), residual


class Eagle3Head(Separate):
    """Its modules have the names that its checkpoint has."""

    def __init__(self, config: Eagle3Config, build: Build):
        super().__init__()
        self.config, self.parallel, self.ops, hidden = config, build.parallel, build.ops, config.hidden_size
        self.embed_tokens = VocabEmbedding(build, config.vocab_size, hidden) if config.own_embedding else None
        target, eps = config.target_hidden_size, config.rms_norm_eps
        self.fc = MergedLinear(build, TAPS * target, [Source("fc", hidden, slice(0, hidden))])
        self.input_norm = RMSNorm(build, TAPS * target, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList([RMSNorm(build, target, eps) for _ in range(TAPS if config.fc_norm else 0)])
        layer = HeadLayer(config, build)
        self.layers, self.cache = nn.ModuleList([layer]), layer.self_attn.attention
        self.norm = RMSNorm(build, hidden, eps)
        self.rotary = RotaryTable(build, config.rope, config.head_dim)
        self.lm_head = LMHead(build, config.draft_vocab_size, hidden, HEAD)
        if config.mapped:
            self.d2t = DraftTokens(build, config.draft_vocab_size, config.vocab_size)

    def reads(self, batch: Batch) -> bool:
        """Returns whether `batch` has the pages of the head's cache."""
        return self.cache.layers < len(batch.paged)

    def fused(self, tapped: Sequence[Tensor], batch: Batch) -> Tensor:
        """The states of all rows of the group that guesses begin with; `tapped` are this rank's rows of the model's."""
        if self.fc_norm:
            tapped = [norm(x) for norm, x in zip(self.fc_norm, tapped, strict=True)]
        states = torch.cat(tuple(tapped), -1)
        if self.input_norm:
            states = self.input_norm(states)
        return batch.rows(self.parallel).gather(self.fc.of_all_rows(states))

    def forward(self, model_embedding: VocabEmbedding, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """As `CausalLM.guess`; `hidden` has the states of all rows of the group."""
        rows, embedding = batch.rows(self.parallel), self.embed_tokens or model_embedding
        embedded, (cos, sin) = rows.own(embedding(batch.token_ids)), self.rotary(batch.positions)
        x, residual = self.layers[0](embedded, rows.own(hidden), cos, sin, batch)
        normed, state = (batch.picked(rows.gather(of)) for of in self.norm.add(x, residual))
        if self.config.norm_output:
            state = normed
        drafted = self.ops.argmax(self.lm_head(normed))
        return self.d2t(drafted) if self.config.mapped else drafted, state

    def ignores(self, name: str) -> bool:
        """Returns whether the head's checkpoint may hold the tensor `name` although it is not used."""
        return name == "t2d"

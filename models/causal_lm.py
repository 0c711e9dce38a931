"""A decoder-only language model: embedding, a family's decoder layers, output head."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from umbra.base.errors import UserError
from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.eagle3 import Eagle3Head
from umbra.models.layers.embedding import HEAD, LMHead, VocabEmbedding
from umbra.models.layers.mtp import MultiTokenPrediction, StreamedPrediction, add_at
from umbra.models.layers.ngram import NgramLayer
from umbra.models.layers.norm import RMSNorm
from umbra.models.layers.rotary import RotaryTable
from umbra.models.layers.streams import RESIDUAL, Carried, Streams
from umbra.models.mtp_names import MtpNames
from umbra.models.rope import RopeConfig
from umbra.ops.parallel.rows import GroupRows


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


class InputsOfLayers(Protocol):
    """Inputs of layers beside what passes from one to the next."""

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        """The modules that make them, under the checkpoint's names."""

    def make(self, token_ids: Tensor, embedded: Tensor, rows: GroupRows) -> Tensor:
        """Returns the inputs of this rank's `rows`, of which `embedded` has the embedding."""


@dataclass(frozen=True)
class DecoderOptions:
    """Options that few decoders have. `ropes` are further rotary tables, each with the width of a head: a layer with
    the attribute `rotary_table` takes that of this number, the first after the usual one being 1. `inputs` follow what
    is carried."""

    ropes: tuple[tuple[RopeConfig, int], ...] = ()
    embedding_scale: float = 1.0
    softcap: float | None = None  # bound of the logits
    streams: Streams = RESIDUAL
    inputs: InputsOfLayers | None = None


class Decoder(nn.Module):
    """The hidden states of a step's tokens; if `wanted_per_group` is set, of those whose logits are wanted. Each of
    `layers` takes (carried, cos, sin, batch), where `carried` is what passes from layer to layer in the options' kind
    of streams, and returns what passes to the next."""

    norm: RMSNorm  # where there is one stream

    def __init__(self, config: DecoderConfig, build: Build, layers: Iterable[nn.Module], options: DecoderOptions):
        super().__init__()
        self.parallel, self.ops, hidden = build.parallel, build.ops, config.hidden_size
        self.streams = streams = options.streams
        self.embed_tokens = VocabEmbedding(build, config.vocab_size, hidden, options.embedding_scale)
        self.inputs = options.inputs
        for name, part in options.inputs.parts.items() if options.inputs else ():
            self.add_module(name, part)
        self.rotary = RotaryTable(build, config.rope, config.head_dim)
        self.other_rotary = nn.ModuleList(RotaryTable(build, rope, width) for rope, width in options.ropes)
        self.layers = nn.ModuleList(layers)
        self.depth = len(self.layers)  # a layer for multi-token prediction may follow
        self.last_name = streams.names[2]
        self.add_module(
            self.last_name, streams.reading(build.at(f"model.{self.last_name}"), hidden, config.rms_norm_eps, last=True)
        )

    def forward(self, batch: Batch) -> Tensor:
        return self.with_taps(batch, ())[0]

    def with_taps(self, batch: Batch, taps: Sequence[int]) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The same; beside it what a layer that predicts further tokens begins with, if that is something else, and the
        hidden states before the layers `taps`, in order, of which the last one may be their number. These two are of
        this rank's rows."""
        rows = batch.rows(self.parallel)
        carried = self._start(batch, rows)
        angles = [table(batch.positions) for table in (self.rotary, *self.other_rotary)]
        last = getattr(self, self.last_name)
        tapped: list[Tensor] = []
        for number, layer in zip(range(1, self.depth + 1), self.layers, strict=False):
            cos, sin = angles[getattr(layer, "rotary_table", 0)]
            carried = layer(carried, cos, sin, batch if number == self.depth else batch.with_all_rows)
            if number in taps:
                tapped.append(last.tap(carried))
        return rows.gather(last.collapse(carried)), last.kept(carried), tapped

    def _start(self, batch: Batch, rows: GroupRows) -> Carried:
        """Returns what the first layer takes; nothing else is kept of the embedding."""
        embedded = rows.own(self.embed_tokens(batch.token_ids))
        inputs = (self.inputs.make(batch.token_ids, embedded, rows),) if self.inputs else ()
        return (*self.streams.start(self.ops, embedded), *inputs)


class CausalLM(nn.Module):
    """A family's model; the family's own class takes (config, build). The weights of a new model are undefined until
    they are filled, and its attention layers need their caches. `mtp_layers` layers for multi-token prediction
    may follow in a checkpoint, which calls them `mtp_names`; with `build.drafts.mtp` the first of them is made, with
    the decoder layer that `mtp_layer` makes of a Build at its path."""

    def __init__(
        self,
        config: DecoderConfig,
        build: Build,
        layers: Iterable[nn.Module],
        mtp_layers: int = 0,
        mtp_layer: Callable[[Build], DecoderLayer] | None = None,
        mtp_names: MtpNames | None = None,
        options: DecoderOptions = DecoderOptions(),
    ):
        super().__init__()
        self.model, hidden, streams = Decoder(config, build, layers, options), config.hidden_size, options.streams
        source = "model.embed_tokens.weight" if config.tie_word_embeddings else HEAD
        names = mtp_names or MtpNames()
        paths = [names.path.format(self.model.depth + i) for i in range(mtp_layers)]
        self.mtp_layers = tuple(f"{path}." for path in paths)
        self.mtp_at = ""  # the path of the one that is made
        # A module that every checkpoint with the first of them has; empty: the family has none that can be made.
        self.mtp_sign = f"{paths[0]}.{names.projection}" if mtp_layer and paths else ""
        if build.drafts.mtp:
            if not paths:
                raise UserError("draft_config.method: mtp: the model has no layers for multi-token prediction")
            if not mtp_layer or build.stored.lacks(self.mtp_sign):
                raise UserError(
                    f"draft_config.method: mtp: the config names a layer for multi-token prediction, {paths[0]}, but "
                    "the checkpoint does not hold it: take one that does, or set lookup, or eagle3 with a head for the "
                    "model"
                )
            # Its experts stay in the device's memory: they are those of one layer.
            own = dataclasses.replace(build, shadows=None, exchange=None).at(paths[0])
            layer = mtp_layer(own.at(names.layer) if names.layer else own)
            self.mtp_at = paths[0]
            sizes = hidden, config.rms_norm_eps
            predicting = (
                MultiTokenPrediction(own, *sizes, layer, names)
                if streams.count == 1
                else StreamedPrediction(own, *sizes, layer, names, streams)
            )
            add_at(self, self.mtp_at, predicting)
        self.lm_head = LMHead(build, config.vocab_size, hidden, source, options.softcap)
        head = build.drafts.eagle3
        self.eagle3 = Eagle3Head(head, build.of_head) if head else None
        # Of the states that guesses are made from.
        self.state_width = head.hidden_size if head else hidden * streams.count

    @property
    def previous(self) -> int:
        """The number of tokens before each that `Batch.previous` has."""
        return max((layer.previous for layer in self.modules() if isinstance(layer, NgramLayer)), default=0)

    @property
    def guesses(self) -> bool:
        """Says whether the model has a part for speculative decoding."""
        return bool(self.mtp_at or self.eagle3)

    def forward(self, batch: Batch) -> Tensor:
        """Runs a step's tokens; of decode steps graphs are captured. -> logits (rows wanted, vocabulary)"""
        return self.lm_head(batch.picked(self.model(batch)))

    def with_hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The same. -> logits, and the states (T, state_width) from which further tokens are predicted: of all rows if
        `batch` has no `wanted_per_group`"""
        head = self.eagle3 if self.eagle3 and self.eagle3.reads(batch) else None
        hidden, kept, tapped = self.model.with_taps(batch, head.config.taps if head else ())
        logits = self.lm_head(batch.picked(hidden))
        if head:
            return logits, head.fused(tapped, batch)
        return logits, hidden if kept is None else batch.rows(self.model.parallel).gather(kept)

    def guess(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Caches what the part for speculative decoding keeps of a step's tokens, which follow those of
        `batch.hidden`. -> for each row wanted, the token that follows most likely, and the state from which the next
        guess goes on"""
        if batch.hidden is None:
            raise AssertionError("guesses are made from hidden states")
        model = self.model
        if self.eagle3:
            return self.eagle3(model.embed_tokens, batch.hidden, batch)
        embedded, angles = model.embed_tokens(batch.token_ids), model.rotary(batch.positions)
        after, states = self.get_submodule(self.mtp_at)(embedded, batch.hidden, *angles, batch)
        hidden = batch.picked(after)
        return self.lm_head.ops.argmax(self.lm_head(hidden)), hidden if states is after else batch.picked(states)

    def ignores(self, name: str) -> bool:
        """Returns whether a checkpoint may hold the tensor `name` although the model does not use it, such as the
        output head next to a tied embedding."""
        return name.startswith(self.mtp_layers) or (name == HEAD and self.lm_head.source != HEAD)

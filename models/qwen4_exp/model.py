"""Qwen4-Exp, as Qwen3.8-Flash-Next: three layers of gated DeltaNet (arXiv 2412.06464) for one of gated attention over
the blocks of tokens that an index chooses, each before a softmax-routed mixture of experts beside a shared expert that
a sigmoid gates. All read several residual streams through gates, to which one layer adds rows of a table that the last
tokens choose. Of a model that sees pictures only the part that reads text is used.

Devices, splits over ranks and weight formats are handled by the layers.
"""

import dataclasses

from torch import nn

from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM, DecoderOptions
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.delta_net import DeltaNet
from umbra.models.layers.indexer import IndexedAttention
from umbra.models.layers.ngram import NgramLayer
from umbra.models.layers.sparse_block import SparseMoeBlock
from umbra.models.layers.streams import GatedStreams
from umbra.models.qwen4_exp.config import Qwen4ExpConfig
from umbra.models.qwen4_exp.family import MTP

# Tensors of a checkpoint with what the hashes of n-grams are computed from, which the config determines.
HASHES = ".layer_multipliers", ".ngram_heads_vocab_sizes", ".ngram_heads_offsets"


def decoder_layer(
    config: Qwen4ExpConfig, build: Build, streams: GatedStreams, linear: bool, table: int | None = None
) -> DecoderLayer:
    """`table` is the layer's number among those that read n-grams, if it does."""
    hidden, eps, name = config.hidden_size, config.rms_norm_eps, "linear_attn" if linear else "self_attn"
    attention: nn.Module = (
        DeltaNet(config, build.at(name), fused=False, sigmoid=config.sigmoid_gate)
        if linear
        else IndexedAttention(config, build.at(name), config.index)
    )
    mlp, ngrams = SparseMoeBlock(config, build.at("mlp")), None
    if config.ngrams and table is not None:
        ngrams = NgramLayer(build.at("ple"), hidden, eps, streams.count, config.ngrams, table)
    return DecoderLayer(build, hidden, eps, attention, mlp, attention_name=name, streams=streams, ngrams=ngrams)


class Qwen4ExpForCausalLM(CausalLM):
    """Norms multiply by one plus the checkpoint's weight, except those inside of linear attention."""

    def __init__(self, config: Qwen4ExpConfig, build: Build):
        build, streams = dataclasses.replace(build, norm_base=1.0), GatedStreams(config.hc_count, config.hc_lowrank)
        layers = (
            decoder_layer(config, build.at(f"model.layers.{i}"), streams, linear, table)
            for i, (linear, table) in enumerate(zip(config.linear_layers, config.ngram_layers, strict=True))
        )
        super().__init__(
            config,
            build,
            layers,
            config.mtp_num_hidden_layers,
            lambda own: decoder_layer(config, own, streams, linear=False),
            MTP,
            DecoderOptions(streams=streams),
        )

    def ignores(self, name: str) -> bool:
        """Also layers that predict further tokens, what sees pictures, and what the hashes are computed from."""
        return super().ignores(name) or name.startswith(("mtp.", "model.visual.")) or name.endswith(HASHES)

"""A decoder with gated DeltaNet layers and attention in turn, each before a mixture of experts or a dense MLP."""

import dataclasses

from torch import nn

from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM
from umbra.models.hybrid_config import MTP, HybridConfig, HybridMoeConfig
from umbra.models.layers.attention import GroupedAttention
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.delta_net import DeltaNet
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.sparse_block import SparseMoeBlock


def decoder_layer(config: HybridConfig, build: Build, linear: bool, fused: bool) -> DecoderLayer:
    hidden, name = config.hidden_size, "linear_attn" if linear else "self_attn"
    inside, at_mlp = build.at(name), build.at("mlp")
    attention = (
        DeltaNet(config, inside, fused)
        if linear
        else GroupedAttention(config, inside, bias=False, out_bias=False, normed=True, gated=True)
    )
    mlp: nn.Module
    if isinstance(config, HybridMoeConfig):
        mlp = SparseMoeBlock(config, at_mlp)
    else:
        mlp = GatedMLP(at_mlp, hidden, config.intermediate_size)
    return DecoderLayer(build, hidden, config.rms_norm_eps, attention, mlp, attention_name=name)


class HybridForCausalLM(CausalLM):
    """Norms multiply by one plus the checkpoint's weight, except those inside of linear attention."""

    fused: bool  # as of `DeltaNet`

    def __init__(self, config: HybridConfig, build: Build):
        build = dataclasses.replace(build, norm_base=1.0)
        layers = (
            decoder_layer(config, build.at(f"model.layers.{i}"), linear, self.fused)
            for i, linear in enumerate(config.linear_layers)
        )
        super().__init__(
            config,
            build,
            layers,
            config.mtp_num_hidden_layers,
            lambda own: decoder_layer(config, own, linear=False, fused=False),
            MTP,
        )

    def ignores(self, name: str) -> bool:
        """Also layers that predict further tokens, and what sees pictures."""
        return super().ignores(name) or name.startswith(("mtp.", "model.visual."))

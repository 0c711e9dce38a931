"""Kimi-Linear (arXiv 2510.26692): three layers of delta rules with a decay for each channel of the keys, for one of
attention over latents without rotation; a first layer that is dense, then experts chosen by sigmoid scores plus a bias,
beside a shared expert.

Devices, splits over ranks and weight formats are handled by the layers.
"""

from torch import nn

from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM
from umbra.models.kimi_linear.config import KimiLinearConfig
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.delta_net import ChannelDeltaNet
from umbra.models.layers.latent_attention import LatentAttention
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.sparse_block import UngatedMoeBlock

EXPERT = ("w1", "w3", "w2")  # the gate, up and down of one


def decoder_layer(config: KimiLinearConfig, build: Build, linear: bool, sparse: bool) -> DecoderLayer:
    hidden, inside, at_mlp = config.hidden_size, build.at("self_attn"), build.at("mlp")
    attention = ChannelDeltaNet(config, inside) if linear else LatentAttention(config, inside)
    mlp: nn.Module
    if sparse:
        mlp = UngatedMoeBlock(config, at_mlp, config.routed_scaling_factor, names=EXPERT)
    else:
        mlp = GatedMLP(at_mlp, hidden, config.intermediate_size)
    return DecoderLayer(build, hidden, config.rms_norm_eps, attention, mlp)


class KimiLinearForCausalLM(CausalLM):
    def __init__(self, config: KimiLinearConfig, build: Build):
        layers = (
            decoder_layer(config, build.at(f"model.layers.{i}"), *kinds)
            for i, kinds in enumerate(zip(config.linear_layers, config.sparse_layers, strict=True))
        )
        super().__init__(config, build, layers)

"""DeepSeek-V2, DeepSeek-V3 and the models made like them: attention over latents, first layers that are dense, and
experts that may be chosen within groups, beside a shared expert.

Devices, splits over ranks and weight formats are handled by the layers.
"""

from torch import nn

from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM
from umbra.models.deepseek.config import MTP, LatentMoeConfig
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.latent_attention import LatentAttention
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.sparse_block import UngatedMoeBlock
from umbra.ops.interface import Groups


def groups_of(config: LatentMoeConfig) -> Groups | None:
    best = 1 if config.scoring == "softmax" else 2
    return Groups(config.n_group, config.topk_group, best) if config.n_group > 1 else None


def decoder_layer(config: LatentMoeConfig, build: Build, sparse: bool) -> DecoderLayer:
    hidden, inside = config.hidden_size, build.at("mlp")
    softmax = config.scoring == "softmax"
    if sparse:
        mlp: nn.Module = UngatedMoeBlock(config, inside, config.routed_scaling_factor, groups_of(config), softmax)
    else:
        mlp = GatedMLP(inside, hidden, config.intermediate_size)
    attention = LatentAttention(config, build.at("self_attn"))
    return DecoderLayer(build, hidden, config.rms_norm_eps, attention, mlp)


class LatentMoeForCausalLM(CausalLM):
    def __init__(self, config: LatentMoeConfig, build: Build):
        layers = (
            decoder_layer(config, build.at(f"model.layers.{i}"), sparse)
            for i, sparse in enumerate(config.sparse_layers)
        )
        further = config.num_nextn_predict_layers
        super().__init__(config, build, layers, further, lambda own: decoder_layer(config, own, sparse=True), MTP)

    def ignores(self, name: str) -> bool:
        """Also what sees pictures."""
        return super().ignores(name) or name.startswith(("vision_tower.", "mm_projector."))


class DeepseekV2ForCausalLM(LatentMoeForCausalLM):
    pass


class DeepseekV3ForCausalLM(LatentMoeForCausalLM):
    pass


class Glm4MoeLiteForCausalLM(LatentMoeForCausalLM):
    pass

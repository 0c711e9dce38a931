"""GLM-4-MoE: grouped-query attention that rotates half of a head, first layers that are dense, and experts chosen by
sigmoid scores plus a bias that balances their load, beside a shared expert.

Devices, splits over ranks and weight formats are handled by the layers.
"""

from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM
from umbra.models.glm4_moe.config import MTP, Glm4MoeConfig
from umbra.models.layers.attention import GroupedAttention
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.sparse_block import UngatedMoeBlock


def decoder_layer(config: Glm4MoeConfig, build: Build, sparse: bool) -> DecoderLayer:
    hidden, inside, scale = config.hidden_size, build.at("mlp"), config.routed_scaling_factor
    attention = GroupedAttention(
        config, build.at("self_attn"), config.attention_bias, out_bias=False, normed=config.use_qk_norm
    )
    mlp = UngatedMoeBlock(config, inside, scale) if sparse else GatedMLP(inside, hidden, config.intermediate_size)
    return DecoderLayer(build, hidden, config.rms_norm_eps, attention, mlp)


class Glm4MoeForCausalLM(CausalLM):
    def __init__(self, config: Glm4MoeConfig, build: Build):
        layers = (
            decoder_layer(config, build.at(f"model.layers.{i}"), sparse)
            for i, sparse in enumerate(config.sparse_layers)
        )
        further = config.num_nextn_predict_layers
        super().__init__(config, build, layers, further, lambda own: decoder_layer(config, own, sparse=True), MTP)

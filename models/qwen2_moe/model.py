"""Qwen2-MoE, also Qwen1.5-MoE: grouped-query attention with biases, and a softmax-routed mixture of experts beside a
shared expert that a sigmoid gates.

Devices, splits over ranks and weight formats are handled by the layers.
"""

from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM
from umbra.models.layers.attention import GroupedAttention
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.sparse_block import SparseMoeBlock
from umbra.models.qwen2_moe.config import Qwen2MoeConfig


def decoder_layer(config: Qwen2MoeConfig, build: Build, sparse: bool) -> DecoderLayer:
    hidden, inside = config.hidden_size, build.at("mlp")
    attention = GroupedAttention(config, build.at("self_attn"), config.qkv_bias, out_bias=False, normed=False)
    mlp = SparseMoeBlock(config, inside) if sparse else GatedMLP(inside, hidden, config.intermediate_size)
    return DecoderLayer(build, hidden, config.rms_norm_eps, attention, mlp)


class Qwen2MoeForCausalLM(CausalLM):
    def __init__(self, config: Qwen2MoeConfig, build: Build):
        layers = (
            decoder_layer(config, build.at(f"model.layers.{i}"), sparse)
            for i, sparse in enumerate(config.sparse_layers)
        )
        super().__init__(config, build, layers)

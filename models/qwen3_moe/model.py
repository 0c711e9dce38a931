"""Qwen3-MoE (arXiv 2505.09388): grouped-query attention with per-head QK-norm, and a softmax-routed mixture of experts.

Devices, splits over ranks and weight formats are handled by the layers.
"""

from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM
from umbra.models.layers.attention import GroupedAttention
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.experts import Experts
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.router import Router
from umbra.models.qwen3_moe.config import Qwen3MoeConfig


class Qwen3MoeSparseMoeBlock(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, build: Build):
        super().__init__()
        self.ops, self.top_k, self.renormalise = build.ops, config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Router(build, config.hidden_size, config.num_experts)
        self.experts = Experts(build, config.num_experts, config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        routed = self.ops.route_softmax(self.gate(x), self.top_k, self.renormalise)
        return self.experts(x, routed, batch)


def decoder_layer(config: Qwen3MoeConfig, build: Build, sparse: bool) -> DecoderLayer:
    hidden, bias, inside = config.hidden_size, config.attention_bias, build.at("mlp")
    attention = GroupedAttention(config, build.at("self_attn"), bias, out_bias=bias, normed=True)
    mlp = Qwen3MoeSparseMoeBlock(config, inside) if sparse else GatedMLP(inside, hidden, config.intermediate_size)
    return DecoderLayer(build, hidden, config.rms_norm_eps, attention, mlp)


class Qwen3MoeForCausalLM(CausalLM):
    def __init__(self, config: Qwen3MoeConfig, build: Build):
        layers = (
            decoder_layer(config, build.at(f"model.layers.{i}"), sparse)
            for i, sparse in enumerate(config.sparse_layers)
        )
        super().__init__(config, build, layers)

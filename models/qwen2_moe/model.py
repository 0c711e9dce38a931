"""Qwen2-MoE, also Qwen1.5-MoE: grouped-query attention with biases, and a softmax-routed mixture of experts beside a
shared expert that a sigmoid gates.

Devices, splits over ranks and weight formats are handled by the layers.
"""

from torch import Tensor, nn

from models.batch import Batch
from models.build import Build
from models.causal_lm import CausalLM
from models.layers.attention import GroupedAttention
from models.layers.decoder_layer import DecoderLayer
from models.layers.experts import Experts
from models.layers.mlp import GatedMLP
from models.layers.router import Router
from models.qwen2_moe.config import Qwen2MoeConfig


class SparseMoeBlock(nn.Module):
    def __init__(self, config: Qwen2MoeConfig, build: Build):
        super().__init__()
        self.ops, self.top_k, self.renormalise = build.ops, config.num_experts_per_tok, config.norm_topk_prob
        hidden = config.hidden_size
        self.gate = Router(build, hidden, config.num_experts)
        self.experts = Experts(build, config.num_experts, hidden, config.moe_intermediate_size)
        self.shared_expert = GatedMLP(build.at("shared_expert"), hidden, config.shared_expert_intermediate_size)
        self.shared_expert_gate = Router(build, hidden, 1)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        routed = self.ops.route_softmax(self.gate(x), self.top_k, self.renormalise)
        return self.experts(x, routed, batch, self.shared_expert, self.shared_expert_gate)


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

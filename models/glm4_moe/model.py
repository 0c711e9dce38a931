"""GLM-4-MoE: grouped-query attention that rotates half of a head, first layers that are dense, and experts chosen by
sigmoid scores plus a bias that balances their load, beside a shared expert.

Devices, splits over ranks and weight formats are handled by the layers.
"""

from torch import Tensor, nn

from models.batch import Batch
from models.build import Build
from models.causal_lm import CausalLM
from models.glm4_moe.config import Glm4MoeConfig
from models.layers.attention import GroupedAttention
from models.layers.decoder_layer import DecoderLayer
from models.layers.experts import Experts
from models.layers.mlp import GatedMLP
from models.layers.router import Router
from ops.format import FORMATS


class SparseMoeBlock(nn.Module):
    def __init__(self, config: Glm4MoeConfig, build: Build):
        super().__init__()
        self.ops, self.top_k, self.renormalise = build.ops, config.num_experts_per_tok, config.norm_topk_prob
        hidden, self.scale = config.hidden_size, config.routed_scaling_factor
        self.gate = Router(build, hidden, config.num_experts, FORMATS["float32"], selection_bias=True)
        self.experts = Experts(build, config.num_experts, hidden, config.moe_intermediate_size)
        self.shared_experts = GatedMLP(build.at("shared_experts"), hidden, config.shared_width)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        routed = self.ops.route_sigmoid(self.gate(x), self.gate.bias, self.top_k, self.renormalise, self.scale)
        return self.experts(x, routed, batch, self.shared_experts)


def decoder_layer(config: Glm4MoeConfig, build: Build, sparse: bool) -> DecoderLayer:
    hidden, inside = config.hidden_size, build.at("mlp")
    attention = GroupedAttention(
        config, build.at("self_attn"), config.attention_bias, out_bias=False, normed=config.use_qk_norm
    )
    mlp = SparseMoeBlock(config, inside) if sparse else GatedMLP(inside, hidden, config.intermediate_size)
    return DecoderLayer(build, hidden, config.rms_norm_eps, attention, mlp)


class Glm4MoeForCausalLM(CausalLM):
    def __init__(self, config: Glm4MoeConfig, build: Build):
        layers = (
            decoder_layer(config, build.at(f"model.layers.{i}"), sparse)
            for i, sparse in enumerate(config.sparse_layers)
        )
        super().__init__(config, build, layers, config.num_nextn_predict_layers)

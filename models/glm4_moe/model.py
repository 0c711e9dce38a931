"""GLM-4-MoE: grouped-query attention that rotates half of a head, first layers that are dense, and experts chosen by
sigmoid scores plus a bias that balances their load, beside a shared expert. Hy3's heads rotate whole.

Devices, splits over ranks and weight formats are handled by the layers.
"""

from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM
from umbra.models.glm4_moe.config import HY3_MTP, MTP, Glm4MoeConfig, HyV3Config
from umbra.models.layers.attention import GroupedAttention
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.experts import Experts
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.router import Router, SelectionBias
from umbra.models.layers.sparse_block import UngatedMoeBlock
from umbra.ops.formats import FORMATS


class HYV3MoE(nn.Module):
    def __init__(self, config: Glm4MoeConfig, build: Build):
        super().__init__()
        self.ops, self.top_k, self.scale = build.ops, config.num_experts_per_tok, config.routed_scaling_factor
        hidden, experts = config.hidden_size, config.num_experts
        self.router = nn.ModuleDict({"gate": Router(build, hidden, experts, FORMATS["float32"])})
        self.expert_bias = SelectionBias(build, experts)
        self.experts = Experts(build, experts, hidden, config.moe_intermediate_size)
        self.shared_mlp = GatedMLP(build.at("shared_mlp"), hidden, config.shared_width)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        scores = self.router["gate"](x)
        routed = self.ops.route_sigmoid(scores, self.expert_bias.values, self.top_k, True, self.scale)
        return self.experts(x, routed, batch, self.shared_mlp)


def decoder_layer(config: Glm4MoeConfig, build: Build, sparse: bool) -> DecoderLayer:
    hidden, inside, scale = config.hidden_size, build.at("mlp"), config.routed_scaling_factor
    attention = GroupedAttention(
        config, build.at("self_attn"), config.attention_bias, out_bias=False, normed=config.use_qk_norm
    )
    mlp: nn.Module
    if not sparse:
        mlp = GatedMLP(inside, hidden, config.intermediate_size)
    elif isinstance(config, HyV3Config):
        mlp = HYV3MoE(config, inside)
    else:
        mlp = UngatedMoeBlock(config, inside, scale)
    return DecoderLayer(build, hidden, config.rms_norm_eps, attention, mlp)


class Glm4MoeForCausalLM(CausalLM):
    mtp_names = MTP

    def __init__(self, config: Glm4MoeConfig, build: Build):
        layers = (
            decoder_layer(config, build.at(f"model.layers.{i}"), sparse)
            for i, sparse in enumerate(config.sparse_layers)
        )
        further = config.num_nextn_predict_layers
        super().__init__(
            config, build, layers, further, lambda own: decoder_layer(config, own, sparse=True), self.mtp_names
        )


class HYV3ForCausalLM(Glm4MoeForCausalLM):
    mtp_names = HY3_MTP

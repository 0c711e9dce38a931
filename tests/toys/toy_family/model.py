"""The toy family's model: attention with norms of heads, and experts that are chosen by sigmoid scores."""

from torch import Tensor, nn

from tests.toys.toy_family.config import ToyMoeConfig
from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM
from umbra.models.layers.attention import GroupedAttention
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.experts import Experts
from umbra.models.layers.router import Router

EXPERT = ("open", "wide", "close")  # the checkpoint's names of an expert's gate, up and down matrices


class Mixture(nn.Module):
    def __init__(self, config: ToyMoeConfig, build: Build):
        super().__init__()
        self.ops, self.top_k, hidden = build.ops, config.num_experts_per_tok, config.hidden_size
        self.chooser = Router(build, hidden, config.num_experts)
        self.experts = Experts(build, config.num_experts, hidden, config.moe_intermediate_size, EXPERT)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.experts(x, self.ops.route_sigmoid(self.chooser(x), None, self.top_k, renormalise=True), batch)


def decoder_layer(config: ToyMoeConfig, build: Build) -> DecoderLayer:
    attention = GroupedAttention(config, build.at("self_attn"), bias=False, out_bias=False, normed=True)
    mixture = Mixture(config, build.at("mixture"))
    return DecoderLayer(build, config.hidden_size, config.rms_norm_eps, attention, mixture, mlp_name="mixture")


class ToyMoeForCausalLM(CausalLM):
    def __init__(self, config: ToyMoeConfig, build: Build):
        layers = (decoder_layer(config, build.at(f"model.layers.{i}")) for i in range(config.num_hidden_layers))
        super().__init__(config, build, layers)

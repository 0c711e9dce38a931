"""A softmax-routed mixture of experts beside a shared expert that a sigmoid gates."""

from torch import Tensor, nn

from models.batch import Batch
from models.build import Build
from models.layers.experts import Experts
from models.layers.mlp import GatedMLP
from models.layers.router import Router
from models.moe_config import MoeConfig


class SparseMoeBlock(nn.Module):
    def __init__(self, config: MoeConfig, build: Build):
        super().__init__()
        self.ops, self.top_k, self.renormalise = build.ops, config.num_experts_per_tok, config.norm_topk_prob
        hidden = config.hidden_size
        self.gate = Router(build, hidden, config.num_experts)
        self.experts = Experts(build, config.num_experts, hidden, config.moe_intermediate_size)
        self.shared_expert = GatedMLP(build.at("shared_expert"), hidden, config.shared_width)
        self.shared_expert_gate = Router(build, hidden, 1)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        routed = self.ops.route_softmax(self.gate(x), self.top_k, self.renormalise)
        return self.experts(x, routed, batch, self.shared_expert, self.shared_expert_gate)

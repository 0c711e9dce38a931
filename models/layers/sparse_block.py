"""Mixtures of experts beside a shared expert: routed by softmax and with a sigmoid that gates that expert, or without
such a gate and with experts that may be in groups."""

from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layers.experts import Experts
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.router import Router
from umbra.models.moe_config import MoeConfig
from umbra.ops.formats import FORMATS
from umbra.ops.interface import Groups


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


class UngatedMoeBlock(nn.Module):
    """Experts are chosen by sigmoid scores plus a bias that balances their load, or by `softmax` scores, and weighted
    by `scale` as well. `names` are of `Experts`."""

    def __init__(
        self,
        config: MoeConfig,
        build: Build,
        scale: float,
        groups: Groups | None = None,
        softmax: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ):
        super().__init__()
        self.ops, self.top_k, self.renormalise = build.ops, config.num_experts_per_tok, config.norm_topk_prob
        hidden, self.scale, self.groups, self.softmax = config.hidden_size, scale, groups, softmax
        self.gate = Router(build, hidden, config.num_experts, FORMATS["float32"], selection_bias=not softmax)
        self.experts = Experts(build, config.num_experts, hidden, config.moe_intermediate_size, names)
        self.shared_experts = GatedMLP(build.at("shared_experts"), hidden, config.shared_width)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        rest = self.top_k, self.renormalise, self.scale, self.groups
        scores = self.gate(x)
        if self.softmax:
            routed = self.ops.route_softmax(scores, *rest)
        else:
            routed = self.ops.route_sigmoid(scores, self.gate.bias, *rest)
        return self.experts(x, routed, batch, self.shared_experts)

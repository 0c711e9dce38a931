"""The particulars of Qwen2-MoE's layers. There are no official files in FP8."""

from torch import Tensor

from umbra.commands.quantize.layer import LayerMath, Weights
from umbra.models.qwen2_moe.config import Qwen2MoeConfig
from umbra.ops.reference import route_softmax


class Qwen2MoeLayer(LayerMath[Qwen2MoeConfig]):
    matrices = ("gate_proj", "up_proj", "down_proj")
    router = "mlp.gate"
    shared, shared_gate = "mlp.shared_expert", "mlp.shared_expert_gate"
    fp8_name = "e4m3"

    @classmethod
    def not_fp8(cls, config: Qwen2MoeConfig) -> list[str]:
        gates = (
            f"model.layers.{i}.{gate}"
            for i in range(config.num_hidden_layers)
            for gate in ("mlp.gate", cls.shared_gate)
        )
        return ["lm_head", *gates]

    def choose(self, w: Weights, logits: Tensor) -> tuple[Tensor, Tensor]:
        return route_softmax(logits, self.config.num_experts_per_tok, self.config.norm_topk_prob)

"""The particulars of GLM-4-MoE's layers. The official files in FP8 have scales of channels, not of blocks."""

from torch import Tensor

from umbra.commands.quantize.layer import LayerMath, Weights
from umbra.models.glm4_moe.config import Glm4MoeConfig
from umbra.ops.reference import route_sigmoid


class Glm4MoeLayer(LayerMath[Glm4MoeConfig]):
    matrices = ("gate_proj", "up_proj", "down_proj")
    router = "mlp.gate"
    shared = "mlp.shared_experts"
    fp8_name = "e4m3"

    @classmethod
    def not_fp8(cls, config: Glm4MoeConfig) -> list[str]:
        sparse = (i for i, has_experts in enumerate(config.sparse_layers) if has_experts)
        return ["lm_head", *(f"model.layers.{i}.{cls.router}" for i in sparse)]

    def choose(self, w: Weights, logits: Tensor) -> tuple[Tensor, Tensor]:
        config, bias = self.config, w(f"{self.router}.e_score_correction_bias")
        return route_sigmoid(
            logits, bias, config.num_experts_per_tok, config.norm_topk_prob, config.routed_scaling_factor
        )

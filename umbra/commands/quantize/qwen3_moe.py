"""The particulars of Qwen3-MoE's layers and to its official quantised files."""

from torch import Tensor

from umbra.commands.quantize.layer import LayerMath, Weights
from umbra.models.qwen3_moe.config import Qwen3MoeConfig
from umbra.ops.reference import route_softmax


class Qwen3MoeLayer(LayerMath[Qwen3MoeConfig]):
    matrices = ("gate_proj", "up_proj", "down_proj")
    router = "mlp.gate"
    fp8_name = "e4m3"

    @classmethod
    def not_fp8(cls, config: Qwen3MoeConfig) -> list[str]:
        inside = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
        return ["lm_head", *(f"model.layers.{i}.{name}" for i in range(config.num_hidden_layers) for name in inside)]

    def choose(self, w: Weights, logits: Tensor) -> tuple[Tensor, Tensor]:
        return route_softmax(logits, self.config.num_experts_per_tok, self.config.norm_topk_prob)

"""The particulars of MiniMax-M2's layers and to its official quantised files."""

from torch import Tensor

from umbra.commands.quantize.layer import LayerMath, Weights
from umbra.models.minimax_m2.config import MiniMaxM2Config
from umbra.ops.reference import route_sigmoid


class MiniMaxM2Layer(LayerMath[MiniMaxM2Config]):
    matrices = ("w1", "w3", "w2")
    router = "block_sparse_moe.gate"
    fp8_name = "float8_e4m3fn"

    @classmethod
    def not_fp8(cls, config: MiniMaxM2Config) -> list[str]:
        return ["gate", "e_score_correction_bias", "lm_head"]

    def choose(self, w: Weights, logits: Tensor) -> tuple[Tensor, Tensor]:
        bias = w("block_sparse_moe.e_score_correction_bias") if self.config.use_routing_bias else None
        return route_sigmoid(logits, bias, self.config.num_experts_per_tok, renormalise=True)

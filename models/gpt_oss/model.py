"""gpt-oss: grouped-query attention with biases and sinks, of all tokens and of a window in turn, and a softmax-routed
mixture of experts with biases and a clipped SwiGLU.

Devices, splits over ranks and weight formats are handled by the layers.
"""

from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM
from umbra.models.gpt_oss.config import GptOssConfig
from umbra.models.layers.attention import GroupedAttention
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.experts import Experts
from umbra.models.layers.router import Router
from umbra.ops.interface import ExpertKind


class GptOssSparseMoeBlock(nn.Module):
    def __init__(self, config: GptOssConfig, build: Build):
        super().__init__()
        self.ops, self.top_k, self.renormalise = build.ops, config.num_experts_per_tok, config.norm_topk_prob
        hidden, kind = config.hidden_size, ExpertKind(config.swiglu_limit, config.swiglu_alpha, biased=True)
        self.router = Router(build, hidden, config.num_experts, bias=True)
        names = "gate_up_proj", "down_proj"
        self.experts = Experts(build, config.num_experts, hidden, config.moe_intermediate_size, names, kind)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.experts(x, self.ops.route_softmax(self.router(x), self.top_k, self.renormalise), batch)


def decoder_layer(config: GptOssConfig, build: Build, window: int | None) -> DecoderLayer:
    bias = config.attention_bias
    attention = GroupedAttention(
        config, build.at("self_attn"), bias, out_bias=bias, normed=False, window=window, sinks=True
    )
    mlp = GptOssSparseMoeBlock(config, build.at("mlp"))
    return DecoderLayer(build, config.hidden_size, config.rms_norm_eps, attention, mlp)


class GptOssForCausalLM(CausalLM):
    def __init__(self, config: GptOssConfig, build: Build):
        layers = (
            decoder_layer(config, build.at(f"model.layers.{i}"), window) for i, window in enumerate(config.windows)
        )
        super().__init__(config, build, layers)

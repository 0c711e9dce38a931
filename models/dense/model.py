"""Qwen3, Qwen2, Llama, Mistral, Ministral and Ministral 3: grouped-query attention, of all tokens or of a window, and a
gated MLP. Heads of Qwen3 have norms; queries of Ministral 3 grow with their position.

Devices, splits over ranks and weight formats are handled by the layers.
"""

from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM
from umbra.models.dense.config import DenseModelConfig
from umbra.models.layers.attention import GroupedAttention
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.rotary import RotaryTable

PICTURES = "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."


def decoder_layer(
    config: DenseModelConfig, build: Build, window: int | None, query_rotary: RotaryTable | None
) -> DecoderLayer:
    attention = GroupedAttention(
        config, build.at("self_attn"), config.qkv_bias, config.out_bias, config.normed, window=window
    )
    attention.query_rotary = query_rotary
    mlp = GatedMLP(build.at("mlp"), config.hidden_size, config.intermediate_size, config.mlp_bias)
    return DecoderLayer(build, config.hidden_size, config.rms_norm_eps, attention, mlp)


class DenseForCausalLM(CausalLM):
    def __init__(self, config: DenseModelConfig, build: Build):
        table = RotaryTable.of_queries(build, config.rope, config.head_dim)
        layers = (
            decoder_layer(config, build.at(f"model.layers.{i}"), window, table)
            for i, window in enumerate(config.windows)
        )
        super().__init__(config, build, layers)

    def ignores(self, name: str) -> bool:
        """Also what sees pictures."""
        return super().ignores(name) or name.startswith(PICTURES)


class Qwen3ForCausalLM(DenseForCausalLM):
    pass


class Qwen2ForCausalLM(DenseForCausalLM):
    pass


class LlamaForCausalLM(DenseForCausalLM):
    pass


class MistralForCausalLM(DenseForCausalLM):
    pass


class MinistralForCausalLM(DenseForCausalLM):
    pass


class Ministral3ForCausalLM(DenseForCausalLM):
    pass

"""The record of Qwen3-MoE."""

from umbra.models.family import Family, QuantisedFiles, Shape
from umbra.models.qwen3_moe.gguf import QWEN3MOE
from umbra.models.qwen3_moe.text import TEXT

QWEN3_MOE = Family(
    name="qwen3_moe",
    config="umbra.models.qwen3_moe.config:Qwen3MoeConfig",
    model="umbra.models.qwen3_moe.model:Qwen3MoeForCausalLM",
    gguf=QWEN3MOE,
    text=TEXT,
    quantised=QuantisedFiles(("mlp.gate",), ("input_layernorm", "mlp.gate", "post_attention_layernorm")),
    shapes={"Qwen3-30B-A3B": Shape(48, 2048, 768, 128, 8), "Qwen3-235B-A22B": Shape(94, 4096, 1536, 128, 8)},
)

"""The record of Qwen3.5-MoE and Qwen3.6-MoE."""

from umbra.models.family import Family, QuantisedFiles
from umbra.models.hybrid_config import MTP
from umbra.models.qwen3_5_moe.gguf import QWEN35MOE
from umbra.models.qwen3_5_moe.text import TEXT

QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    config="umbra.models.qwen3_5_moe.config:Qwen3_5MoeConfig",
    model="umbra.models.qwen3_5_moe.model:Qwen3_5MoeForCausalLM",
    old_types=("qwen3_5_moe_text",),
    aliases={"model.language_model": "model"},
    gguf=QWEN35MOE,
    text=TEXT,
    mtp=MTP,
    quantised=QuantisedFiles(("mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_a", "linear_attn.in_proj_b")),
)

"""The record of Qwen2-MoE, also Qwen1.5-MoE."""

from umbra.models.family import Family, QuantisedFiles
from umbra.models.qwen2_moe.gguf import QWEN2MOE

QWEN2_MOE = Family(
    name="qwen2_moe",
    config="umbra.models.qwen2_moe.config:Qwen2MoeConfig",
    model="umbra.models.qwen2_moe.model:Qwen2MoeForCausalLM",
    gguf=QWEN2MOE,
    quantised=QuantisedFiles(("mlp.gate", "mlp.shared_expert_gate")),
)

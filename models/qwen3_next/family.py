"""The record of Qwen3-Next, also Qwen3-Coder-Next."""

from umbra.models.family import Family, QuantisedFiles
from umbra.models.hybrid_config import MTP
from umbra.models.qwen3_next.gguf import QWEN3NEXT

QWEN3_NEXT = Family(
    name="qwen3_next",
    config="umbra.models.qwen3_next.config:Qwen3NextConfig",
    model="umbra.models.qwen3_next.model:Qwen3NextForCausalLM",
    gguf=QWEN3NEXT,
    mtp=MTP,
    quantised=QuantisedFiles(("mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_ba")),
)

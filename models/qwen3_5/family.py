"""The record of dense Qwen3.5, 3.6 and 3.8."""

from umbra.models.family import Family, QuantisedFiles
from umbra.models.hybrid_config import MTP
from umbra.models.qwen3_5.gguf import QWEN35

QWEN3_5 = Family(
    name="qwen3_5",
    config="umbra.models.qwen3_5.config:Qwen3_5Config",
    model="umbra.models.qwen3_5.model:Qwen3_5ForCausalLM",
    old_types=("qwen3_5_text",),
    aliases={"model.language_model": "model"},
    gguf=QWEN35,
    mtp=MTP,
    quantised=QuantisedFiles(("linear_attn.in_proj_a", "linear_attn.in_proj_b")),
)

"""The records of the families with attention over latents: DeepSeek-V2, also V2-Lite; DeepSeek-V3, also V3.1, R1,
Kimi-K2, what reads text in Kimi-K2.5, and Moonlight; GLM-4.7-Flash."""

from umbra.models.deepseek.config import MTP
from umbra.models.deepseek.gguf import DEEPSEEK2
from umbra.models.deepseek.text import V2_TEXT, V3_TEXT
from umbra.models.family import Family, QuantisedFiles

QUANTISED = QuantisedFiles(("mlp.gate", "self_attn.kv_b_proj"))
DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    config="umbra.models.deepseek.config:DeepseekV2Config",
    model="umbra.models.deepseek.model:DeepseekV2ForCausalLM",
    gguf=DEEPSEEK2,
    text=V2_TEXT,
    mtp=MTP,
    quantised=QUANTISED,
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    config="umbra.models.deepseek.config:DeepseekV3Config",
    model="umbra.models.deepseek.model:DeepseekV3ForCausalLM",
    old_types=("kimi_k2",),
    pictured=("kimi_k25",),
    aliases={"language_model.model": "model", "language_model.lm_head": "lm_head"},
    gguf=DEEPSEEK2,
    text=V3_TEXT,
    mtp=MTP,
    quantised=QUANTISED,
)
GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    config="umbra.models.deepseek.config:Glm4MoeLiteConfig",
    model="umbra.models.deepseek.model:Glm4MoeLiteForCausalLM",
    gguf=DEEPSEEK2,
    mtp=MTP,
    quantised=QUANTISED,
)

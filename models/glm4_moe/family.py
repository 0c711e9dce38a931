"""The record of GLM-4-MoE: GLM-4.5-Air, 4.5, 4.6 and 4.7."""

from umbra.models.family import Family, QuantisedFiles
from umbra.models.glm4_moe.config import MTP
from umbra.models.glm4_moe.gguf import GLM4MOE
from umbra.models.glm4_moe.text import TEXT

GLM4_MOE = Family(
    name="glm4_moe",
    config="umbra.models.glm4_moe.config:Glm4MoeConfig",
    model="umbra.models.glm4_moe.model:Glm4MoeForCausalLM",
    gguf=GLM4MOE,
    text=TEXT,
    mtp=MTP,
    quantised=QuantisedFiles(("mlp.gate",)),
)

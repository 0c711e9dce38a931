"""The records of GLM-4-MoE, that is GLM-4.5-Air, 4.5, 4.6 and 4.7, and of Hy3."""

from umbra.models.family import Family, QuantisedFiles
from umbra.models.glm4_moe.config import HY3_MTP, MTP
from umbra.models.glm4_moe.gguf import GLM4MOE, HY3
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
HY_V3 = Family(
    name="hy_v3",
    config="umbra.models.glm4_moe.config:HyV3Config",
    model="umbra.models.glm4_moe.model:HYV3ForCausalLM",
    aliases={
        "mlp.gate": "mlp.router.gate",
        "mlp.e_score_correction_bias": "mlp.expert_bias",
        "mlp.shared_experts": "mlp.shared_mlp",
    },
    gguf=HY3,
    mtp=HY3_MTP,
    quantised=QuantisedFiles(("mlp.router.gate",)),
)

"""The record of Qwen4-Exp, of which Qwen3.8-Flash-Next is the first model."""

from umbra.models.family import Family, QuantisedFiles
from umbra.models.mtp_names import MtpNames

MTP = MtpNames(
    "mtp",
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    "fc_hidden",
    "layers.0",
    "hyper_connection_mixer",
    embedding_projection="fc_embedding",
)
QWEN4_EXP = Family(
    name="qwen4_exp",
    config="umbra.models.qwen4_exp.config:Qwen4ExpConfig",
    model="umbra.models.qwen4_exp.model:Qwen4ExpForCausalLM",
    old_types=("qwen4_exp_text",),
    aliases={"model.language_model": "model"},
    mtp=MTP,
    quantised=QuantisedFiles(("mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_a", "linear_attn.in_proj_b")),
)

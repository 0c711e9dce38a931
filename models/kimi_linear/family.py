"""The record of Kimi-Linear."""

from umbra.models.family import Family, QuantisedFiles
from umbra.models.kimi_linear.gguf import KIMI_LINEAR as ARCHITECTURE

SMALL = tuple(f"self_attn.{name}_proj" for name in ("b", "f_a", "f_b"))  # of decays and of shares of changes
KIMI_LINEAR = Family(
    name="kimi_linear",
    config="umbra.models.kimi_linear.config:KimiLinearConfig",
    model="umbra.models.kimi_linear.model:KimiLinearForCausalLM",
    aliases={"block_sparse_moe": "mlp"},  # transformers saves the dense layer under this name too
    others={"kimi_k3": "Kimi-K3"},
    gguf=ARCHITECTURE,
    quantised=QuantisedFiles(("mlp.gate", "self_attn.kv_b_proj", *SMALL)),
)

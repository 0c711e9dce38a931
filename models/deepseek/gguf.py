"""GGUF files of models with attention over latents, of which llama.cpp has one architecture."""

from typing import Any

from umbra.base.errors import UserError
from umbra.models.deepseek.config import MTP, LatentMoeConfig
from umbra.models.gguf.architecture import SIGMOID, SOFTMAX, Architecture
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.layers import latents, shared_count, with_latents, with_shared_count
from umbra.models.gguf.names import LATENT_ATTENTION, MLP, NORMS, SELECTION_BIAS, Names, shared_expert

NAMES = {
    **NORMS,
    **LATENT_ATTENTION,
    **MLP,
    "ffn_gate_inp": "mlp.gate",
    **SELECTION_BIAS,
    **shared_expert("mlp.shared_experts"),
}
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
# Groups of experts, and how many of them are chosen from, of DeepSeek-V2 and V3 by gating and number of experts: for
# files that do not say them.
OLD_GROUPS = {(SOFTMAX, 160): (8, 3), (SIGMOID, 256): (8, 4)}


def read(keys: Keys) -> dict[str, Any]:
    keys.all.refuse(f"{keys.name}.attention.temperature_scale")  # Mistral's
    mixture = with_shared_count(keys, False)
    dense, experts = mixture["first_k_dense_replace"], mixture["n_routed_experts"]
    gating = keys.all.value(f"{keys.name}.expert_gating_func") or (
        SIGMOID if keys.has(f"blk.{dense}.exp_probs_b.bias") else SOFTMAX
    )
    groups, used = OLD_GROUPS.get((gating, experts), (1, 1))
    groups = max(keys.size("expert_group_count", default=groups, minimum=0), 1)
    if gating == SOFTMAX:
        family, method = "deepseek_v2", "group_limited_greedy" if groups > 1 else "greedy"
    else:
        glm = str(keys.all.value("tokenizer.ggml.pre")) in ("glm4", "chatglm-bpe")
        family, method = "glm4_moe_lite" if glm else "deepseek_v3", "noaux_tc"
    scaling = keys.scaling()
    if scaling and keys.all.value(f"{keys.name}.{LOG_MULTIPLIER}"):
        mscale = round(10 * keys.number(LOG_MULTIPLIER), 6)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {
        **mixture,
        "model_type": family,
        "topk_method": method,
        "n_group": groups,
        "topk_group": max(keys.size("expert_group_used_count", default=used, minimum=0), 1),
        "rope_scaling": scaling,
        **with_latents(keys, keys.has("blk.0.attn_q_a.weight")),
    }


def write(config: LatentMoeConfig) -> dict[str, Any]:
    if config.n_group > 1 or not all(config.sparse_layers):
        raise UserError("GGUF: n_group and dense layers of models with latents are not written")
    yarn = config.rope.yarn
    return {
        "expert_gating_func": SOFTMAX if config.scoring == "softmax" else SIGMOID,
        **shared_count(config),
        **latents(config),
        **({LOG_MULTIPLIER: 0.1 * yarn.mscale_all_dim} if yarn else {}),
    }


DEEPSEEK2 = Architecture(
    "deepseek2",
    Names(NAMES, mtp=MTP),
    gatings=(SOFTMAX, SIGMOID),
    read=read,
    write=write,
    assumed="<|user|> and <|observation|> end an answer; experts, if 160 or 256, are in 8 groups",
    stops=("<|user|>", "<|observation|>"),
    own_attention=True,
)

"""The GGUF files of MiniMax-M2, M2.1, M2.5 and M2.7."""

from typing import Any

from umbra.base.errors import UserError
from umbra.models.gguf.architecture import SIGMOID, Architecture
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.names import ATTENTION, NORMS, Names
from umbra.models.minimax_m2.config import MiniMaxM2Config

MOE = "block_sparse_moe"
NAMES = {**NORMS, **ATTENTION, "ffn_gate_inp": f"{MOE}.gate", "exp_probs_b.bias": f"{MOE}.e_score_correction_bias"}


def read(keys: Keys) -> dict[str, Any]:
    return {
        "num_local_experts": keys.size("expert_count"),
        "intermediate_size": keys.expert_width(),
        "use_routing_bias": keys.has("blk.0.exp_probs_b.bias"),
        "num_mtp_modules": 0,  # no layers of these are left among the weights
    }


def write(config: MiniMaxM2Config) -> dict[str, Any]:
    if not config.use_routing_bias:
        raise UserError("GGUF: llama.cpp has no minimax-m2 with use_routing_bias: false")
    return {"expert_gating_func": SIGMOID, "expert_feed_forward_length": config.intermediate_size}


MINIMAX_M2 = Architecture(
    "minimax-m2",
    Names(NAMES, ("w1", "w3", "w2"), f"{MOE}.experts"),
    gatings=(SIGMOID,),
    read=read,
    write=write,
    assumed="renormalised weights of experts",
    partial=True,
)

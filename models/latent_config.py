"""The part of config.json that decoders with attention over latents and mixtures of experts share."""

from dataclasses import dataclass

from umbra.models.config import Expansion
from umbra.models.moe_config import MoeConfig


@dataclass(frozen=True)
class LatentDecoderConfig(MoeConfig):
    """Every head's key has `qk_nope_head_dim` columns of its own and `qk_rope_head_dim` that may rotate, which all
    heads share. `head_dim` is the latter, `num_key_value_heads` 1: what ranks cannot divide."""

    n_shared_experts: int  # which are one expert of so many times the width
    kv_lora_rank: int
    q_lora_rank: int  # 0: queries have no latents
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    routed_scaling_factor: float
    n_group: int  # groups of experts; 1: any may be chosen
    topk_group: int  # of which experts are chosen
    num_nextn_predict_layers: int

    @property
    def expansion(self) -> Expansion:
        own = self.qk_nope_head_dim + self.v_head_dim
        return Expansion(2 * self.kv_lora_rank - own, self.kv_lora_rank * own)

    @property
    def shared_width(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size

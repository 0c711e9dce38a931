"""GLM-4.5 to 4.7: sigmoid routing with a bias that only chooses, shared experts, first dense layers."""

from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from tests.families.row import SIZES, Row
from tests.families.splits import SHARED
from tests.models.family_mistakes import GLM4_MOE
from umbra.models.rope import RopeConfig

ROW = Row(
    "glm4_moe",
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    {**SIZES, "num_experts": None, "n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
    | dict(use_qk_norm=True, attention_bias=True, first_k_dense_replace=1),
    variants={
        "as_air": {"use_qk_norm": False, "routed_scaling_factor": 1.0, "n_shared_experts": 1},
        "not_renormalised": {"norm_topk_prob": False, "attention_bias": False, "first_k_dense_replace": 0},
        "three_dense_layers": {"num_hidden_layers": 4, "first_k_dense_replace": 3, "tie_word_embeddings": True},
        "a_quarter_rotates": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}, "head_dim": 32},
    },
    mistakes=GLM4_MOE,
    refused=[
        ({"n_group": 2}, "n_group: 2 is not implemented"),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not implemented"),
        ({"n_shared_experts": 0}, "n_shared_experts: 0 must be"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than n_routed_experts: 8"),
    ],
    official=[
        ("GLM-4.5-Air", 106.9, RopeConfig(1e6, 64, None), 128),
        ("GLM-4.6", 352.8, RopeConfig(1e6, 64, None), 128),
    ],
    # Three and five groups of 32 columns on two ranks and four.
    splits={"glm": (dict(moe_intermediate_size=48, intermediate_size=160), SHARED)},
    kept=[("IQ4_NL IQ4_XS IQ4_XS BF16", "iq4 iq4 iq4 float32")],
    quantise={"num_key_value_heads": 8},
    ascend=dict(head_dim=128, moe_intermediate_size=64, first_k_dense_replace=0),
)

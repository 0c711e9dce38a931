"""Hy3: as GLM-4-MoE with whole heads that rotate, and the makers' names of routers and shared experts."""

from functools import partial

from transformers import HYV3Config, HYV3ForCausalLM

from tests.families.row import SIZES, Row, spread
from tests.models.family_mistakes import HY_V3
from umbra.models.rope import RopeConfig

ROW = Row(
    "hy_v3",
    HYV3Config,
    HYV3ForCausalLM,
    {**SIZES, "norm_topk_prob": None, "num_shared_experts": 2, "router_scaling_factor": 2.5},
    randomise=partial(spread, scores=-5.0),
    variants={
        "three_dense_layers": {"num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 3 + ["sparse"]}
        | {"num_shared_experts": 1, "tie_word_embeddings": True}
    },
    mistakes=HY_V3,
    refused=[
        ({"qk_norm": False}, "qk_norm: False is not implemented"),
        ({"route_norm": False}, "route_norm: False is not implemented"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types: .* for each of 2 layers"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than num_experts: 8"),
    ],
    official=[("Hy3", 295.0, RopeConfig(11158840.0, 128, None), 128)],
    last="mlp.experts.7.down_proj",
    splits={"hy3": (dict(moe_intermediate_size=48, intermediate_size=160), "tp2 dp2_ep_graph tp4_moe2_graph_sp")},
    kept=[("IQ4_XS Q6_K Q8_0 Q5_K", "iq4 q6_k q8 q5_k")],
    quantise={"num_key_value_heads": 8},
    ascend=dict(head_dim=128, moe_intermediate_size=64),
)

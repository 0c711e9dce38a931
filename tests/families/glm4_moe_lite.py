"""GLM-4.7-Flash: DeepSeek-V3's layers with one group of experts and heads that are no power of two."""

from functools import partial

from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

from tests.families.deepseek_v3 import ASCEND, LATENT
from tests.families.row import Row, spread
from tests.models.latent_mistakes import GLM4_MOE_LITE
from umbra.models.rope import RopeConfig

FLASH = dict(num_attention_heads=6, num_key_value_heads=6, qk_nope_head_dim=192, v_head_dim=256, intermediate_size=64)

ROW = Row(
    "glm4_moe_lite",
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    LATENT | dict(first_k_dense_replace=None, n_group=1, topk_group=1, rope_parameters=dict(rope_theta=1e4)),
    randomise=partial(spread, scores=-5.0),
    variants={"dense_second": {"mlp_layer_types": ["sparse", "dense"], "v_head_dim": 40, "qk_nope_head_dim": 40}},
    mistakes=GLM4_MOE_LITE,
    refused=[({"mlp_layer_types": ["sparse"]}, "mlp_layer_types: .* for each of 2 layers")],
    official=[("GLM-4.7-Flash", 29.94, RopeConfig(1e6, 64, None), 64)],
    quantise={"num_key_value_heads": 8},
    ascend=ASCEND | FLASH | {"first_k_dense_replace": None},
)

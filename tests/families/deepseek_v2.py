"""DeepSeek-V2: as V3 with softmax routing, and without a width of queries in its Lite."""

from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from tests.families.deepseek_v3 import ASCEND, EXPANDED, GGUF_WIDE, GGUF_YARN, LATENT
from tests.families.row import Row
from tests.models.latent_mistakes import DEEPSEEK_V2
from umbra.models.rope import RopeConfig, YarnConfig

YARN = YarnConfig(40.0, 4096, 32.0, 1.0, attention_factor=1.0, truncate=True, mscale_all_dim=0.707)

ROW = Row(
    "deepseek_v2",
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LATENT | dict(norm_topk_prob=False, topk_method="group_limited_greedy"),
    variants={
        "as_lite": {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "initializer_range": 0.15},
        "expanded": {"initializer_range": 0.2} | EXPANDED,  # for 23 tokens, not for 7
        "no_yarn": {"rope_parameters": {"rope_theta": 1e4}, "v_head_dim": 40, "first_k_dense_replace": 0},
    },
    mistakes=DEEPSEEK_V2,
    refused=[({"norm_topk_prob": True}, "norm_topk_prob: True is not implemented")],
    official=[
        ("DeepSeek-V2-Lite", 15.7, RopeConfig(1e4, 64, YARN), 64),
        ("DeepSeek-V2", 235.7, RopeConfig(1e4, 64, YARN), 64),
    ],
    splits={"v2": ({"q_lora_rank": None}, "tp2")},
    gguf=GGUF_YARN | {"q_lora_rank": None},
    gguf_wide=GGUF_WIDE,
    kept=[("Q4_0 Q8_0 Q5_K Q5_0", "q4 q8 q5_k q5_k")],
    quantise={"q_lora_rank": None},
    ascend=ASCEND,
)

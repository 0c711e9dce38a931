"""MiniMax-M2: norms over all heads, a part of a head rotates, sigmoid routing with a bias that only chooses."""

from typing import Any

import torch
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM, PreTrainedModel

from tests.families.row import Row
from tests.models.minimax_m2_mistakes import MISTAKES
from umbra.models.rope import RopeConfig

# Twelve heads of 32 are not the hidden size; half of a head rotates.
SIZES: dict[str, Any] = dict(vocab_size=320, hidden_size=192, intermediate_size=96, num_hidden_layers=3)
SIZES |= dict(num_attention_heads=12, num_key_value_heads=4, head_dim=32, rotary_dim=16, rope_theta=5e6)
SIZES |= dict(num_local_experts=16, num_experts_per_tok=4, max_position_embeddings=256, initializer_range=0.08)
# Of the sizes that the tiny models of other families have.
AS_OTHERS: dict[str, Any] = dict(vocab_size=96, hidden_size=32, intermediate_size=16, num_hidden_layers=2)
AS_OTHERS |= dict(num_attention_heads=8, num_key_value_heads=2, head_dim=8, rotary_dim=4, num_local_experts=8)
AS_OTHERS |= dict(num_experts_per_tok=3, initializer_range=0.3)
# The official 48 query and 8 KV heads: of 16 ranks, two hold copies of each KV head.
OFFICIAL_HEADS: dict[str, Any] = dict(hidden_size=64, head_dim=8, rotary_dim=4, num_hidden_layers=2)
OFFICIAL_HEADS |= dict(initializer_range=0.15, num_attention_heads=48, num_key_value_heads=8)
# head_dim 64: the narrowest that the rotary op takes
ASCEND: dict[str, Any] = dict(head_dim=64, rotary_dim=32, num_attention_heads=4, num_key_value_heads=2)
ASCEND |= dict(intermediate_size=64, num_local_experts=8, num_experts_per_tok=3, vocab_size=96, initializer_range=0.2)
# Keys of the official config.json that transformers does not use.
OFFICIAL: dict[str, Any] = dict(use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_mtp=True)
OFFICIAL |= dict(use_routing_bias=True, shared_intermediate_size=0, num_mtp_modules=3, mtp_transformer_layers=1)


def randomise(model: PreTrainedModel) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name:
            tensor.add_(torch.randn_like(tensor) * 0.3)
        elif "e_score_correction_bias" in name:
            tensor.copy_(5 + torch.randn_like(tensor) * 0.1)  # bfloat16 has steps of 0.03 here
        elif "gate.weight" in name:
            tensor.mul_(4)  # scores apart, so that rounding does not change the choice
        elif "q_proj" in name:  # each head has a scale of its own
            heads = tensor.view(model.config.num_attention_heads, -1)
            heads.mul_(torch.linspace(0.3, 3, len(heads))[:, None])


def publish(config: dict[str, Any]) -> None:
    """As the official files have it."""
    rope = config.pop("rope_parameters")
    config |= OFFICIAL | {"attn_type_list": [1] * config["num_hidden_layers"], "rope_theta": rope["rope_theta"]}
    config["rotary_dim"] = round(rope["partial_rotary_factor"] * config["head_dim"])
    for name in ("eos_token_id", "bos_token_id", "partial_rotary_factor", "dtype"):
        config.pop(name, None)


ROW = Row(
    "minimax_m2",
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    SIZES,
    randomise=randomise,
    seed=11,
    publish=publish,
    variants={
        "whole_heads_rotate": {"rotary_dim": 32},
        "a_quarter_rotates": {"rotary_dim": 8},
        "16_heads_on_2": {"num_attention_heads": 16, "num_key_value_heads": 2},
        "as_many_kv_heads": {"num_key_value_heads": 12},
        "official_heads": {"head_dim": 128, "rotary_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 1},
        "tied": {"tie_word_embeddings": True},
        "sizes_that_no_vector_divides": dict(hidden_size=52, intermediate_size=20, head_dim=20, rotary_dim=6)
        | dict(num_local_experts=13, num_experts_per_tok=3, vocab_size=199, num_hidden_layers=2, initializer_range=0.2),
    },
    mistakes=MISTAKES,
    refused=[
        ({"attn_type_list": [1] * 61}, r"attn_type_list: \[1, 1, 1, 1, 1, 1, ...\] must be 3 times 1, full attention"),
        ({"attn_type_list": [True] * 3}, "attn_type_list: .* must be a list of non-negative integers"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type: 'per_head' is not implemented"),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not implemented"),
        ({"shared_intermediate_size": 1536}, "shared_intermediate_size: 1536 is not implemented"),
        ({"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta: 3.5 is not implemented"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ".*rope type 'yarn' is not implemented, only default"),
        (
            {"rope_scaling": {"type": "linear"}, "rope_parameters": {"rope_theta": 5e6}},
            ".*rope_parameters are both set",
        ),
        ({"partial_rotary_factor": 1.0}, "rotary_dim: 16 does not agree with partial_rotary_factor: 1 of 32"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor: 2.0 of head_dim 32 must be a whole number"),
        ({"rotary_dim": 15}, "rotary_dim: 15 and head_dim: 32 must be even"),
        ({"rotary_dim": 0}, "rotary_dim: 0 must be an integer from 1 to 32"),
        (
            {"num_local_experts": 65536, "num_hidden_layers": 62, "attn_type_list": [1] * 62},
            "num_local_experts: 65536 in each of 62 layers is more than 524288 together",
        ),
        ({"intermediate_size": "1536"}, "intermediate_size: '1536' must be an integer"),
        ({"use_routing_bias": 1}, "use_routing_bias: 1 must be true or false"),
        ({"model_type": "minimax_m3_vl"}, r"model_type: .*'minimax_m3_vl' \(MiniMax-M3, another architecture\) is not"),
        ({"model_type": "minimax_text_01"}, r".*\(MiniMax-01, another architecture\) is not supported"),
        (
            {"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"]},
            r"model_type: .*'minimax' \(MiniMax-01, another architecture\) is not supported, only qwen3_moe, ",
        ),
    ],
    official=[("MiniMax-M2.5", 228.7, RopeConfig(5e6, 64, None), 128)],
    last="model.layers.1.block_sparse_moe.experts.15.w3.weight",
    splits={
        "m2": (
            OFFICIAL_HEADS,
            "tp2 tp2_sp dp2_ep dp2_graph tp4_moe2 tp4_ep_graph dp2_tp2_ep_graph tp4_graph_sp dp2_tp2_chunks5_sp "
            "tp8_ep_graph dp2_tp4_moe4 tp16 "
            # 16 experts in slots; the prefill and the third step count, others move a layer each.
            "dp2_ep_still8 dp2_ep_copies8 dp2_ep_copies9_graph dp4_ep_copies6 dp4_ep_copies5_graph_chunks5",
        ),
        # Two KV heads, of which several ranks hold copies.
        "m2_few_kv": (OFFICIAL_HEADS | dict(num_attention_heads=16, num_key_value_heads=2), "tp4 tp4_graph dp2_tp4"),
    },
    offload=AS_OTHERS,
    kept=[("Q5_K Q4_K Q6_K Q4_1", "q5_k q4_k q6_k q4_k")],
    ascend=ASCEND,
    inner="intermediate_size",
)

"""Qwen4-Exp: residual streams, attention over chosen blocks, and a table of n-grams."""

from typing import Any

import torch
from transformers import PreTrainedModel, Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from tests.families.qwen3_next import HYBRID, RANDOM
from tests.families.row import Row
from tests.models.qwen4_exp_mistakes import MISTAKES

KINDS = ["linear_attention", "linear_attention", "indexed_attention", "indexed_attention"]
SIZES: dict[str, Any] = {**HYBRID, "num_hidden_layers": 4, "layer_types": KINDS, "rope_theta": None} | dict(
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    output_gate_type="sigmoid",
    hc_count=4,
    hc_lowrank=32,
    # Three blocks of two tokens, of queries that see up to 28.
    **dict(indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=6, indexer_compress_ratio=2),
    ple_layer_ids=[2],
    ple_conv_kernel_size=4,
    **dict(ngram_size=3, heads_per_ngram=2, ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=8),
    split_ngram_parts=4,
    eos_token_id=9,
)
# Before the general ones: gates and weights of streams that differ from token to token, and rows that matter.
OWN = {"conv1d": (0.0, 0.5), "input_mix": (0.0, 0.3), "block_inject": (0.0, 0.3), "ngram_embedding": (0.0, 1.0)}
OWN |= {"lm_head": (0.0, 0.2), "index_qk_proj": (0.0, 0.3), "ple.key_proj": (0.0, 0.3), "ple.value_proj": (0.0, 0.3)}


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    for name, tensor in model.named_parameters():
        tensor.normal_(*next(numbers for part, numbers in (OWN | RANDOM).items() if part in name))


def as_published(config: dict[str, Any]) -> None:
    """Hubs' files call the layers that attend as other families do."""
    config["layer_types"] = [kind.replace("indexed", "full") for kind in config["layer_types"]]


ROW = Row(
    "qwen4_exp",
    Qwen4ExpTextConfig,
    Qwen4ExpForCausalLM,
    SIZES,
    randomise=randomise,
    publish=as_published,
    variants={
        "three_streams": dict(hc_count=3, output_gate_type="silu", norm_topk_prob=False, num_key_value_heads=1)
        | dict(ple_layer_ids=[], shared_expert_intermediate_size=48, linear_num_value_heads=6)
    },
    mistakes=MISTAKES,
    refused=[
        ({"indexer_kv_heads": 2}, "indexer_kv_heads: 2 is not implemented"),
        ({"indexer_budget": 7}, "indexer_budget: 7 must be a multiple of indexer_compress_ratio: 2"),
        ({"indexer_head_dim": 64}, "indexer_head_dim: 64 must be even, and from .* 8, to head_dim: 32"),
        ({"ple_layer_ids": [5]}, "ple_layer_ids: .* must be numbers of layers from 1 to 4"),
        ({"ple_embed_dim": 62}, "ple_embed_dim: 62 must be a multiple of 4"),
        ({"output_gate_type": "gelu"}, "output_gate_type: 'gelu' is not implemented"),
    ],
    splits={"next_exp": ({}, "tp2_chunks5_sp dp2_ep_graph")},
    elsewhere=False,
)

"""The demo's Qwen3-MoE: its sizes, and its files as checkpoints on the hub have them."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from umbra.tools.demo_model.text import EOS_ID, POSITIONS, VOCABULARY


class Qwen3Moe:
    """9.2 M parameters; hidden, expert and query widths are multiples of 128, as 4-bit groups need."""

    def __init__(self) -> None:
        config = Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=5,
            head_dim=64,
            num_attention_heads=8,
            num_key_value_heads=2,
            num_experts=32,
            num_experts_per_tok=4,
            moe_intermediate_size=128,
            intermediate_size=512,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            max_position_embeddings=POSITIONS,
            rope_theta=10000.0,
            tie_word_embeddings=True,
            output_router_logits=True,
            router_aux_loss_coef=0.003,
            bos_token_id=EOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=EOS_ID,
        )
        config._experts_implementation = "grouped_mm"
        self.model = Qwen3MoeForCausalLM(config)

    def after_step(self, progress: float) -> None:
        """Nothing to do: the auxiliary loss balances the experts."""

    def measures(self, tokens: torch.Tensor) -> dict[str, float]:
        return {}

    def save(self, out: Path) -> None:
        self.model.config.output_router_logits = False
        self.model.to(torch.bfloat16).save_pretrained(out)
        path = out / "config.json"
        path.write_text(json.dumps(hub_config(json.loads(path.read_text())), indent=2) + "\n")


def hub_config(saved: dict[str, Any]) -> dict[str, Any]:
    """The config with the key names of Qwen3-MoE checkpoints on the hub, which differ from those of transformers 5."""
    config = dict(saved)
    config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    config["torch_dtype"] = config.pop("dtype")
    return dict(sorted(config.items()))

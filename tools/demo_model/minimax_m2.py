"""The demo's MiniMax-M2: its sizes, the selection bias that balances its experts, and its files as the official ones.

The experts are balanced as in the original, without an auxiliary loss: after each step the selection bias of an
expert that was chosen less often than the mean rises by a fixed rate, that of one chosen more often falls.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock, MiniMaxM2TopKRouter

from umbra.tools.demo_model.text import POSITIONS, VOCABULARY

LAYERS, EXPERTS = 2, 32
BIAS_RATE = 1e-3
FREEZE = 0.2  # the rate falls to zero over this last part of the run
FLOAT32 = ("gate.weight", "e_score_correction_bias")  # kept so by the official files

# Keys as in the official files. Every width that is quantised is a multiple of 128, the side of an FP8 block.
CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * LAYERS,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 128,
    "max_position_embeddings": POSITIONS,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4,
    "num_local_experts": EXPERTS,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rotary_dim": 32,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.1",
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": VOCABULARY,
}


class MiniMaxM2:
    """4.6 M parameters in two layers; a third would exceed 10 MB."""

    def __init__(self) -> None:
        config = MiniMaxM2Config(**CONFIG, bos_token_id=None, eos_token_id=None)
        config._experts_implementation = "grouped_mm"
        self.model = MiniMaxM2ForCausalLM(config)
        self.blocks = [m for m in self.model.modules() if isinstance(m, MiniMaxM2SparseMoeBlock)]
        self.loads: dict[MiniMaxM2TopKRouter, torch.Tensor] = {}  # per router (experts,): choices of the last step
        for block in self.blocks:
            block.gate.register_forward_hook(self.count)

    def count(self, router: MiniMaxM2TopKRouter, _: Any, routed: tuple[torch.Tensor, ...]) -> None:
        chosen = routed[2]  # (tokens, top k)
        self.loads[router] = torch.bincount(chosen.flatten(), minlength=EXPERTS).float()

    def after_step(self, progress: float) -> None:
        rate = BIAS_RATE * min(1.0, (1.0 - progress) / FREEZE)
        for block in self.blocks:
            load = self.loads[block.gate]
            block.e_score_correction_bias += rate * torch.sign(load.mean() - load)

    def measures(self, tokens: torch.Tensor) -> dict[str, float]:
        return {}

    def save(self, out: Path) -> None:
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if not name.endswith(FLOAT32):
                tensor.data = tensor.data.bfloat16()
        self.model.save_pretrained(out)
        (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")

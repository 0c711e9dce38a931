"""The demo's Qwen3.5-MoE: three of four layers are gated DeltaNet, and an MTP layer learns beside them."""

import json
import math
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoeGatedDeltaNet,
    Qwen3_5MoeRMSNorm,
    load_balancing_loss_func,
)

from umbra.tools.demo_model.text import CONTEXT, EOS_ID, POSITIONS, VOCABULARY

LAYERS, INTERVAL = 8, 4  # every fourth layer has full attention
MTP_WEIGHT = 0.3
FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")  # kept so by the official files

# Keys as in the official files. Hidden and expert widths are multiples of 32, as 4-bit groups need.
TEXT_CONFIG: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": EOS_ID,
    "full_attention_interval": INTERVAL,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 96,
    "initializer_range": 0.02,
    "layer_types": ["linear_attention" if (i + 1) % INTERVAL else "full_attention" for i in range(LAYERS)],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": POSITIONS,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 32,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000,
        "rope_type": "default",
    },
    "router_aux_loss_coef": 0.003,
    "shared_expert_intermediate_size": 32,
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": TEXT_CONFIG,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    # A tower as small as transformers can build; the files have no tensors of it.
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "model_type": "qwen3_5_moe",
        "num_heads": 1,
        "num_position_embeddings": 16,
        "out_hidden_size": 96,
    },
}


class Mtp(nn.Module):
    """Reads the model's last hidden state and the next token; its hidden state, through the model's head, predicts the
    token after that one. transformers has no such layer that can be trained."""

    def __init__(self, config: Qwen3_5MoeTextConfig):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5MoeRMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = Qwen3_5MoeRMSNorm(hidden, eps)
        self.layers = nn.ModuleList([Qwen3_5MoeDecoderLayer(config, INTERVAL - 1)])
        self.norm = Qwen3_5MoeRMSNorm(hidden, eps)

    def forward(self, hidden: Tensor, embedded: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        both = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        return cast(Tensor, self.norm(self.layers[0](self.fc(torch.cat(both, -1)), position_embeddings=rotation)))


class WithMtp(Qwen3_5MoeForCausalLM):  # type: ignore[misc]
    """The model as transformers has it, whose loss is also that of the MTP layer."""

    def __init__(self, config: Qwen3_5MoeTextConfig):
        super().__init__(config)
        self.mtp = Mtp(config)
        self.mtp.apply(self._init_weights)
        self.mtp_router_logits: list[Tensor] = []
        gate = self.mtp.get_submodule("layers.0.mlp.gate")
        gate.register_forward_hook(lambda *call: self.mtp_router_logits.append(call[2][0]))

    def drafts(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Logits (rows, length - 1, vocabulary) of MTP for the token after each token but the first."""
        positions = torch.arange(tokens.shape[1] - 1).expand(3, 1, -1)
        embedded = self.model.embed_tokens(tokens[:, 1:])
        mixed = self.mtp(hidden[:, :-1], embedded, self.model.rotary_emb(embedded, positions))
        return cast(Tensor, self.lm_head(mixed))

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, output_router_logits: bool = True
    ) -> MoeCausalLMOutputWithPast:
        out = self.model(input_ids=input_ids, output_router_logits=output_router_logits)
        logits = self.lm_head(out.last_hidden_state)
        loss = None
        if labels is not None:
            self.mtp_router_logits.clear()
            drafts = self.drafts(out.last_hidden_state, input_ids)
            config = self.config
            # Of each layer alone: transformers balances the sum over layers, for which each may use other experts.
            balance = sum(
                load_balancing_loss_func((layer,), config.num_experts, config.num_experts_per_tok)
                for layer in (*out.router_logits, *self.mtp_router_logits)
            )
            loss = (
                cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
                + MTP_WEIGHT * cross_entropy(drafts[:, :-1].flatten(0, 1), labels[:, 2:].flatten())
                + config.router_aux_loss_coef * balance
            )
        return MoeCausalLMOutputWithPast(loss=loss, logits=logits)


class Qwen35Moe:
    """4.5 M parameters; an untied head."""

    def __init__(self) -> None:
        config = Qwen3_5MoeTextConfig(**TEXT_CONFIG)
        self.model = WithMtp(config)
        config._experts_implementation = "grouped_mm"  # which transformers refuses of a class that is not its own
        for module in self.model.modules():
            if isinstance(module, Qwen3_5MoeGatedDeltaNet):
                remember(module)

    def after_step(self, progress: float) -> None:
        """Nothing to do: the auxiliary loss balances the experts."""

    @torch.no_grad()
    def measures(self, tokens: Tensor) -> dict[str, float]:
        """Returns the share of tokens for which MTP's first choice is the model's own, over windows of the held-out
        text."""
        hits, rows = 0.0, tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        for x in rows.split(16):
            hidden = self.model.model(input_ids=x).last_hidden_state
            drafts = self.model.drafts(hidden, x)[:, :-1].argmax(-1)
            hits += float((drafts == self.model.lm_head(hidden[:, 1:-1]).argmax(-1)).float().sum())
        return {"mtp_acceptance": round(hits / (len(rows) * (CONTEXT - 2)), 4)}

    def save(self, out: Path) -> None:
        tensors = {
            ("model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name): (
                tensor.detach() if name.endswith(FLOAT32) else tensor.detach().bfloat16()
            )
            for name, tensor in self.model.state_dict().items()
        }
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
        (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


@torch.no_grad()
def remember(layer: Qwen3_5MoeGatedDeltaNet) -> None:
    """Let the heads' states begin with half-lives from 2 to 1,000 tokens: with transformers' own start all of them
    forget at once."""
    rate, half_life = torch.empty(2, layer.num_v_heads).uniform_()
    rate, half_life = 1 + 7 * rate, 2 * 500**half_life
    step = math.log(2) / half_life / rate
    layer.A_log.copy_(rate.log())
    layer.dt_bias.copy_(step.expm1().log())  # whose softplus is the step

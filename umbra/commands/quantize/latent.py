"""The particulars of layers with attention over latents: DeepSeek-V2, DeepSeek-V3 and the models made like them."""

from collections.abc import Collection, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from umbra.commands.quantize.layer import LayerMath, Weights
from umbra.models.deepseek.config import LatentMoeConfig
from umbra.models.deepseek.model import groups_of
from umbra.models.layers.latent_attention import LATENT_EPS, pairs_of
from umbra.ops.reference import rms_norm, rope, route_sigmoid, route_softmax


class LatentLayer(LayerMath[LatentMoeConfig]):
    matrices = ("gate_proj", "up_proj", "down_proj")
    router = "mlp.gate"
    shared = "mlp.shared_experts"
    small = ("self_attn.kv_b_proj",)  # whose products with queries are over its rows
    fp8_name = "e4m3"

    @classmethod
    def not_fp8(cls, config: LatentMoeConfig) -> list[str]:
        layers = range(config.num_hidden_layers)
        routers = (f"model.layers.{i}.{cls.router}" for i in layers if config.sparse_layers[i])
        return ["lm_head", *routers, *(f"model.layers.{i}.{name}" for i in layers for name in cls.small)]

    def __init__(self, config: LatentMoeConfig, names: Collection[str], length: int):
        super().__init__(config, names, length)
        self.inputs = [f"self_attn.{name}.weight" for name in ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")]

    def choose(self, w: Weights, logits: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        rest = config.num_experts_per_tok, config.norm_topk_prob, config.routed_scaling_factor, groups_of(config)
        if config.scoring == "softmax":
            return route_softmax(logits, *rest)
        return route_sigmoid(logits, w(f"{self.router}.e_score_correction_bias"), *rest)

    def within(self, w: Weights, x: Tensor) -> Iterator[tuple[Tensor, str, str]]:
        if self.config.q_lora_rank:
            latents = self._latents(w, "q_a", self.linear(w, "self_attn.q_a_proj", x))
            yield latents, "self_attn.q_b_proj.weight", "self_attn.q_a_layernorm.weight"

    def heads(self, w: Weights, x: Tensor) -> Tensor:
        config, pairs = self.config, pairs_of(self.config.qk_rope_head_dim)
        widths = config.qk_nope_head_dim, config.qk_rope_head_dim
        last = "q_proj"
        latents, key = self.linear(w, "self_attn.kv_a_proj_with_mqa", x).split([config.kv_lora_rank, widths[1]], -1)
        both = self.linear(w, "self_attn.kv_b_proj", self._latents(w, "kv_a", latents))
        if config.q_lora_rank:
            x, last = self._latents(w, "q_a", self.linear(w, "self_attn.q_a_proj", x)), "q_b_proj"
        queries = self.linear(w, f"self_attn.{last}", x).unflatten(-1, (-1, sum(widths)))
        still, turning = queries.split(widths, -1)
        k, v = both.unflatten(-1, (-1, widths[0] + config.v_head_dim)).split([widths[0], config.v_head_dim], -1)
        turned, key = rope(turning[..., pairs], key[..., None, pairs], self.cos, self.sin)
        q, k = torch.cat([still, turned], -1), torch.cat([k, key.expand_as(turned)], -1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, L, width)
        scale = sum(widths) ** -0.5 * config.rope.softmax_factor
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2).flatten(2)

    def _latents(self, w: Weights, which: str, x: Tensor) -> Tensor:
        return rms_norm(x, w(f"self_attn.{which}_layernorm.weight"), LATENT_EPS)

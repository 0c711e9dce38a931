"""Gemma 4: layers of attention over a window and, between them, over all tokens with wider heads, whose values are what
keys are made of; each layer has four norms, and a dense MLP, beside which a mixture of experts may read the same rows.

Shapes: T tokens of all sequences, packed; H hidden size; D width of a head. Devices, splits over ranks and weight
formats are handled by the layers.
"""

from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM, DecoderOptions
from umbra.models.gemma4.config import AttentionSizes, Gemma4Config
from umbra.models.layers.attention import PagedAttention, kv_shard
from umbra.models.layers.base import Vector
from umbra.models.layers.experts import Experts
from umbra.models.layers.linear import MergedLinear, RowLinear, Source
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.norm import DirectNorm, RMSNorm, WeightlessNorm
from umbra.models.layers.router import ExpertFactors, Router
from umbra.models.layers.streams import Carried
from umbra.ops.interface import ExpertKind, Routed


class Gemma4Attention(nn.Module):
    """Scores are not scaled: heads of queries and keys have norms with a weight, those of values one without."""

    def __init__(self, config: Gemma4Config, build: Build, sizes: AttentionSizes):
        super().__init__()
        dim, tp, hidden, eps = sizes.head_dim, build.parallel.attn_tp, config.hidden_size, config.rms_norm_eps
        q_rows, kv_rows = sizes.heads * dim, sizes.kv_heads * dim
        q_part, kv_part = tp.part(q_rows), kv_shard(tp, sizes.kv_heads).part(kv_rows)
        names = ("k_proj",) if sizes.keys_are_values else ("k_proj", "v_proj")
        sources = [Source("q_proj", q_rows, q_part), *(Source(name, kv_rows, kv_part) for name in names)]
        self.ops, self.head_dim, self.keys_are_values = build.ops, dim, sizes.keys_are_values
        self.qkv_proj = MergedLinear(build, hidden, sources)
        self.sizes = [source.kept for source in sources]
        self.q_norm, self.k_norm = RMSNorm(build, dim, eps), RMSNorm(build, dim, eps)
        self.v_norm = WeightlessNorm(build, dim, eps)
        heads, kv_heads = self.sizes[0] // dim, self.sizes[1] // dim
        self.attention = PagedAttention(build, heads, kv_heads, dim, sizes.window, scale=1.0)
        self.o_proj = RowLinear(build, "o_proj", q_rows, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        parts = self.qkv_proj(x, batch).split(self.sizes, 1)
        q, k, *values = (part.unflatten(1, (-1, self.head_dim)) for part in parts)  # (T, heads, D)
        v = self.v_norm(k if self.keys_are_values else values[0])
        q, k = self.ops.rope(self.q_norm(q), self.k_norm(k), cos, sin)
        return self.o_proj(self.attention(q, k, v, batch), batch)


class Gemma4Router(nn.Module):
    """The softmax over all experts, of which the chosen ones' sum is one before each is multiplied by its own factor.
    Rows are normalised without regard to the layer's own norms."""

    def __init__(self, config: Gemma4Config, build: Build):
        super().__init__()
        self.ops, self.top_k, hidden = build.ops, config.num_experts_per_tok, config.hidden_size
        self.scale = DirectNorm(build, hidden, config.rms_norm_eps, factor=hidden**-0.5)
        self.proj = Router(build.at("proj"), hidden, config.num_experts)
        self.per_expert_scale = ExpertFactors(build, config.num_experts)

    def forward(self, x: Tensor) -> Routed:
        factors = self.per_expert_scale.values
        return self.ops.route_softmax(self.proj(self.scale(x)), self.top_k, renormalise=True, factors=factors)


class Gemma4DecoderLayer(nn.Module):
    def __init__(self, config: Gemma4Config, build: Build, full: bool, sparse: bool):
        super().__init__()
        self.ops, hidden, self.rotary_table = build.ops, config.hidden_size, int(full)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(build.at(name), hidden, config.rms_norm_eps)

        self.input_layernorm = norm("input_layernorm")
        self.self_attn = Gemma4Attention(config, build.at("self_attn"), config.attention_of(full))
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.mlp = GatedMLP(build.at("mlp"), hidden, config.intermediate_size, gelu=True)
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.layer_scalar = Vector(build.vector(1), mean=1.0)
        self.experts = None
        if sparse:
            self.post_feedforward_layernorm_1 = norm("post_feedforward_layernorm_1")
            self.router = Gemma4Router(config, build.at("router"))
            self.pre_feedforward_layernorm_2 = norm("pre_feedforward_layernorm_2")
            kind = ExpertKind(gelu=True)
            self.experts = Experts(build, config.num_experts, hidden, config.moe_intermediate_size, kind=kind)
            self.post_feedforward_layernorm_2 = norm("post_feedforward_layernorm_2")

    def forward(self, carried: Carried, cos: Tensor, sin: Tensor, batch: Batch) -> Carried:
        """`carried` is a sum, before and after: it is multiplied."""
        attended = self.self_attn(self.input_layernorm(*carried), cos, sin, batch)
        attended = self.post_attention_layernorm(attended)
        attended, (x,), batch = batch.wanted(attended, carried)
        y, x = self.pre_feedforward_layernorm.add(attended, x)
        y = self.mlp(y, batch)
        if self.experts is None:
            y = self.post_feedforward_layernorm(y)
        else:
            routed, rows = self.router(x), self.pre_feedforward_layernorm_2(x)
            mixed = self.post_feedforward_layernorm_2(self.experts(rows, routed, batch))
            y, _ = self.post_feedforward_layernorm.add(self.post_feedforward_layernorm_1(y), mixed)
        return (self.ops.scale_by(self.ops.add_gated(x, y, None), self.layer_scalar.values),)


class Gemma4ForCausalLM(CausalLM):
    def __init__(self, config: Gemma4Config, build: Build):
        layers = (
            Gemma4DecoderLayer(config, build.at(f"model.layers.{i}"), full, sparse)
            for i, (full, sparse) in enumerate(zip(config.full_layers, config.sparse_layers, strict=True))
        )
        ropes = ((config.full.rope, config.full.head_dim),)
        options = DecoderOptions(ropes, config.hidden_size**0.5, config.final_logit_softcapping)
        super().__init__(config, build, layers, options=options)

    def ignores(self, name: str) -> bool:
        """Also what sees pictures and hears."""
        other = ("model.vision_", "model.audio_", "model.embed_vision.", "model.embed_audio.")
        return super().ignores(name) or name.startswith(other)

"""Gemma 4: layers of attention over a window and, between them, over all tokens with wider heads, whose values are what
keys are made of; each layer has four norms, and a dense MLP, beside which a mixture of experts may read the same rows.

Shapes: T tokens of all sequences, packed; H hidden size; D width of a head. Devices, splits over ranks and weight
formats are handled by the layers.
"""

import re
from collections.abc import Mapping

from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM, DecoderOptions
from umbra.models.gemma4.config import AttentionSizes, Gemma4Config
from umbra.models.layers.attention import CacheReader, PagedAttention, kv_shard
from umbra.models.layers.base import Vector
from umbra.models.layers.embedding import VocabEmbedding
from umbra.models.layers.experts import Experts
from umbra.models.layers.linear import MergedLinear, RowLinear, Source
from umbra.models.layers.mlp import GatedMLP
from umbra.models.layers.norm import RMSNorm, ScaledNorm, WeightlessNorm
from umbra.models.layers.router import ExpertFactors, Router
from umbra.models.layers.streams import SUMMED, Carried
from umbra.ops.interface import ExpertKind, Routed
from umbra.ops.parallel.rows import GroupRows

OWN_KEYS = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")


class Gemma4Attention(nn.Module):
    """Scores are not scaled: heads of queries and keys have norms with a weight, those of values one without. With a
    `source` it reads the keys and values that are kept there, and has none."""

    attention: PagedAttention  # unless there is a source

    def __init__(self, config: Gemma4Config, build: Build, sizes: AttentionSizes, source: PagedAttention | None):
        super().__init__()
        dim, tp, hidden, eps = sizes.head_dim, build.parallel.attn_tp, config.hidden_size, config.rms_norm_eps
        q_rows, kv_rows = sizes.heads * dim, sizes.kv_heads * dim
        q_part, kv_part = tp.part(q_rows), kv_shard(tp, sizes.kv_heads).part(kv_rows)
        names = () if source else ("k_proj",) if sizes.keys_are_values else ("k_proj", "v_proj")
        sources = [Source("q_proj", q_rows, q_part), *(Source(name, kv_rows, kv_part) for name in names)]
        self.ops, self.head_dim, self.keys_are_values = build.ops, dim, sizes.keys_are_values
        self.qkv_proj = MergedLinear(build, hidden, sources)
        self.sizes = [source.kept for source in sources]
        self.q_norm = RMSNorm(build, dim, eps)
        if source:
            self.reader = CacheReader(source)
        else:
            self.k_norm, self.v_norm = RMSNorm(build, dim, eps), WeightlessNorm(build, dim, eps)
            heads, kv_heads = self.sizes[0] // dim, self.sizes[1] // dim
            self.attention = PagedAttention(build, heads, kv_heads, dim, sizes.window, scale=1.0)
        self.o_proj = RowLinear(build, "o_proj", q_rows, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        parts = self.qkv_proj(x, batch).split(self.sizes, 1)
        q, *keys_and_values = (part.unflatten(1, (-1, self.head_dim)) for part in parts)  # (T, heads, D)
        q = self.q_norm(q)
        if not keys_and_values:
            q, _ = self.ops.rope(q, q[:, :1], cos, sin)
            return self.o_proj(self.reader(q, batch), batch)
        k, *values = keys_and_values
        v = self.v_norm(k if self.keys_are_values else values[0])
        q, k = self.ops.rope(q, self.k_norm(k), cos, sin)
        return self.o_proj(self.attention(q, k, v, batch), batch)


class Gemma4Router(nn.Module):
    """The softmax over all experts, of which the chosen ones' sum is one before each is multiplied by its own factor.
    Rows are normalised without regard to the layer's own norms."""

    def __init__(self, config: Gemma4Config, build: Build):
        super().__init__()
        self.ops, self.top_k, hidden = build.ops, config.num_experts_per_tok, config.hidden_size
        self.scale = ScaledNorm(build, hidden, config.rms_norm_eps, factor=hidden**-0.5)
        self.proj = Router(build.at("proj"), hidden, config.num_experts)
        self.per_expert_scale = ExpertFactors(build, config.num_experts)

    def forward(self, x: Tensor) -> Routed:
        factors = self.per_expert_scale.values
        return self.ops.route_softmax(self.proj(self.scale(x)), self.top_k, renormalise=True, factors=factors)


class PerLayerInputs:
    """For each layer, a row of a token's own and one of its embedding, added. Their factors are in a table's scale and
    a norm's weight and epsilon: rows of the embedding are divided by the root of H before the norm, and both by that
    of two."""

    def __init__(self, config: Gemma4Config, build: Build):
        hidden, self.width, layers = config.hidden_size, config.layer_inputs, config.num_hidden_layers
        self.ops, columns = build.ops, layers * self.width
        self.table = VocabEmbedding(build, config.vocab_size, columns, (self.width / 2) ** 0.5)
        source = Source("per_layer_model_projection", columns, slice(0, columns))
        self.projection = MergedLinear(build.at("model"), hidden, [source], floats=True)
        self.norm = ScaledNorm(build, self.width, hidden * config.rms_norm_eps, 0.5**0.5, ".weight")

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        return {
            "embed_tokens_per_layer": self.table,
            "per_layer_model_projection": self.projection,
            "per_layer_projection_norm": self.norm,
        }

    def make(self, token_ids: Tensor, embedded: Tensor, rows: GroupRows) -> Tensor:
        """Returns the inputs of all layers side by side."""
        projected = self.projection.of_all_rows(embedded)
        normed: Tensor = self.norm(projected.unflatten(1, (-1, self.width))).flatten(1)
        return self.ops.add_gated(normed, rows.own(self.table(token_ids)), None)


class Gemma4DecoderLayer(nn.Module):
    """`source` keeps the keys and values that this layer reads, if it has none of its own."""

    def __init__(self, config: Gemma4Config, build: Build, number: int, source: PagedAttention | None):
        super().__init__()
        full, sparse = config.full_layers[number], config.sparse_layers[number]
        self.ops, hidden, self.rotary_table = build.ops, config.hidden_size, int(full)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(build.at(name), hidden, config.rms_norm_eps)

        self.input_layernorm = norm("input_layernorm")
        self.self_attn = Gemma4Attention(config, build.at("self_attn"), config.attention_of(full), source)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        inner = config.intermediate_size * (2 if source and config.wide else 1)
        self.mlp = GatedMLP(build.at("mlp"), hidden, inner, gelu=True)
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.layer_scalar = Vector(build.vector(1), mean=1.0)
        self.own_columns = None
        if width := config.layer_inputs:
            self.own_columns = slice(number * width, (number + 1) * width)
            self.per_layer_input_gate, self.per_layer_projection = (
                MergedLinear(build, inputs, [Source(name, rows, slice(0, rows))], floats=True)
                for name, inputs, rows in (
                    ("per_layer_input_gate", hidden, width),
                    ("per_layer_projection", width, hidden),
                )
            )
            self.post_per_layer_input_norm = norm("post_per_layer_input_norm")
        self.experts = None
        if sparse:
            self.post_feedforward_layernorm_1 = norm("post_feedforward_layernorm_1")
            self.router = Gemma4Router(config, build.at("router"))
            self.pre_feedforward_layernorm_2 = norm("pre_feedforward_layernorm_2")
            kind = ExpertKind(gelu=True)
            self.experts = Experts(build, config.num_experts, hidden, config.moe_intermediate_size, kind=kind)
            self.post_feedforward_layernorm_2 = norm("post_feedforward_layernorm_2")

    def forward(self, carried: Carried, cos: Tensor, sin: Tensor, batch: Batch) -> Carried:
        """`carried` is a sum, before and after, which is multiplied; the inputs of all layers may follow it."""
        attended = self.self_attn(self.input_layernorm(carried[0]), cos, sin, batch)
        attended = self.post_attention_layernorm(attended)
        attended, (x, *inputs), batch = batch.wanted(attended, carried)
        y, x = self.pre_feedforward_layernorm.add(attended, x)
        y = self.mlp(y, batch)
        if self.experts is None:
            y = self.post_feedforward_layernorm(y)
        else:
            routed, rows = self.router(x), self.pre_feedforward_layernorm_2(x)
            mixed = self.post_feedforward_layernorm_2(self.experts(rows, routed, batch))
            y, _ = self.post_feedforward_layernorm.add(self.post_feedforward_layernorm_1(y), mixed)
        x = self.ops.add_gated(x, y, None)
        if self.own_columns:
            gate = self.per_layer_input_gate.of_all_rows(x)
            y = self.per_layer_projection.of_all_rows(self.ops.gelu_mul(gate, inputs[0][:, self.own_columns]))
            x = self.ops.add_gated(x, self.post_per_layer_input_norm(y), None)
        return self.ops.scale_by(x, self.layer_scalar.values), *inputs


class Gemma4ForCausalLM(CausalLM):
    def __init__(self, config: Gemma4Config, build: Build):
        first_shared = config.num_hidden_layers - config.shared_layers
        layers, sources = list[nn.Module](), dict[bool, PagedAttention]()
        for number, full in enumerate(config.full_layers):
            source = sources[full] if number >= first_shared else None
            layers.append(layer := Gemma4DecoderLayer(config, build.at(f"model.layers.{number}"), number, source))
            if source is None:
                sources[full] = layer.self_attn.attention
        ropes, softcap = ((config.full.rope, config.full.head_dim),), config.final_logit_softcapping
        inputs = PerLayerInputs(config, build) if config.layer_inputs else None
        options = DecoderOptions(ropes, config.hidden_size**0.5, softcap, SUMMED, inputs)
        super().__init__(config, build, layers, options=options)
        self.shared = range(first_shared, config.num_hidden_layers)

    def ignores(self, name: str) -> bool:
        """Also what sees pictures and hears, and keys and values of layers that read those of others."""
        other = ("model.vision_", "model.audio_", "model.embed_vision.", "model.embed_audio.")
        unused = OWN_KEYS.match(name)
        return super().ignores(name) or name.startswith(other) or bool(unused and int(unused[1]) in self.shared)

"""Qwen3-MoE (arXiv 2505.09388): grouped-query attention with per-head QK-norm, and a softmax-routed mixture of experts.

Shapes: T tokens of all sequences, packed; H hidden size; D head_dim. Devices, splits over ranks and weight formats are
handled by the layers.
"""

from torch import Tensor, nn

from executor.parallel.groups import Shard
from models.batch import Batch
from models.build import Build
from models.causal_lm import CausalLM
from models.layers.attention import PagedAttention
from models.layers.embedding import HEAD, LMHead, VocabEmbedding
from models.layers.experts import Experts
from models.layers.linear import MergedLinear, RowLinear, Source
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryTable
from models.qwen3_moe.config import Qwen3MoeConfig


class Attention(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, build: Build):
        super().__init__()
        dim, tp, bias = config.head_dim, build.parallel.attn_tp, config.attention_bias
        # If there are more ranks than KV heads, neighbouring ranks hold copies of the same head.
        kv_split = min(tp.size, config.num_key_value_heads)
        kv_shard = Shard(tp.rank * kv_split // tp.size, kv_split)
        q_rows, kv_rows = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.head_dim, self.ops = dim, build.ops
        self.qkv_proj = MergedLinear(
            build,
            config.hidden_size,
            [
                Source("q_proj", q_rows, tp.part(q_rows)),
                Source("k_proj", kv_rows, kv_shard.part(kv_rows)),
                Source("v_proj", kv_rows, kv_shard.part(kv_rows)),
            ],
            bias,
        )
        self.sizes = [source.kept for source in self.qkv_proj.sources]
        self.q_norm = RMSNorm(build, dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(build, dim, config.rms_norm_eps)
        self.attention = PagedAttention(build, self.sizes[1] // dim, dim)
        self.o_proj = RowLinear(build, "o_proj", tp, q_rows, config.hidden_size, bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv_proj(x).split(self.sizes, dim=-1))
        q, k = self.ops.rope(self.q_norm(q), self.k_norm(k), cos, sin)  # (T, heads, D), (T, kv_heads, D)
        return self.o_proj(self.attention(q, k, v, batch))


class DenseMLP(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, build: Build):
        super().__init__()
        tp, rows = build.parallel.attn_tp, config.intermediate_size
        self.ops = build.ops
        self.gate_up_proj = MergedLinear(
            build, config.hidden_size, [Source(name, rows, tp.part(rows)) for name in ("gate_proj", "up_proj")]
        )
        self.down_proj = RowLinear(build, "down_proj", tp, rows, config.hidden_size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.down_proj(self.ops.silu_mul(self.gate_up_proj(x)))


class SparseMoeBlock(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, build: Build):
        super().__init__()
        self.ops, self.top_k, self.renormalise = build.ops, config.num_experts_per_tok, config.norm_topk_prob
        self.gate = MergedLinear(
            build,
            config.hidden_size,
            [Source("gate", config.num_experts, slice(0, config.num_experts))],
            router=True,
        )
        self.experts = Experts(build, config.num_experts, config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        weights, ids = self.ops.route_softmax(self.gate(x), self.top_k, self.renormalise)
        return self.experts(x, weights, ids, batch)


class DecoderLayer(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, build: Build, sparse: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, build.at("self_attn"))
        self.post_attention_layernorm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)
        self.mlp = (SparseMoeBlock if sparse else DenseMLP)(config, build.at("mlp"))

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, cos, sin, batch)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x, batch), residual


class Decoder(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, build: Build):
        super().__init__()
        self.embed_tokens = VocabEmbedding(build, config.vocab_size, config.hidden_size)
        self.rotary = RotaryTable(build, config.rope)
        self.layers = nn.ModuleList(
            DecoderLayer(config, build.at(f"model.layers.{i}"), sparse) for i, sparse in enumerate(config.sparse_layers)
        )
        self.norm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        x, residual = self.embed_tokens(batch.token_ids), None  # (T, H)
        cos, sin = self.rotary(batch.positions)
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, batch)
        return self.norm.add(x, residual)[0]


class Qwen3MoeForCausalLM(CausalLM):
    def __init__(self, config: Qwen3MoeConfig, build: Build):
        super().__init__()
        self.model = Decoder(config, build)
        source = "model.embed_tokens.weight" if config.tie_word_embeddings else HEAD
        self.lm_head = LMHead(build, config.vocab_size, config.hidden_size, source)

    def prefill(self, batch: Batch) -> Tensor:
        x = self.model(batch)
        return self.lm_head(x if batch.logit_rows is None else x[batch.logit_rows])

    def decode(self, batch: Batch) -> Tensor:
        return self.lm_head(self.model(batch))

    def ignored_weights(self) -> frozenset[str]:
        return frozenset({HEAD} - {self.lm_head.source})  # some checkpoints contain a tied head's tensor too

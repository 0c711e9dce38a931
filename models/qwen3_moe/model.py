"""Qwen3-MoE (arXiv 2505.09388): grouped-query attention with per-head QK-norm, and a softmax-routed mixture of experts.

Shapes: T tokens of all sequences, packed; H hidden size; D head_dim. Devices, splits over ranks and weight formats are
handled by the layers.
"""

from torch import Tensor, nn

from models.batch import Batch
from models.build import Build
from models.causal_lm import CausalLM
from models.layers.attention import PagedAttention, kv_shard
from models.layers.experts import Experts
from models.layers.linear import MergedLinear, RowLinear, Source
from models.layers.norm import RMSNorm
from models.layers.router import Router
from models.qwen3_moe.config import Qwen3MoeConfig


class Attention(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, build: Build):
        super().__init__()
        dim, tp, bias = config.head_dim, build.parallel.attn_tp, config.attention_bias
        q_rows, kv_rows = config.num_attention_heads * dim, config.num_key_value_heads * dim
        kv_part = kv_shard(tp, config.num_key_value_heads).part(kv_rows)
        self.qkv_proj = MergedLinear(
            build,
            config.hidden_size,
            [
                Source("q_proj", q_rows, tp.part(q_rows)),
                Source("k_proj", kv_rows, kv_part),
                Source("v_proj", kv_rows, kv_part),
            ],
            bias,
        )
        heads, kv_heads, _ = (source.kept // dim for source in self.qkv_proj.sources)
        self.q_norm = RMSNorm(build, dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(build, dim, config.rms_norm_eps)
        self.attention = PagedAttention(build, heads, kv_heads, dim)
        self.o_proj = RowLinear(build, "o_proj", q_rows, config.hidden_size, bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv_proj(x, batch)
        return self.o_proj(self.attention.normed(qkv, self.q_norm, self.k_norm, cos, sin, batch), batch)


class DenseMLP(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, build: Build):
        super().__init__()
        tp, rows = build.parallel.attn_tp, config.intermediate_size
        self.ops = build.ops
        self.gate_up_proj = MergedLinear(
            build, config.hidden_size, [Source(name, rows, tp.part(rows)) for name in ("gate_proj", "up_proj")]
        )
        self.down_proj = RowLinear(build, "down_proj", rows, config.hidden_size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.down_proj(self.ops.silu_mul(self.gate_up_proj(x, batch)), batch)


class SparseMoeBlock(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, build: Build):
        super().__init__()
        self.ops, self.top_k, self.renormalise = build.ops, config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Router(build, config.hidden_size, config.num_experts)
        self.experts = Experts(build, config.num_experts, config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        routed = self.ops.route_softmax(self.gate(x), self.top_k, self.renormalise)
        return self.experts(x, routed, batch)


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
        x, residual, batch = batch.wanted(x, residual)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x, batch), residual


class Qwen3MoeForCausalLM(CausalLM):
    def __init__(self, config: Qwen3MoeConfig, build: Build):
        layers = (
            DecoderLayer(config, build.at(f"model.layers.{i}"), sparse) for i, sparse in enumerate(config.sparse_layers)
        )
        super().__init__(config, build, layers)

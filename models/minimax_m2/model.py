"""MiniMax-M2: grouped-query attention with one QK-norm over all heads and partial rotary embedding, and experts chosen
by sigmoid scores plus a bias that balances their load.

Shapes: T tokens of all sequences, packed; H hidden size; D head_dim; E experts. Devices, splits over ranks and weight
formats are handled by the layers.
"""

from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.causal_lm import CausalLM
from umbra.models.layers.attention import PagedAttention, kv_shard
from umbra.models.layers.decoder_layer import DecoderLayer
from umbra.models.layers.experts import Experts
from umbra.models.layers.linear import MergedLinear, RowLinear, Source
from umbra.models.layers.norm import SplitRMSNorm
from umbra.models.layers.rotary import head_order
from umbra.models.layers.router import Router, SelectionBias
from umbra.models.minimax_m2.config import MiniMaxM2Config
from umbra.ops.formats import FORMATS
from umbra.ops.interface import Rows


class Attention(nn.Module):
    def __init__(self, config: MiniMaxM2Config, build: Build):
        super().__init__()
        dim, tp = config.head_dim, build.parallel.attn_tp
        q_rows, kv_rows = config.num_attention_heads * dim, config.num_key_value_heads * dim
        q_part, kv_part = tp.part(q_rows), kv_shard(tp, config.num_key_value_heads).part(kv_rows)
        order = head_order(config.rope, dim)
        self.head_dim, self.ops = dim, build.ops
        self.qkv_proj = MergedLinear(
            build,
            config.hidden_size,
            [
                Source("q_proj", q_rows, q_part, order),
                Source("k_proj", kv_rows, kv_part, order),
                Source("v_proj", kv_rows, kv_part),
            ],
        )
        self.sizes = [source.kept for source in self.qkv_proj.sources]
        self.qk_norm = SplitRMSNorm(
            build,
            tp,
            [Source("q_norm", q_rows, q_part, order), Source("k_norm", kv_rows, kv_part, order)],
            config.rms_norm_eps,
        )
        self.attention = PagedAttention(build, self.sizes[0] // dim, self.sizes[1] // dim, dim)
        self.o_proj = RowLinear(build, "o_proj", q_rows, config.hidden_size)

    def forward(self, x: Rows, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv_proj(x, batch).split(self.sizes, dim=-1)
        q, k = self.qk_norm(q, k)  # over all heads of a token together, before they rotate
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))  # (T, heads, D), (T, kv_heads, D) twice
        q, k = self.ops.rope(q, k, cos, sin)
        return self.o_proj(self.attention(q, k, v, batch), batch)


class MiniMaxM2SparseMoeBlock(nn.Module):
    def __init__(self, config: MiniMaxM2Config, build: Build):
        super().__init__()
        self.ops, self.top_k, experts = build.ops, config.num_experts_per_tok, config.num_local_experts
        # Scores and bias in float32: in bfloat16 experts with nearly equal scores change places.
        self.gate = Router(build, config.hidden_size, experts, FORMATS["float32"])
        self.e_score_correction_bias = SelectionBias(build, experts) if config.use_routing_bias else None
        self.experts = Experts(build, experts, config.hidden_size, config.intermediate_size, names=("w1", "w3", "w2"))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        bias = self.e_score_correction_bias.values if self.e_score_correction_bias else None
        routed = self.ops.route_sigmoid(self.gate(x), bias, self.top_k, renormalise=True)
        return self.experts(x, routed, batch)


def decoder_layer(config: MiniMaxM2Config, build: Build) -> DecoderLayer:
    attention = Attention(config, build.at("self_attn"))
    mlp = MiniMaxM2SparseMoeBlock(config, build.at("block_sparse_moe"))
    return DecoderLayer(build, config.hidden_size, config.rms_norm_eps, attention, mlp, mlp_name="block_sparse_moe")


class MiniMaxM2ForCausalLM(CausalLM):
    def __init__(self, config: MiniMaxM2Config, build: Build):
        depth = config.num_hidden_layers
        layers = (decoder_layer(config, build.at(f"model.layers.{i}")) for i in range(depth))
        super().__init__(config, build, layers, config.num_mtp_modules)

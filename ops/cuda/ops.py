"""The ops of ops/interface.py on a GPU: products by PyTorch, the rest by kernels/ where `kernels` is set, else by what
the ops mean.

What a captured step calls never waits for the device: no size depends on values."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from umbra.ops import reference
from umbra.ops.cpu import ops as cpu
from umbra.ops.cuda.grouped import grouped
from umbra.ops.cuda.layout import CudaLayout
from umbra.ops.cuda.unpack import unpack
from umbra.ops.cuda.weights import BlockExperts, FloatHeads, FloatMatrix, ResidentExperts
from umbra.ops.interface import LatentCache, LatentNorm, Paged, Recurrent
from umbra.ops.sampling import Choice


class CudaOps(CudaLayout):
    """With `kernels`, Triton's kernels compute what PyTorch has no fused op for; mixtures of at most `gemv_tokens`
    tokens are computed row by row, from the experts' blocks."""

    def __init__(self, dtype: torch.dtype, kernels: bool, gemv_tokens: int = 8):
        super().__init__(dtype)
        self.gemv_tokens = gemv_tokens
        self.kernels: Any = import_module("umbra.ops.cuda.kernels") if kernels else None
        of_rows: Any = self.kernels or reference
        self.rms_norm, self.add_rms_norm = of_rows.rms_norm, of_rows.add_rms_norm
        self.norm_rope_write, self.silu_mul = of_rows.norm_rope_write, of_rows.silu_mul
        self.unpack = self.kernels.unpack if self.kernels else unpack
        self.route_softmax, self.route_sigmoid = of_rows.route_softmax, of_rows.route_sigmoid

    def embedding(self, ids: Tensor, table: Tensor | FloatMatrix, first_id: int | None) -> Tensor:
        rows = table.data if isinstance(table, FloatMatrix) else table
        if first_id is None:
            return F.embedding(ids, rows)
        return reference.embedding(ids, rows, first_id)

    def linear(self, x: Tensor, weight: FloatMatrix, bias: Tensor | None) -> Tensor:
        y = F.linear(x.to(torch.promote_types(x.dtype, weight.data.dtype)), weight.data)
        return y if bias is None else (y + bias).to(y.dtype)

    def head_linear(self, x: Tensor, weights: FloatHeads) -> Tensor:
        return torch.bmm(x.transpose(0, 1), weights.data.transpose(1, 2)).transpose(0, 1)

    rope, write_kv = staticmethod(reference.rope), staticmethod(reference.write_kv)
    gelu_mul = staticmethod(reference.gelu_mul)
    softcap, scale_by = staticmethod(reference.softcap), staticmethod(reference.scale_by)

    def split_rms_norm(
        self,
        parts: Sequence[Tensor],
        weights: Sequence[Tensor],
        counts: Sequence[int],
        eps: float,
        total: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        squares = total(torch.stack([x.float().square().sum(-1) for x in parts]))  # (parts, T)
        return [
            (x.float() * torch.rsqrt(square / count + eps)[:, None] * weight.float()).to(x.dtype)
            for x, square, weight, count in zip(parts, squares.unbind(), weights, counts, strict=True)
        ]

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        paged: Paged,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        attend = self.kernels.attention if self.kernels else reference.attention
        out: Tensor = attend(q, k_cache, v_cache, paged, scale, window, sinks)
        return out

    write_latents = staticmethod(reference.write_latents)

    def rope_write_latents(
        self, q: Tensor, rows: Tensor, norm: LatentNorm, cache: LatentCache, slot_mapping: Tensor
    ) -> Tensor:
        return reference.rope_write_latents(q, rows, norm, cache, slot_mapping)

    def latent_attention(self, q: Tensor, q_rotary: Tensor, cache: LatentCache, paged: Paged, scale: float) -> Tensor:
        attend = self.kernels.latent_attention if self.kernels else reference.latent_attention
        out: Tensor = attend(q, q_rotary, cache, paged, scale)
        return out

    def expanded_attention(
        self,
        q: Tensor,
        q_rotary: Tensor,
        cache: LatentCache,
        keys: FloatHeads,
        values: FloatHeads,
        paged: Paged,
        scale: float,
    ) -> Tensor:
        """In the absorbed form, whose products are larger but need no keys and values of their own."""
        latents = torch.einsum("thk,hnk->thn", q, keys.data)
        attended = self.latent_attention(latents.contiguous(), q_rotary, cache, paged, scale)
        return torch.einsum("thn,hvn->thv", attended, values.data)

    add_gated, sigmoid_mul = staticmethod(reference.add_gated), staticmethod(reference.sigmoid_mul)
    gated_rms_norm = staticmethod(reference.gated_rms_norm)
    spread, stream_norm = staticmethod(reference.spread), staticmethod(reference.stream_norm)
    scaled_silu, gated_read = staticmethod(reference.scaled_silu), staticmethod(reference.gated_read)
    gated_write, sinkhorn_read = staticmethod(reference.gated_write), staticmethod(reference.sinkhorn_read)
    sinkhorn_write = staticmethod(reference.sinkhorn_write)

    def causal_conv(self, x: Tensor, weight: Tensor, states: Tensor, recurrent: Recurrent) -> Tensor:
        convolve = self.kernels.causal_conv if self.kernels else reference.causal_conv
        out: Tensor = convolve(x, weight, states, recurrent)
        return out

    def gated_delta_rule(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        rates: Tensor,
        dt_bias: Tensor,
        states: Tensor,
        inputs: Tensor,
        recurrent: Recurrent,
        lowest: float = 0.0,
    ) -> Tensor:
        rule = self.kernels.gated_delta_rule if self.kernels else reference.gated_delta_rule
        out: Tensor = rule(qkv, a, b, rates, dt_bias, states, inputs, recurrent, lowest)
        return out

    argmax = staticmethod(reference.argmax)

    def sample(self, logits: Tensor, choices: Sequence[Choice]) -> Tensor:
        """On the host, whose native kernel needs less time than the launches of a sort and a cumulative sum would."""
        return cpu.sample(logits.float().cpu(), choices).to(logits.device)

    def moe(
        self, x: Tensor, weights: Tensor, ids: Tensor, experts: BlockExperts | ResidentExperts, first_expert: int | None
    ) -> Tensor:
        if self.kernels and len(x) <= self.gemv_tokens:
            bank = experts.shape, experts.data, experts.places
            out: Tensor = self.kernels.mixture(x, weights, ids, *bank, first_expert or 0)
            return out
        return grouped(x, weights, ids, experts, first_expert, self.unpack)

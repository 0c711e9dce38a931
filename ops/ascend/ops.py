"""The ops of ops/interface.py, implemented by fused calls of torch_npu.

Every argument that all supported versions have is passed by name, because defaults differ between versions, such as
those of `quant_mode` of npu_moe_init_routing_v2 and `layout` of npu_apply_rotary_pos_emb.

Shapes and types are checked here only if neither the schemas nor the meta functions check them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
import torch_npu
import torchair
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops import composed, reference
from umbra.ops.ascend import latents, moe, recurrent, w8a8
from umbra.ops.ascend.attention import KvCaches, attend
from umbra.ops.ascend.cann import ALL_ABILITIES, Abilities, abilities
from umbra.ops.ascend.layout import CAUSAL_MASK, HEAD_DIMS, AscendLayout
from umbra.ops.ascend.tiles import TileBanks
from umbra.ops.ascend.vector_core import calls
from umbra.ops.ascend.vector_core.schemas import MOST_CHOSEN, MOST_SCORED
from umbra.ops.ascend.weights import AscendExperts, AscendHeads, AscendMatrix, Bank
from umbra.ops.cpu import ops as cpu
from umbra.ops.formats import Format
from umbra.ops.interface import (
    SILU_EXPERTS,
    ExpertKind,
    ExpertMatrices,
    Groups,
    Heads,
    LatentCache,
    LatentProlog,
    Ops,
    Paged,
    Rounded,
    RoundingNorm,
    Routed,
    Rows,
    Scores,
)
from umbra.ops.sampling import Choice

PROLOG_FORMAT = Format("bfloat16", tiled=True)  # of the matrices that npu_mla_prolog_v3 takes
MOST_ROTATED = 896  # columns of a head that npu_rotary_mul takes
FUSED_HEAD_DIM = 128  # the one that npu_qkv_rms_norm_rope_cache takes
TILED = "PA_NZ"  # cache_mode
SOFTMAX, SIGMOID = 0, 1  # values of norm_type
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
MOST_GATED = 2048  # experts that npu_moe_gating_top_k chooses from


def gates(experts: int, groups: Groups | None) -> bool:
    """Returns whether npu_moe_gating_top_k can choose among so many experts: it keeps groups in multiples of 32."""
    if groups is None:
        return experts <= MOST_GATED
    per_group = experts // groups.number
    return per_group >= groups.best and groups.number * -(-per_group // 32) * 32 <= MOST_GATED


def installed(cann: str | None) -> Abilities:
    """The abilities of this version of CANN with the installed torch_npu."""
    return abilities(cann, *(hasattr(torch_npu, op) for op in ("npu_qkv_rms_norm_rope_cache", "npu_mla_prolog_v3")))


class AscendOps(AscendLayout):
    """`moe` uses a routing of ops.ascend.moe.ROUTINGS. Steps of at most `gemv_tokens` tokens multiply by 4-bit weights
    on the vector cores, which keep these in planes; `float_sums` says how they add (ops/ascend/vector_core/schemas.py).
    Other products unpack the planes first, those of experts to `tiles`. `can` says what the installed CANN can do.
    `super_kernel` marks the kernels of a layer's experts for GE, which launches them as one."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        routing: str,
        gemv_tokens: int = 0,
        float_sums: bool = False,
        can: Abilities = ALL_ABILITIES,
        super_kernel: bool = False,
    ):
        super().__init__(dtype, can.tiled_cache, in_planes=gemv_tokens > 0)
        self.gemv_tokens, self.float_sums, self.can, self.super_kernel = gemv_tokens, float_sums, can, super_kernel
        # The type of npu_moe_finalize_routing's scales: float32 is taken with bfloat16 rows only.
        self.scales_type = torch.float32 if dtype == torch.bfloat16 else dtype
        self.route_experts, self.sum_rows = moe.ROUTINGS[routing], moe.SUMS[routing]
        self.tiles = TileBanks(dtype) if gemv_tokens else None
        self.mask = torch.ones(CAUSAL_MASK, CAUSAL_MASK, dtype=torch.bool, device=device).triu_(1)

    def expert_matrices(
        self, count: int, inner: int, hidden: int, format: Format, device: torch.device, kind: ExpertKind = SILU_EXPERTS
    ) -> AscendExperts:
        experts = super().expert_matrices(count, inner, hidden, format, device, kind)
        if self.tiles is not None and experts.w13.planes is not None:
            self.tiles.add(experts.w13)
            self.tiles.add(experts.w2)
        return experts

    def embedding(self, ids: Tensor, table: Tensor, first_id: int | None) -> Tensor:
        if first_id is None:
            return F.embedding(ids, table)
        local = ids - first_id
        away = (local < 0) | (local >= table.shape[0])
        return F.embedding(local.masked_fill(away, 0), table).masked_fill(away[:, None], 0)

    def few(self, tokens: int, weight: AscendMatrix | Bank) -> bool:
        """Returns whether the vector cores multiply `tokens` tokens by these weights."""
        planes = weight.planes if isinstance(weight, AscendMatrix) else weight.w13.planes
        return 0 < tokens <= self.gemv_tokens and planes is not None

    def linear(self, x: Tensor, weight: AscendMatrix, bias: Tensor | None) -> Tensor:
        if self.few(len(x), weight):
            return calls.linear(x, weight, bias, self.float_sums)
        if weight.format.spec.int8_inputs:
            return w8a8.linear(x, weight, bias)
        if weight.order is not None:
            x, data = x.index_select(1, weight.order), calls.unpacked(weight)
            return torch.mm(x, data) if bias is None else torch.addmm(bias, x, data)
        if weight.scales is not None:
            return torch_npu.npu_weight_quant_batchmatmul(
                x=x,
                weight=weight.data,
                antiquant_scale=weight.scales,
                antiquant_offset=weight.offsets,
                quant_scale=None,
                quant_offset=None,
                bias=bias,
                antiquant_group_size=weight.format.group,
                inner_precise=0,
            )
        if weight.data.dtype == torch.float32:
            x = x.float()
        return torch.mm(x, weight.data) if bias is None else torch.addmm(bias, x, weight.data)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        out: Tensor = torch_npu.npu_rms_norm(input=x, gamma=weight, epsilon=eps)[0]
        return out if bias is None else out + bias

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if weight.dtype != x.dtype:  # which only the norm alone takes
            total = x + residual
            return self.rms_norm(total, weight, eps, bias), total
        out, _, total = torch_npu.npu_add_rms_norm(x1=x, x2=residual, gamma=weight, epsilon=eps)
        return out if bias is None else out + bias, total

    def rounding_norm(self, reader: AscendMatrix) -> RoundingNorm | None:
        return self._rounding_norm if self.can.rounding_norm and reader.format.spec.int8_inputs else None

    def _rounding_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None
    ) -> tuple[Rows, Tensor]:
        if not len(x) or weight.dtype != x.dtype:  # a data-parallel group that has no prompt in this step
            return self.add_rms_norm(x, residual, weight, eps, bias)
        rows, scales, total = w8a8.add_rms_norm(x, residual, weight, eps, bias)
        return Rounded(partial(w8a8.product, rows, scales, x.dtype)), total

    def split_rms_norm(
        self,
        parts: Sequence[Tensor],
        weights: Sequence[Tensor],
        counts: Sequence[int],
        eps: float,
        total: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """Each part is normalised by its own mean square, then each row is multiplied by a factor. All parts of a
        vector are equally long, so the mean of their mean squares is that of the vector; eps is in both, so nothing is
        subtracted, and rows of zeros stay finite.

        A product of bfloat16 rows and float32 factors in PyTorch would convert the rows to float32 and back. The sum
        over one expert for each token is the same product, rounded once."""
        tokens = parts[0].shape[0]
        (ranks,) = {count // x.shape[1] for x, count in zip(parts, counts, strict=True)}
        normed = [torch_npu.npu_rms_norm(input=x, gamma=w, epsilon=eps) for x, w in zip(parts, weights, strict=True)]
        rstd = torch.cat([r.flatten() for _, r in normed])  # (parts * T) float32: (own mean square + eps) ** -0.5
        factors = (total(rstd.pow(-2) / ranks).rsqrt() / rstd).to(self.scales_type)
        rows = torch.arange(tokens, dtype=torch.int32, device=rstd.device)
        return [
            moe.weighted_sum(y, factor[:, None], rows, None, moe.BY_ROW)
            for (y, _), factor in zip(normed, factors.view(len(parts), tokens).unbind(), strict=True)
        ]

    def rope(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, of_queries: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        if (width := q.shape[-1]) not in HEAD_DIMS or of_queries:
            if width % 32 or width > MOST_ROTATED:
                raise UserError(f"head_dim: {width}: npu_rotary_mul takes multiples of 32 up to {MOST_ROTATED}")
            if not len(q):  # a data-parallel group that has no prompt in this step
                return q, k
            q, k = (
                torch_npu.npu_rotary_mul(input=x[None], r1=r1[None, :, None], r2=r2[None, :, None], rotary_mode="half")
                for x, (r1, r2) in ((q, of_queries or (cos, sin)), (k, (cos, sin)))
            )
            return q.squeeze(0), k.squeeze(0)
        # (T, 1, heads, D): a batch of T sequences of one token. The op rotates in place, although its schema does not
        # say so. This is safe, since q and k are new tensors, made by their norms or copied here from the columns of
        # their product, that nothing else reads.
        q, k = torch_npu.npu_apply_rotary_pos_emb(
            query=q.contiguous()[:, None],
            key=k.contiguous()[:, None],
            cos=cos[:, None, None],
            sin=sin[:, None, None],
            layout="BSND",
            rotary_mode="half",
        )
        return q.squeeze(1), k.squeeze(1)

    def norm_rope_write(
        self, qkv: Tensor, heads: Heads, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, out: Tensor | None
    ) -> Tensor:
        tokens, dim, kv_heads = len(qkv), len(heads.q_weight), heads.kv_heads
        if not self.tiled or dim != FUSED_HEAD_DIM or not tokens or not qkv.is_contiguous():
            return composed.norm_rope_write(cast(Ops, self), qkv, heads, k_cache, v_cache, slot_mapping)
        q_heads = qkv.shape[1] // dim - 2 * kv_heads
        if out is None:
            out = qkv.new_empty(tokens, q_heads * dim)
        torch_npu.npu_qkv_rms_norm_rope_cache(
            qkv=qkv,
            q_gamma=heads.q_weight,
            k_gamma=heads.k_weight,
            cos=heads.cos,
            sin=heads.sin,
            index=slot_mapping,
            q_out=out,
            k_cache=k_cache,
            v_cache=v_cache,
            qkv_size=[1, tokens, q_heads + 2 * kv_heads, dim],
            head_nums=[q_heads, kv_heads, kv_heads],
            k_scale=None,
            v_scale=None,
            k_offset=None,
            v_offset=None,
            epsilon=heads.eps,
            cache_mode=TILED,
            is_output_qkv=False,
        )
        return out.view(tokens, q_heads, dim)

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        if self.tiled:
            torch_npu.npu_scatter_pa_kv_cache(
                key=k,
                value=v,
                key_cache=k_cache,
                value_cache=v_cache,
                slot_mapping=slot_mapping,
                compress_lens=None,
                compress_seq_offsets=None,
                seq_lens=None,
                cache_mode=TILED,
            )
            return
        for x, cache in ((k, k_cache), (v, v_cache)):
            torch_npu.npu_scatter_nd_update_(input=cache, indices=slot_mapping, updates=x.flatten(1))

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
        caches = KvCaches(k_cache, v_cache, self.tiled)
        return attend(q, caches, paged, scale, window, sinks, self.mask, self.can.sinks)

    head_linear, rope_write_latents = staticmethod(latents.head_linear), staticmethod(latents.rope_write)

    def latent_attention(self, q: Tensor, q_rotary: Tensor, cache: LatentCache, paged: Paged, scale: float) -> Tensor:
        return latents.attend_latents(q, q_rotary, cache, paged, scale, self.mask)

    def latent_prolog(self, hidden: int, rank: int, heads: int, key: int, format: Format) -> LatentProlog | None:
        takes = latents.takes_prolog(hidden, rank, heads, key)
        return latents.prolog if takes and self.can.prolog and format == PROLOG_FORMAT else None

    def expanded_attention(
        self,
        q: Tensor,
        q_rotary: Tensor,
        cache: LatentCache,
        keys: AscendHeads,
        values: AscendHeads,
        paged: Paged,
        scale: float,
    ) -> Tensor:
        return latents.attend_expanded(q, q_rotary, cache, keys, values, paged, scale, self.mask)

    def silu_mul(self, x: Tensor) -> Tensor:
        return moe.swiglu(x)

    def gelu_mul(self, x: Tensor, up: Tensor | None = None) -> Tensor:
        return moe.gelu_mul(x, up)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def scale_by(self, x: Tensor, factor: Tensor) -> Tensor:
        return x.mul_(factor)

    def add_gated(self, x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
        return x.add_(y) if gate is None else x.addcmul_(y, gate.sigmoid())

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return x.mul_(gate.sigmoid())

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
        """One kernel multiplies by silu of the gate, rounding once; it takes both side by side."""
        if not len(x):
            return x
        if sigmoid:
            return self.rms_norm(x, weight, eps).mul_(gate.sigmoid())
        return moe.swiglu(torch.cat((gate, self.rms_norm(x, weight, eps)), -1))

    spread, stream_norm = staticmethod(reference.spread), staticmethod(reference.stream_norm)
    scaled_silu, gated_read = staticmethod(reference.scaled_silu), staticmethod(reference.gated_read)
    gated_write, sinkhorn_read = staticmethod(reference.gated_write), staticmethod(reference.sinkhorn_read)
    sinkhorn_write = staticmethod(reference.sinkhorn_write)
    causal_conv = staticmethod(recurrent.causal_conv)
    gated_delta_rule = staticmethod(recurrent.gated_delta_rule)

    def route_softmax(
        self,
        logits: Tensor,
        top_k: int,
        renormalise: bool,
        scale: float = 1.0,
        groups: Groups | None = None,
        factors: Tensor | None = None,
    ) -> Routed:
        choose = partial(self.choose_softmax, top_k=top_k, renormalise=renormalise, scale=scale, groups=groups)
        if factors is not None:
            weights, ids = choose(logits)
            return (weights * factors[ids]).to(self.dtype), ids
        plain = renormalise and scale == 1 and groups is None
        return self._routed(logits, None, top_k, plain, False, choose)

    def route_sigmoid(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        renormalise: bool,
        scale: float = 1.0,
        groups: Groups | None = None,
    ) -> Routed:
        choose = partial(
            self.choose_sigmoid, bias=bias, top_k=top_k, renormalise=renormalise, scale=scale, groups=groups
        )
        plain = renormalise and scale == 1 and groups is None
        return self._routed(logits, bias, top_k, plain, True, choose)

    def _routed(
        self, logits: Tensor, bias: Tensor | None, top_k: int, plain: bool, sigmoid: bool, choose: Choose
    ) -> Routed:
        """Leaves the choice to the mixture where that may be a kernel that chooses: of all experts, with weights that
        sum to one."""
        if not (self.gemv_tokens and plain and top_k <= MOST_CHOSEN and logits.shape[1] <= MOST_SCORED):
            return choose(logits)

        def mixture(x: Tensor, scores: Tensor, experts: ExpertMatrices, first_expert: int | None) -> Tensor:
            bank = cast(Bank, experts)
            if not self.few(len(x), bank):
                return self.moe(x, *choose(scores), bank, first_expert)
            y = calls.moe_of_scores(x, scores, bias, top_k, sigmoid, bank, first_expert, self.float_sums)
            self.read_ahead(bank, y)
            return y

        return Scores(logits, choose, mixture)

    def choose_softmax(
        self, logits: Tensor, top_k: int, renormalise: bool, scale: float = 1.0, groups: Groups | None = None
    ) -> tuple[Tensor, Tensor]:
        """Weights are in the model's type, ids are int32."""
        gated = self.can.renormalised if renormalise else groups is not None or scale != 1
        if gated and gates(logits.shape[1], groups):
            return self._gated(logits, None, top_k, int(renormalise), SOFTMAX, scale, groups)
        if groups:
            scores = logits.softmax(-1)
            return self._plainly(scores, scores, top_k, renormalise, scale, groups)
        weights, ids, _ = torch_npu.npu_moe_gating_top_k_softmax(x=logits, finished=None, k=top_k)
        weights = weights / weights.sum(-1, keepdim=True) if renormalise else weights
        return (weights * scale if scale != 1 else weights).to(self.dtype), ids

    def choose_sigmoid(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        renormalise: bool,
        scale: float = 1.0,
        groups: Groups | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weights are in the model's type, ids are int32."""
        if renormalise and gates(logits.shape[1], groups):  # as the fused op does, whatever `renorm` is
            return self._gated(logits, bias, top_k, 0, SIGMOID, scale, groups)
        scores = logits.sigmoid()
        return self._plainly(scores, scores if bias is None else scores + bias, top_k, renormalise, scale, groups)

    def _plainly(
        self, scores: Tensor, ordered: Tensor, top_k: int, renormalise: bool, scale: float, groups: Groups | None
    ) -> tuple[Tensor, Tensor]:
        if groups:
            by_group = ordered.unflatten(-1, (groups.number, -1))
            kept = by_group.topk(min(groups.best, by_group.shape[-1]), -1).values.sum(-1).topk(groups.kept, -1).indices
            lost = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(-1, kept, False)
            ordered = by_group.masked_fill(lost[..., None], -torch.inf).flatten(-2)
        ids = ordered.topk(top_k, dim=-1).indices
        del ordered  # its memory
        weights = scores.gather(-1, ids)
        weights = weights / weights.sum(-1, keepdim=True) if renormalise else weights
        return (weights * scale if scale != 1 else weights).to(self.dtype), ids.int()

    def _gated(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        renorm: int,
        norm_type: int,
        scale: float,
        groups: Groups | None,
    ) -> tuple[Tensor, Tensor]:
        if not len(logits):  # a data-parallel group that has no prompt in this step
            return logits.new_empty(0, top_k, dtype=self.dtype), logits.new_empty(0, top_k, dtype=torch.int32)
        number, kept, best = groups or Groups(1, 1, 1)
        weights, ids, _ = torch_npu.npu_moe_gating_top_k(
            x=logits,
            k=top_k,
            bias=bias,
            k_group=kept,
            group_count=number,
            group_select_mode=best - 1,
            renorm=renorm,
            norm_type=norm_type,
            out_flag=False,
            routed_scaling_factor=scale,
            eps=1e-20,
        )
        return weights.to(self.dtype), ids

    def argmax(self, x: Tensor) -> Tensor:
        return x.argmax(-1)

    def sample(self, logits: Tensor, choices: Sequence[Choice]) -> Tensor:
        """On the host: the native kernel needs less time than the launches of a sort and a cumulative sum would."""
        return cpu.sample(logits.float().cpu(), choices).to(logits.device)

    def moe(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Bank, first_expert: int | None) -> Tensor:
        moe.check_ids(ids)
        if self.few(len(x), experts):
            y = calls.moe(x, weights, ids, experts, first_expert, self.float_sums)
        else:
            y = self._grouped(x, weights, ids, experts, first_expert)
        self.read_ahead(experts, y)
        return y

    def read_ahead(self, experts: Bank, y: Tensor) -> None:
        """Reads the weight that is wanted next into the cache, once `y` is computed."""
        if isinstance(experts, AscendExperts) and experts.ahead and torch.compiler.is_compiling():
            ahead = experts.ahead.data
            torch_npu.npu_prefetch(input=ahead, dependency=y, max_size=ahead.nbytes, offset=0)

    def one_kernel(self, experts: Bank) -> AbstractContextManager[None]:
        """Context of the kernels of a layer's experts, which GE launches as one if `super_kernel` is set."""
        marked = self.super_kernel and torch.compiler.is_compiling()
        return torchair.scope.super_kernel(f"experts{experts.number}") if marked else nullcontext()

    def _grouped(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Bank, first_expert: int | None) -> Tensor:
        with self.one_kernel(experts):
            if experts.w13.order is not None:
                x = x.index_select(1, experts.w13.order)
            if first_expert is not None:
                weights, ids = moe.resident(weights, ids, first_expert, experts.count)
            return self.route_experts(x, weights, ids, experts, self.can)

"""The abilities of each version of CANN that the choice of ops depends on. The oldest that is supported is 8.5."""

import re
from dataclasses import dataclass

RENORMALISED_GATING_SINCE = (9, 0)  # earlier ones refuse to renormalise the softmax of npu_moe_gating_top_k
TILED_CACHE_SINCE = (9, 0)  # the oldest version with npu_qkv_rms_norm_rope_cache, and attention over tiled caches
OPTIONAL_OFFSETS_SINCE = (9, 0)  # npu_grouped_matmul by 4-bit weights refuses them without offsets before that
SINKS_SINCE = (8, 5)  # npu_fused_infer_attention_score_v2 takes learnable_sink
CLIPPED_SWIGLU_SINCE = (8, 5)  # npu_clipped_swiglu
FUSED_SWIGLU_SINCE = (8, 5)  # npu_grouped_matmul_swiglu_quant_v2
ROUNDING_NORM_SINCE = (8, 5)  # npu_add_rms_norm_dynamic_quant
PROLOG_SINCE = (8, 5)  # npu_mla_prolog_v3
HOST_FUNC_SINCE = (8, 5)  # an unknown version may be an earlier one, which forbids aclrtLaunchHostFunc in captures


@dataclass(frozen=True)
class Abilities:
    """`renormalised`: npu_moe_gating_top_k renormalises a softmax; `tiled_cache`: KV caches in tiles; `sinks`:
    attention takes them, in bfloat16; `clipped`: a clipped SwiGLU is one op; `fused_swiglu`: a grouped product by int8,
    its SwiGLU and the rounding of that are one op; `rounding_norm`: so are a norm and the rounding of its rows;
    `prolog`: so is all that precedes attention over latents."""

    renormalised: bool
    tiled_cache: bool
    sinks: bool
    clipped: bool
    fused_swiglu: bool
    rounding_norm: bool
    prolog: bool


ALL_ABILITIES = Abilities(
    renormalised=True, tiled_cache=True, sinks=True, clipped=True, fused_swiglu=True, rounding_norm=True, prolog=True
)


def abilities(cann: str | None, newer_ops: bool = True, ops_of_2_9: bool = True) -> Abilities:
    """`cann` is a version such as 8.3.RC1; None: unknown, which counts as older than all others. `newer_ops` says
    whether torch_npu is 2.10 or later: it then has the ops for tiled caches, and the arguments of
    npu_grouped_matmul_swiglu_quant_v2 and npu_add_rms_norm_dynamic_quant are today's. `ops_of_2_9`: it is
    2.9 or later and has npu_clipped_swiglu and npu_mla_prolog_v3."""
    return Abilities(
        renormalised=since(cann, RENORMALISED_GATING_SINCE),
        tiled_cache=newer_ops and since(cann, TILED_CACHE_SINCE),
        sinks=since(cann, SINKS_SINCE),
        clipped=ops_of_2_9 and since(cann, CLIPPED_SWIGLU_SINCE),
        fused_swiglu=newer_ops and since(cann, FUSED_SWIGLU_SINCE),
        rounding_norm=newer_ops and since(cann, ROUNDING_NORM_SINCE),
        prolog=ops_of_2_9 and since(cann, PROLOG_SINCE),
    )


def since(cann: str | None, series: tuple[int, int]) -> bool:
    match = re.match(r"(\d+)\.(\d+)", cann or "")
    return match is not None and (int(match[1]), int(match[2])) >= series

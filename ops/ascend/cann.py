"""What a version of CANN can do, as far as the choice of ops depends on it."""

import re
from dataclasses import dataclass

SIGMOID_GATING_SINCE = (8, 3)  # earlier versions of npu_moe_gating_top_k choose only as DeepSeek-V3 does
RENORMALISED_GATING_SINCE = (9, 0)  # earlier ones refuse to renormalise the softmax of npu_moe_gating_top_k
TILED_CACHE_SINCE = (9, 0)  # the oldest version with npu_qkv_rms_norm_rope_cache, and attention over tiled caches
FLOAT_SCALES_SINCE = (8, 5)  # the oldest version whose documents allow float32 scales of bfloat16 rows
OPTIONAL_OFFSETS_SINCE = (9, 0)  # npu_grouped_matmul by 4-bit weights refuses them without offsets before that
HOST_FUNC_SINCE = (8, 5)  # earlier versions forbid aclrtLaunchHostFunc during a capture


@dataclass(frozen=True)
class Abilities:
    """`gating`: npu_moe_gating_top_k with any number of experts; `renormalised`: it renormalises a softmax;
    `float_scales`: npu_moe_finalize_routing of bfloat16 rows with float32 scales; `tiled_cache`: KV caches in tiles."""

    gating: bool
    renormalised: bool
    float_scales: bool
    tiled_cache: bool


ALL_ABILITIES = Abilities(gating=True, renormalised=True, float_scales=True, tiled_cache=True)


def abilities(cann: str | None, tiled_ops: bool = True) -> Abilities:
    """`cann` is a version such as 8.3.RC1; None: unknown, which counts as older than all others. `tiled_ops` says
    whether torch_npu has the ops for tiled caches, which are in 2.10 and later."""
    return Abilities(
        gating=since(cann, SIGMOID_GATING_SINCE),
        renormalised=since(cann, RENORMALISED_GATING_SINCE),
        float_scales=since(cann, FLOAT_SCALES_SINCE),
        tiled_cache=tiled_ops and since(cann, TILED_CACHE_SINCE),
    )


def since(cann: str | None, series: tuple[int, int]) -> bool:
    found = re.match(r"(\d+)\.(\d+)", cann or "")
    return found is not None and (int(found[1]), int(found[2])) >= series

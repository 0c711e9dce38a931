"""The abilities of each version of CANN that the choice of ops depends on. The oldest that is supported is 8.5."""

import re
from dataclasses import dataclass

RENORMALISED_GATING_SINCE = (9, 0)  # earlier ones refuse to renormalise the softmax of npu_moe_gating_top_k
TILED_CACHE_SINCE = (9, 0)  # the oldest version with npu_qkv_rms_norm_rope_cache, and attention over tiled caches
OPTIONAL_OFFSETS_SINCE = (9, 0)  # npu_grouped_matmul by 4-bit weights refuses them without offsets before that
HOST_FUNC_SINCE = (8, 5)  # an unknown version may be an earlier one, which forbids aclrtLaunchHostFunc in captures


@dataclass(frozen=True)
class Abilities:
    """`renormalised`: npu_moe_gating_top_k renormalises a softmax; `tiled_cache`: KV caches in tiles."""

    renormalised: bool
    tiled_cache: bool


ALL_ABILITIES = Abilities(renormalised=True, tiled_cache=True)


def abilities(cann: str | None, tiled_ops: bool = True) -> Abilities:
    """`cann` is a version such as 8.3.RC1; None: unknown, which counts as older than all others. `tiled_ops` says
    whether torch_npu has the ops for tiled caches, which are in 2.10 and later."""
    return Abilities(
        renormalised=since(cann, RENORMALISED_GATING_SINCE),
        tiled_cache=tiled_ops and since(cann, TILED_CACHE_SINCE),
    )


def since(cann: str | None, series: tuple[int, int]) -> bool:
    found = re.match(r"(\d+)\.(\d+)", cann or "")
    return found is not None and (int(found[1]), int(found[2])) >= series

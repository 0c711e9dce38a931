"""What a version of CANN can do, as far as the choice of ops depends on it."""

import re
from dataclasses import dataclass

SIGMOID_GATING_SINCE = (8, 3)  # earlier versions of npu_moe_gating_top_k choose only as DeepSeek-V3 does
FLOAT_SCALES_SINCE = (8, 5)  # the oldest version whose documents allow float32 scales of bfloat16 rows
OPTIONAL_OFFSETS_SINCE = (9, 0)  # npu_grouped_matmul by 4-bit weights refuses them without offsets before that
HOST_FUNC_SINCE = (8, 5)  # earlier versions forbid aclrtLaunchHostFunc during a capture


@dataclass(frozen=True)
class Abilities:
    """`gating`: npu_moe_gating_top_k with any number of experts; `float_scales`: npu_moe_finalize_routing of bfloat16
    rows with float32 scales."""

    gating: bool
    float_scales: bool


ALL_ABILITIES = Abilities(gating=True, float_scales=True)


def abilities(cann: str | None) -> Abilities:
    """`cann` is a version such as 8.3.RC1; None: unknown, which counts as older than all others."""
    return Abilities(since(cann, SIGMOID_GATING_SINCE), since(cann, FLOAT_SCALES_SINCE))


def since(cann: str | None, series: tuple[int, int]) -> bool:
    found = re.match(r"(\d+)\.(\d+)", cann or "")
    return found is not None and (int(found[1]), int(found[2])) >= series

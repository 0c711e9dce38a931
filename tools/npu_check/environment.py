"""The environment of the processes that use the device."""

from collections.abc import Mapping

from umbra.executor.config.case import Case
from umbra.executor.config.load import load_case
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.platform.registry import start_environment
from umbra.ops.ascend.vector_core import package_path

CASE = "demo"
OPERATORS = "ASCEND_CUSTOM_OPP_PATH"
CONNECT_S = 120  # most seconds of a collective, so that HCCL gives up before the case is cut off


def ascend_overrides(*overrides: str) -> list[str]:
    """Returns the settings with which the case `demo` runs on Ascend, in the model's own type, followed by
    `overrides`."""
    mode = () if any(o.startswith("exe_mode=") for o in overrides) else ("exe_mode=npugraph_ex",)
    return ["platform=ascend", *mode, "quantization.method=none", f"comm_timeout_s={CONNECT_S}", *overrides]


def demo_case(overrides: list[str]) -> Case:
    return load_case(CASE, overrides)


def case_environment(case: Case, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of the case's ranks, as the launcher makes it."""
    return {**given, **start_environment(case.platform, platform_settings(case), given)}


def stage_environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a stage's own process: CANN must know of Umbra's operators before torch_npu is loaded."""
    return {**given, OPERATORS: package_path(given.get(OPERATORS, ""))}

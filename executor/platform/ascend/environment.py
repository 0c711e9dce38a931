"""Every environment variable that is read for ascend, or that its ranks are started with; the launcher sets these
before any rank begins.

A variable that the user has set stays as it is. One that contradicts the case is refused, because HCCL would not do
what the case says. Umbra's custom operators are added to the list of custom operators.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from umbra.base.errors import UserError
from umbra.executor.platform.ascend.hccl import uses_aiv
from umbra.executor.platform.ascend.settings import AscendSettings, HcclSettings
from umbra.executor.platform.settings import PlatformSettings
from umbra.ops.ascend import vector_core

CAPTURE_MODES = ("acl_graph", "npugraph_ex")
CONNECT_TIMEOUT_S = (120, 7200)  # the range HCCL takes
ALLOCATOR = "expandable_segments:True"  # segments that grow: less memory lost between tensors of changing sizes
# Mode 1 keeps all threads of a rank on a range of cores. Without npu_affine the range is the n-th equal part of the
# cores, whatever their NUMA node; with it, the cores that the driver reports as near to the NPU. If the driver does not
# report them (CANN documents it for Atlas A2), torch_npu uses equal parts.
AFFINITY = "1,npu_affine:1"


def cann_home() -> Path | None:
    """The folder that CANN is installed in, as its set_env.sh sets it; None: unknown."""
    home = os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH")
    return Path(home) if home else None


def custom_operators() -> str:
    """ASCEND_CUSTOM_OPP_PATH: folders of CANN's custom operators, with ":" between them."""
    return os.environ.get("ASCEND_CUSTOM_OPP_PATH", "")


def ascend_environment(settings: PlatformSettings, given: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to the environment `given`."""
    _refuse_contradictions(settings, given)
    ascend, hccl = settings.of_device(AscendSettings), settings.of_device(HcclSettings)
    timeout = settings.comm_timeout_s
    shortest, longest = CONNECT_TIMEOUT_S
    wanted = {
        "PYTORCH_NPU_ALLOC_CONF": ALLOCATOR,
        "TASK_QUEUE_ENABLE": "1" if settings.exe_mode in CAPTURE_MODES else "2",  # level 2 cannot be captured
        "HCCL_CONNECT_TIMEOUT": str(min(max(timeout, shortest), longest)),
        "HCCL_EXEC_TIMEOUT": str(timeout),
        "HCCL_BUFFSIZE": str(hccl.buffer_mb),
    }
    if settings.strict:
        wanted["TORCH_NPU_FALLBACK_CPU_DISABLE"] = "1"  # an op that has no NPU kernel is an error (torch_npu 2.13)
    if uses_aiv(hccl, settings.sizes):
        wanted["HCCL_OP_EXPANSION_MODE"] = "AIV"
    if hccl.deterministic:
        wanted["HCCL_DETERMINISTIC"] = "true"
    if ascend.base_port is not None:
        wanted["HCCL_IF_BASE_PORT"] = str(ascend.base_port)
    if ascend.socket_ifname:
        wanted["HCCL_SOCKET_IFNAME"] = ascend.socket_ifname
    if ascend.cpu_affinity:
        wanted["CPU_AFFINITY_CONF"] = AFFINITY
    added = {name: value for name, value in wanted.items() if name not in given}
    if packages := vector_core.package_path(given.get("ASCEND_CUSTOM_OPP_PATH", "")):
        added["ASCEND_CUSTOM_OPP_PATH"] = packages
    return added


def _refuse_contradictions(settings: PlatformSettings, given: Mapping[str, str]) -> None:
    hccl = settings.of_device(HcclSettings)
    aiv = uses_aiv(hccl, settings.sizes)
    deterministic = given.get("HCCL_DETERMINISTIC", "").lower()
    if deterministic in ("true", "strict") and aiv:
        raise UserError(
            f"environment variable HCCL_DETERMINISTIC={given['HCCL_DETERMINISTIC']} switches off the vector cores "
            f"that hccl_config.aiv_group: {hccl.aiv_group} asks for: unset it, or set aiv_group: none"
        )
    refused = given.get("TORCH_NPU_FALLBACK_CPU_DISABLE", "1")
    if settings.strict and refused != "1":
        raise UserError(
            f"environment variable TORCH_NPU_FALLBACK_CPU_DISABLE={refused} lets ops run on the CPU, which strict: "
            "true forbids: unset it"
        )
    if deterministic == "false" and hccl.deterministic:
        raise UserError(
            "environment variable HCCL_DETERMINISTIC=false contradicts hccl_config.deterministic: true: unset it"
        )
    mode = given.get("HCCL_OP_EXPANSION_MODE", "")
    if (aiv and mode not in ("", "AIV")) or (hccl.aiv_group == "none" and mode == "AIV"):
        raise UserError(
            f"environment variable HCCL_OP_EXPANSION_MODE={mode} contradicts hccl_config.aiv_group: {hccl.aiv_group}: "
            "unset it, or change the key"
        )

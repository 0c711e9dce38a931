"""Stage 1: what is installed, whether it belongs together, and whether there is a device."""

import platform
from pathlib import Path

from umbra.base.errors import UserError
from umbra.executor.platform.ascend.environment import cann_home
from umbra.executor.platform.ascend.versions import check_versions, read_versions
from umbra.tools.npu_check.outcome import Check, Passed
from umbra.tools.npu_check.stage import DEVICE


def checks(logs: Path) -> list[Check]:
    return [Check("versions", versions), Check(DEVICE, device)]


def versions() -> Passed:
    """The versions of Umbra's own table. `strict: false`: untested is no failure, unsupported is."""
    installed = read_versions(cann_home(), runtime_cann())
    remarks = check_versions(installed, strict=False)
    names = ", ".join(f"{name} {value or 'unknown'}" for name, value in vars(installed).items())
    return Passed("; ".join([f"{names}, python {platform.python_version()}", *remarks]))


def runtime_cann() -> str | None:
    """The version that CANN's runtime reports; None if torch_npu cannot be loaded, which the case `device` tells."""
    try:
        from torch_npu.npu.utils import get_cann_version
    except (ImportError, RuntimeError):
        return None
    version: str | None = get_cann_version() or None
    return version


def device() -> Passed:
    """op-plugin is part of torch_npu; the commit tells its release."""
    import torch
    import torch_npu

    count = torch_npu.npu.device_count()
    if not count:
        raise UserError("torch_npu finds no device: npu-smi info should list it; is ASCEND_RT_VISIBLE_DEVICES set?")
    name, memory = torch_npu.npu.get_device_name(0), torch_npu.npu.get_device_properties(0).total_memory
    if torch.arange(3).to("npu:0").tolist() != [0, 1, 2]:
        raise RuntimeError("a copy to the device and back differs")
    commit = torch_npu.version.git_version[:12]
    text = f"{count} of {name}, {memory / 2**30:.0f} GiB each; torch_npu and its op-plugin: commit {commit}"
    return Passed(text, {"devices": count, "device": name})

"""The machine: its processor, its software and its GPU."""

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sysconfig
from pathlib import Path

from umbra.ops.cuda.driver import Driver
from umbra.tools.npu_check.outcome import Check, Passed

SETS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
)
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "msgspec",
    "llguidance",
    "pybind11",
)
TOOLS = ("g++", "gcc", "cmake", "ninja", "nvcc", "compute-sanitizer", "ncu")


def checks() -> list[Check]:
    return [Check("host", host), Check("software", software), Check("GPU", gpu)]


def read(path: str) -> str:
    file = Path(path)
    return file.read_text().strip() if file.is_file() else ""


def table(text: str) -> dict[str, str]:
    """The values of lines such as `name : value`."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def host() -> Passed:
    fields = table(read("/proc/cpuinfo").split("\n\n")[0])
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    memory = table(read("/proc/meminfo"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    measured = {
        "cpu": fields.get("model name", platform.machine()),
        "cpus": len(os.sched_getaffinity(0)),
        "instruction sets": [name for name in SETS if name in flags],
        "lscpu": [
            line
            for line in output("lscpu").splitlines()
            if any(w in line for w in ("Thread(", "Core(", "NUMA", "L2", "L3", "MHz"))
        ],
        "memory": memory.get("MemTotal", ""),
        "memory.max": read("/sys/fs/cgroup/memory.max"),
        "locked memory": "unlimited" if locked == resource.RLIM_INFINITY else locked,
        "huge pages": read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": platform.release(),
        "libc": platform.libc_ver()[1],
    }
    return Passed(str(measured["cpu"]), measured)


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def software() -> Passed:
    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "missing"

    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    measured = {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "tools": {name: shutil.which(name) or "missing" for name in TOOLS},
        "Python.h": header.is_file(),
        "g++": (output("g++", "--version").splitlines() or ["missing"])[0],
    }
    return Passed(f"Python {platform.python_version()}", measured)


def gpu() -> Passed:
    driver = Driver()
    driver.cuInit(0)
    version, total = driver.number("cuDriverGetVersion"), driver.number("cuDeviceTotalMem_v2", 0)
    driver.open()
    measured = {
        "driver API": f"{version // 1000}.{version % 1000 // 10}",
        "memory MiB": total >> 20,
        "attributes": driver.attributes(),
        "nvidia-smi": output(
            "nvidia-smi",
            "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.gen.current,pcie.link.width.current,clocks.max.sm,clocks.max.mem",
            "--format=csv,noheader",
        ).strip(),
    }
    return Passed(driver.name(), measured)

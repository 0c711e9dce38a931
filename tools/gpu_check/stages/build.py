"""The native code that Umbra compiles on the machine."""

import os
import shutil
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

from umbra.base.files import ROOT
from umbra.ops.cuda import bridge
from umbra.tools.npu_check.outcome import Check, Passed

SOURCES, BUILD, PLACE = ROOT / "ops/cpu/csrc", ROOT / "build/gpu_check", ROOT / "ops/cpu"


def checks() -> list[Check]:
    return [Check("bridge", build_bridge), Check("native module", native), Check("imports", imports)]


def build_bridge() -> Passed:
    bridge.BUILT.unlink(missing_ok=True)
    begun = time.perf_counter()
    bridge.build()
    return Passed("", {"seconds": round(time.perf_counter() - begun, 2)})


def native() -> Passed:
    """Builds the module if there is none for this Python, without link-time optimisation, which takes long."""
    begun, built = time.perf_counter(), False
    try:
        import_module("umbra.ops.cpu._native")
    except ImportError:
        built = True
        compile_module()
        import_module("umbra.ops.cpu._native")
    from umbra.ops.cpu import engine

    measured = {"seconds": round(time.perf_counter() - begun, 1), "sets": engine.native.instruction_sets()}
    return Passed("built" if built else "it was there", measured)


def compile_module() -> None:
    import pybind11

    BUILD.mkdir(parents=True, exist_ok=True)
    cmake, ninja = (
        shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") for name in ("cmake", "ninja")
    )
    if not cmake or not ninja:
        raise RuntimeError("cmake or ninja is missing")
    options = {
        "CMAKE_MAKE_PROGRAM": ninja,
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_INTERPROCEDURAL_OPTIMIZATION": "OFF",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    defined = [f"-D{name}={value}" for name, value in options.items()]
    for command in (
        [cmake, "-S", str(SOURCES), "-B", str(BUILD), "-G", "Ninja", *defined],
        [cmake, "--build", str(BUILD)],
        [cmake, "--install", str(BUILD), "--prefix", str(PLACE)],
    ):
        subprocess.run(command, check=True)


def imports() -> Passed:
    """Everything that running a model needs is there."""
    from umbra import LLM

    return Passed(LLM.__name__)

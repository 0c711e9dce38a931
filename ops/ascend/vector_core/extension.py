"""Compiles torch/umbra_ops.cpp against this Python's torch and torch_npu:

python -m umbra.ops.ascend.vector_core.extension OUT.so
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

from umbra.base.errors import UserError, run_main

SOURCE = Path(__file__).parent / "torch" / "umbra_ops.cpp"


def command(out: Path) -> list[str]:
    """The command that compiles the extension. Neither package is imported, since torch_npu would need CANN's libraries
    and a device."""
    torch, npu = _folder("torch"), _folder("torch_npu")
    minor = importlib.metadata.version("torch").split(".")[1]
    includes = [
        torch / "include",
        torch / "include/torch/csrc/api/include",
        npu / "include",
        npu / "include/third_party/acl/inc",
        npu / "include/third_party/hccl/inc",
        npu / "include/third_party/op-plugin",
        Path(sysconfig.get_paths()["include"]),  # torch_npu's headers include Python.h
    ]
    return [
        "g++",
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        "-Wall",
        *(f"-isystem{folder}" for folder in includes),
        f"-DCURRENT_VERSION=V2R{minor}",
        str(SOURCE),
        "-o",
        str(out),  # torch_npu's headers need the version
        f"-L{torch / 'lib'}",
        f"-L{npu / 'lib'}",
        "-ltorch_npu",
        "-ltorch_cpu",
        "-lc10",
        "-Wl,-z,defs",
    ]


def build(out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if subprocess.run(command(out), check=False).returncode:
        raise UserError(f"{SOURCE.name}: g++ could not compile it, see above")


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"no {package} in {sys.executable}: install it there, or set PYTHON to a Python that has it")
    return Path(spec.origin).parent


def main(arguments: list[str]) -> None:
    (out,) = arguments
    build(Path(out))


if __name__ == "__main__":
    run_main(main)

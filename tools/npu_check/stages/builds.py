"""Stage 2: what is compiled here: the CPU's kernels, the bridge to the host, the operators of the vector cores."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.ops import load_ops
from umbra.ops.ascend import bridge, vector_core
from umbra.ops.cpu import engine
from umbra.ops.formats import FORMATS
from umbra.tools.npu_check.outcome import Check, Passed
from umbra.tools.npu_check.stage import BRIDGE, CPU, OPERATORS

FOLDER = Path(vector_core.__file__).parent
COMPILED = (".cpp", ".h", ".txt", ".sh")


def checks(logs: Path) -> list[Check]:
    return [Check(CPU, native), Check(BRIDGE, callbacks), Check(OPERATORS, operators)]


def native() -> Passed:
    """The module was built by umbra_setup; here it multiplies."""
    chosen = engine.start(1, "auto")
    ops, weight, x = load_ops("cpu"), torch.randn(32, 64), torch.randn(3, 64)
    matrix = ops.matrix(32, 64, FORMATS["float32"], torch.device("cpu"))
    matrix.fill(0, weight)
    if not torch.allclose(ops.linear(x, matrix, None), x @ weight.T, atol=1e-4):
        raise RuntimeError("a product of the native CPU module differs from PyTorch's")
    return Passed(str(chosen))


def callbacks() -> Passed:
    bridge.build()
    return Passed()


def operators() -> Passed:
    """Built by ops/ascend/vector_core/build.sh, unless that has been done since the sources last changed."""
    sources = [p for p in FOLDER.rglob("*") if p.suffix in COMPILED and vector_core.BUILD not in p.parents]
    if vector_core.built() >= max(path.stat().st_mtime_ns for path in sources):
        return Passed("built before")
    build_run = build()
    if build_run.returncode:
        lines = (
            [line for line in build_run.stdout.splitlines() if "rror" in line]
            or build_run.stdout.splitlines()
            or ["no output"]
        )
        raise UserError(f"build.sh: {lines[-1]}")
    return Passed("built")


def build() -> "subprocess.CompletedProcess[str]":
    build_run = subprocess.run(
        ["bash", str(FOLDER / "build.sh")],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    print(build_run.stdout)
    return build_run

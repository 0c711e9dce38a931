"""Every kernel passes all of the real kernel compiler for a die of Ascend 910C, from Triton to the hand-off to device
code: its synchronisation, its plan of the unified buffer, and no step that would be done value by value."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from ops.triton import PROGRAMS

pytest.importorskip("ascendnpuir", reason="no kernel compiler here, 161 MB: see requirements-triton-compile.txt")
compiled = import_module("tests.triton.compiled")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-m", "tests.triton.compiled", str(folder)], check=True, env=env, timeout=600)
    return folder


def value_by_value(program: str) -> list[str]:
    """What the scalar unit writes in a loop over values."""
    return re.findall(r"memref\.store .*\[%arg", program)


@pytest.mark.parametrize("name", compiled.cases())
def test_kernel(folder: Path, name: str) -> None:
    error = folder / f"{name}.error"
    assert not error.exists(), error.read_text()
    program = (folder / f"{name}.mlir").read_text()
    assert "call @store_ubuf_to_gm" in program
    assert not value_by_value(program)
    assert f'"VECTOR_CORE_COUNT", {PROGRAMS} :' in program


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    assert "ub overflow, requires" in (folder / "too_large.error").read_text()


def test_what_no_vector_unit_does_is_seen(folder: Path) -> None:
    assert value_by_value((folder / "value_by_value.mlir").read_text())

"""The package of vector-core operators: its names agree everywhere, and build.sh on machines with and without CANN."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from umbra.base.files import ROOT
from umbra.executor.config.load import load_case
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.platform.registry import start_environment
from umbra.ops.ascend import vector_core
from umbra.ops.ascend.vector_core import headers, signatures

pytestmark = pytest.mark.slow

FOLDER = ROOT / "ops/ascend/vector_core"
OPS = {op.ge_name: f"umbra_{op.name}" for op in signatures.OPS}


def matches(pattern: str, *files: Path) -> list[Any]:
    return [name for path in files for name in re.findall(pattern, path.read_text())]


@pytest.mark.parametrize(("op", "file"), OPS.items())
def test_names_agree(op: str, file: str) -> None:
    host = FOLDER / "op_host" / f"{file}.cpp"
    for pattern in (r"OP_ADD\((\w+)\)", r"REGISTER_TILING_DATA_CLASS\((\w+),", r"class (\w+) : public OpDef"):
        assert matches(pattern, host) == [op], pattern
    (op_of_file,) = (of for of in signatures.OPS if of.ge_name == op)
    (kernel,) = matches(r"__aicore__ void \w+\(([^)]*)\)", FOLDER / "op_kernel" / f"{file}.cpp")
    operands = [operand.name for operand in op_of_file.operands]
    assert re.findall(r"GM_ADDR (\w+)", kernel) == [*operands, "y", "workspace", "tiling"]


def test_headers_are_as_the_ops_are_described() -> None:
    assert headers.HOST.read_text() == headers.host()
    assert headers.TORCH.read_text() == headers.torch()


def test_every_op_has_its_files() -> None:
    kernels = sorted((FOLDER / "op_kernel").glob("*.cpp"))
    for paths in (kernels, (FOLDER / "op_host").glob("*.cpp")):
        assert sorted(path.stem for path in paths) == sorted(OPS.values())
    for path in kernels:
        assert matches(r"__global__ __aicore__ void (\w+)\(", path) == [path.stem]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the sources in another folder, since Umbra would use kernels that are built in its own."""
    shutil.copytree(FOLDER, tmp_path / "ops/ascend/vector_core", ignore=shutil.ignore_patterns("build", "__pycache__"))
    return tmp_path


def build(copy: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # cmake among them
    own = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND", "PYTHON"))}
    return subprocess.run(
        ["bash", str(copy / "ops/ascend/vector_core/build.sh"), *arguments],
        env={**own, "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_refusals(copy: Path) -> None:
    for arguments, complaint in (
        (["ascend310p"], "SOC ascend310p is unknown: choose from ascend910b ascend910_93"),
        ([], "ASCEND_HOME_PATH is not set: source set_env.sh of the CANN toolkit first"),
    ):
        done = build(copy, *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {complaint}\n")


# In place of CANN's functions: writes down how they are called, and makes an installer.
STAND_IN = """
set(ASCEND_AUTOGEN_PATH ${CMAKE_BINARY_DIR}/autogen)
function(note)
    string(REPLACE "${CMAKE_SOURCE_DIR}/" "" text "${ARGN}")
    file(APPEND ${CMAKE_BINARY_DIR}/calls "${text}\\n")
endfunction()
macro(npu_op_code_gen)
    note(code_gen ${ARGN})
    file(WRITE ${ASCEND_AUTOGEN_PATH}/aclnn_one.cpp "")
endmacro()
macro(npu_op_package)
    note(package ${ARGN} for ${ASCEND_COMPUTE_UNIT})
    add_custom_target(binary COMMAND touch ${CMAKE_BINARY_DIR}/kernels)
    add_custom_target(package COMMAND cp $ENV{ASCEND_HOME_PATH}/installer ${CMAKE_BINARY_DIR}/custom_opp_x.run
                              COMMAND rm ${CMAKE_BINARY_DIR}/kernels)
endmacro()
macro(npu_op_kernel_sources target)
    note(kernel_sources ${target} ${ARGN})
    cmake_parse_arguments(SOURCE "" "OP_TYPE;KERNEL_DIR;KERNEL_FILE" "" ${ARGN})
    file(COPY ${CMAKE_CURRENT_SOURCE_DIR}/${SOURCE_KERNEL_FILE} DESTINATION ${CMAKE_BINARY_DIR}/copied)
    if(DEFINED SOURCE_KERNEL_DIR) # its headers, too: without it CANN's script copies the file alone
        file(COPY ${CMAKE_CURRENT_SOURCE_DIR}/${SOURCE_KERNEL_DIR}/ DESTINATION ${CMAKE_BINARY_DIR}/copied
             FILES_MATCHING PATTERN "*.h" PATTERN "*.cpp")
    endif()
endmacro()
foreach(name library package_add kernel_library)
    cmake_language(EVAL CODE "macro(npu_op_${name})\\n note(${name} \\${ARGN})\\n endmacro()")
endforeach()
"""
INSTALLER = 'lib=${2#--install-path=}/vendors/umbra/op_api/lib; mkdir -p "$lib"; touch "$lib/libcust_opapi.so"'
PYTHON = '#!/bin/sh\n[ "$1 $2" = "-m umbra.ops.ascend.vector_core.extension" ] && touch "$3"\n'


@pytest.fixture
def cann(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with a stand-in for CANN."""
    home, python = tmp_path / "cann", tmp_path / "python"
    templates = home / "compiler/tikcpp/ascendc_kernel_cmake"
    templates.mkdir(parents=True)
    (templates / "asc-config.cmake").write_text(STAND_IN)
    (home / "installer").write_text(INSTALLER)
    python.write_text(PYTHON)
    python.chmod(0o755)
    return {"ASCEND_HOME_PATH": str(home), "PYTHON": str(python)}


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize(("socs", "units"), [([], "ascend910b;ascend910_93"), (["ascend910_93"], "ascend910_93")])
def test_a_build(copy: Path, cann: dict[str, str], socs: list[str], units: str) -> None:
    done = build(copy, *socs, **cann)
    assert done.returncode == 0, done.stdout + done.stderr
    out = copy / "ops/ascend/vector_core/build"
    assert (out / vector_core.PACKAGE.relative_to(vector_core.BUILD) / "op_api/lib/libcust_opapi.so").is_file()
    assert (out / vector_core.EXTENSION.name).is_file()
    sources = {path.name for path in (FOLDER / "op_kernel").iterdir() if path.suffix in (".cpp", ".h")}
    assert {path.name for path in (out / "package/copied").iterdir()} == sources  # GE compiles from these
    package, *_, last = (out / "package/calls").read_text().splitlines()
    assert package.endswith(f"INSTALL_PATH;{out}/package;for;{units}".replace(f"{copy}/ops/ascend/vector_core/", ""))
    assert last == "package_add;umbra;LIBRARY;ascendc_kernels"
    for op, file in OPS.items():
        call = f"kernel_sources;ascendc_kernels;OP_TYPE;{op};KERNEL_DIR;.;KERNEL_FILE;{file}.cpp"
        assert call in (out / "package/calls").read_text().splitlines()


def test_the_launcher_tells_cann_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, name = load_case("qwen3_30b_a3b_bf16_tp8"), "ASCEND_CUSTOM_OPP_PATH"
    ascend, demo = platform_settings(case), platform_settings(load_case("demo"))
    package = tmp_path / "umbra"
    monkeypatch.setattr(vector_core, "PACKAGE", package)
    assert name not in start_environment("ascend", ascend, {})
    package.mkdir()
    for given, wanted in {"": package, "/a:/b": f"{package}:/a:/b", f"/a:{package}": f"{package}:/a"}.items():
        assert start_environment("ascend", ascend, {name: given})[name] == str(wanted)
    assert name not in start_environment("cpu", demo, {})


def test_the_launcher_needs_no_torch() -> None:
    """The benchmark, too, sets CANN's variable for the package before it imports torch, which may load torch_npu."""
    code = "import sys, executor.launch.launch, tools.benchmarks.npu_gemv; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

"""The native code under sanitizers: pool and tape for data races, every op for bad memory and undefined behaviour."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest

from files import ROOT
from tests.ops.cpu.native.build import SOURCES, compile_all, core_sources, run

PRODUCTS = ["pool", "pack", "products", "moe", "elementwise", "generic"]


@pytest.mark.parametrize(
    ("stress", "sanitizer", "parts"),
    [
        ("pool", "thread", ["pool"]),
        ("tape", "thread", PRODUCTS),
        ("shadow", "thread", [*PRODUCTS, "shadow", "worker", "copier"]),
        ("shadow", "address,undefined", [*PRODUCTS, "shadow", "worker", "copier"]),
        ("bridge", "thread", []),
    ],
)
def test_threads_under_stress(tmp_path: Path, stress: str, sanitizer: str, parts: list[str]) -> None:
    program = str(tmp_path / "stress")
    flags = ["-O1", "-g", "-std=c++17", f"-fsanitize={sanitizer}", "-fno-sanitize=alignment", "-pthread", "-rdynamic"]
    sources = [
        str(ROOT / f"tests/ops/cpu/native/{stress}_stress.cpp"),
        *(str(SOURCES / f"{part}.cpp") for part in parts),
    ]
    run("g++", *flags, *sources, "-o", program, "-ldl")
    first = subprocess.run([program], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in first.stderr:  # older sanitizers cannot live with much address randomisation
        first = run("setarch", "-R", program)
    assert (first.returncode, first.stdout) == (0, "ok\n"), first.stderr[-4000:]
    assert "runtime error" not in first.stderr


def test_ops_touch_only_their_memory(tmp_path: Path) -> None:
    """The parity and graph tests once more, on a module built with AddressSanitizer and UBSan."""
    flags = [
        "-O1",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
        "-w",
        "-fPIC",
    ]
    # Kernels read packed rows through wider types on purpose; x86 and ARM allow any alignment there.
    flags += ["-fno-sanitize=alignment", "-fvisibility=hidden", f"-I{pybind11.get_include()}"]
    flags += run(
        sys.executable, "-c", "import sysconfig; print('-I' + sysconfig.get_paths()['include'])"
    ).stdout.split()
    objects = compile_all("g++", flags, [SOURCES / "bind.cpp", *core_sources(platform.machine())], tmp_path)
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".*", "results", "_native*.so", "csrc")
    shutil.copytree(ROOT, tree, ignore=ignored)
    module = str(tree / "ops" / "cpu" / "_native.so")
    run("g++", "-shared", "-fsanitize=address,undefined", *objects, "-o", module, "-pthread")
    libraries = [run("g++", f"-print-file-name=lib{name}.so").stdout.strip() for name in ("asan", "ubsan")]
    environment = os.environ | {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "tests/ops/cpu/test_ops.py",
        "tests/executor/platform/test_graph.py",
        "tests/ops/cpu/test_numa.py",
        "tests/ops/cpu/test_shadow.py",
        "tests/ops/cpu/test_shadow_worker.py",
    ]
    done = run(*tests, cwd=tree, env=environment)
    assert " passed" in done.stdout
    assert "runtime error" not in done.stdout + done.stderr

"""The native code under sanitizers: pool and tape for data races, every op for memory errors and undefined
behaviour."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import pytest

from files import ROOT
from ops.cpu import engine
from tests.ops.cpu.native.build import (
    PRODUCTS,
    SOURCES,
    TESTS,
    compile_all,
    core_sources,
    made_once,
    program,
    run,
)

pytestmark = pytest.mark.slow

SHADOW = [*PRODUCTS, *(f"shadow/{name}" for name in ("shadow", "worker", "copier"))]


def flags_of(sanitizer: str) -> list[str]:
    """The same for all programs, which then share object files."""
    # Kernels read packed rows through wider types on purpose; x86 and ARM allow any alignment there.
    flags = ["-O1", "-g1", f"-fsanitize={sanitizer}", "-fno-sanitize=alignment", "-fno-sanitize-recover=undefined"]
    return [*flags, "-w", "-fPIC", "-pthread"]


@pytest.mark.parametrize(
    ("stress", "sanitizer", "parts"),
    [
        ("pool", "thread", ["runtime/pool"]),
        ("tape", "thread", PRODUCTS),
        ("shadow", "thread", SHADOW),
        ("shadow", "address,undefined", SHADOW),
        ("bridge", "thread", []),
    ],
)
def test_threads_under_stress(stress: str, sanitizer: str, parts: list[str]) -> None:
    flags = flags_of(sanitizer)
    sources = [TESTS / f"{stress}_stress.cpp", *(SOURCES / f"{part}.cpp" for part in parts)]
    stressed = program(f"{stress}_stress", "g++", flags, sources, ["-rdynamic", "-ldl"])
    first = subprocess.run([stressed], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in first.stderr:  # older sanitizers cannot live with much address randomisation
        first = run("setarch", "-R", stressed)
    assert (first.returncode, first.stdout) == (0, "ok\n"), first.stderr[-4000:]
    assert "runtime error" not in first.stderr


@pytest.mark.parametrize(
    "files",
    [
        ["tests/ops/cpu/test_ops.py"],
        [
            "tests/executor/platform/test_graph.py",
            *(f"tests/ops/cpu/test_{name}.py" for name in ("numa", "shadow", "shadow_worker")),
        ],
    ],
    ids=["ops", "graph, NUMA and shadow"],
)
def test_ops_touch_only_their_memory(tmp_path: Path, files: list[str]) -> None:
    """The parity and graph tests once more, on a module built with AddressSanitizer and UBSan. The bindings only hand
    addresses on, and pybind11's templates would take twice as long to compile as all kernels."""
    flags = flags_of("address,undefined")
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    bindings = compile_all("g++", ["-O0", "-w", "-fPIC", *includes], sorted((SOURCES / "bindings").glob("*.cpp")))
    core = compile_all("g++", flags, core_sources(platform.machine()))
    module = made_once("_native.so", ["g++", *flags, *bindings, *core, "-shared"])
    tree = tmp_path / "tree"
    # Besides what is not needed, folders in which other processes write meanwhile.
    ignored = shutil.ignore_patterns(
        ".*", "__pycache__", "results", "*_cache", "build", "_native*.so", "csrc", "*.safetensors"
    )
    shutil.copytree(ROOT, tree, ignore=ignored)
    shutil.copy(module, tree / "ops" / "cpu" / "_native.so")
    libraries = [run("g++", f"-print-file-name=lib{name}.so").stdout.strip() for name in ("asan", "ubsan")]
    environment = os.environ | {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    # Sets read memory in ways of their own. Two threads are enough of each, but for the last, which has five.
    best = engine.module.instruction_sets()[-1]
    few = f"not {best}-1 and not {best}-2"
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", few, *files]
    done = run(*tests, cwd=tree, env=environment)
    assert " passed" in done.stdout
    assert "runtime error" not in done.stdout + done.stderr

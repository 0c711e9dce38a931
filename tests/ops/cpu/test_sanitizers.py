"""The native code under sanitizers: pool and tape for data races, every op for memory errors and undefined
behaviour."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ops.cpu import engine
from tests.ops.cpu.native.build import (
    PRODUCTS,
    SHADOW,
    SOURCES,
    TESTS,
    core_sources,
    module_under,
    program,
    project_with,
    run,
    sanitized,
)

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize(
    ("stress", "sanitizer", "parts"),
    [
        ("pool", "thread", ["runtime/pool"]),
        ("tape", "thread", PRODUCTS),
        ("shadow", "thread", PRODUCTS + SHADOW),
        ("shadow", "address,undefined", PRODUCTS + SHADOW),
        ("bridge", "thread", []),
    ],
)
def test_threads_under_stress(stress: str, sanitizer: str, parts: list[str]) -> None:
    flags = sanitized(sanitizer)
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
        ["tests/executor/platform/test_graph.py"]
        + [f"tests/ops/cpu/test_{name}.py" for name in ("numa", "shadow", "shadow_worker")],
    ],
    ids=["ops", "graph, NUMA and shadow"],
)
def test_ops_touch_only_their_memory(tmp_path: Path, files: list[str]) -> None:
    """The parity and graph tests once more, on a module built with AddressSanitizer and UBSan."""
    module = module_under("address,undefined", core_sources(platform.machine()))
    tree = tmp_path / "tree"
    project_with(module, tree)
    libraries = [run("g++", f"-print-file-name=lib{name}.so").stdout.strip() for name in ("asan", "ubsan")]
    environment = os.environ | {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    # Sets read memory in ways of their own. Two threads are enough of each, but for the last, which has five.
    best = engine.module.instruction_sets()[-1]
    few = f"not {best}-1 and not {best}-2"
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", few, *files]
    done = run(*tests, cwd=tree, env=environment)
    assert " passed" in done.stdout
    assert "runtime error" not in done.stdout + done.stderr

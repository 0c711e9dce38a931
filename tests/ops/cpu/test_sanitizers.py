"""The native code under sanitizers, a fuzzer and a machine that tries every order of memory: data races, memory errors,
undefined behaviour, hostile input. docs/reliability.md has the long runs."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
from tests.ops.cpu.native.fuzzing import TARGETS, compiler, fuzz
from tests.ops.cpu.native.ordering import PROGRAMS, explore, weakened
from tests.ops.cpu.traffic import DONE, MODES, built, under_sanitizer
from umbra.ops.cpu import engine

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

SCENARIO = re.compile(r"^(.*): (\d+) executions, (\d+) cut short(.*)$", re.MULTILINE)
OUTCOMES = {  # of the machine itself; what C++ forbids is missing
    "store buffers, relaxed": {0, 1, 10, 11},
    "store buffers, release and acquire": {0, 1, 10, 11},
    "store buffers, seq_cst": {1, 10, 11},
    "message, relaxed": {0, 1, 10, 11},
    "message, release alone": {0, 1, 10, 11},
    "message, release and acquire": {0, 1, 11},
    "two writers": {11, 12, 21, 22},
    "release sequence": {0, 1, 2, 3},
    "counted": {0, 1},
}
RUNS = {"dispatch": 400, "jobs": 4000, "pack": 2500, "sampling": 1500, "tape": 1200, "tiling": 20000}  # 3 s each


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
        ["tests/ops/cpu/test_ops.py", "tests/ops/test_latent_attention.py"],
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


def test_traffic_has_no_race(tmp_path: Path) -> None:
    done = under_sanitizer(built(), tmp_path / "tree", "--steps", "25")
    assert done.returncode == 0, done.stderr[-8000:]
    assert len(DONE.findall(done.stdout)) == len(MODES), done.stdout


def test_a_planted_race_is_found(tmp_path: Path) -> None:
    done = under_sanitizer(built(racy=True), tmp_path / "tree", "--steps", "3")
    assert done.returncode == 66
    assert "WARNING: ThreadSanitizer: data race" in done.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_hostile_input(tmp_path: Path, target: str) -> None:
    if compiler() is None:
        pytest.skip("no Clang with libFuzzer: apt-get install clang-19 libclang-rt-19-dev")
    assert "executions" in fuzz(target, RUNS[target], tmp_path)


def test_the_machine_has_the_outcomes_of_the_memory_model() -> None:
    outcomes = {
        name: set(map(int, re.findall(r"\| (\d+):", rest))) for name, _, _, rest in SCENARIO.findall(explore("litmus"))
    }
    assert {name: outcomes[name] for name in OUTCOMES} == OUTCOMES
    assert 1010 in outcomes["four threads, release and acquire"]
    assert 1010 not in outcomes["four threads, seq_cst"]
    assert len(outcomes["four threads, seq_cst"]) == 15


def test_reduction_loses_no_outcome() -> None:
    assert explore("litmus", "--random", "40") == "40 programs\n"


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "litmus"])
def test_every_order_is_right(program: str) -> None:
    printed = explore(program)
    assert "not all" not in printed
    assert all(int(count) > 0 for _, count, _, _ in SCENARIO.findall(printed))


def test_each_memory_order_of_the_pool_is_needed() -> None:
    weaker = weakened("pool", "--most", "6000")
    assert len(weaker) > 20
    assert [one for one in weaker if one[2].startswith("not")] == []

"""A short run of each target of native/fuzzing.py, from its corpus on; docs/reliability.md has the long ones."""

from pathlib import Path

import pytest

from tests.ops.cpu.native.fuzzing import TARGETS, compiler, fuzz

RUNS = {"dispatch": 400, "jobs": 4000, "pack": 2500, "sampling": 1500, "tape": 1200, "tiling": 20000}  # 3 s each

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize("target", TARGETS)
def test_hostile_input(tmp_path: Path, target: str) -> None:
    if compiler() is None:
        pytest.skip("no Clang with libFuzzer: apt-get install clang-19 libclang-rt-19-dev")
    assert "executions" in fuzz(target, RUNS[target], tmp_path)

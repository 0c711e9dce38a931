"""tools/gpu_check on the fake driver: stages that need only the driver pass, and those that need more are skipped."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.ops.cpu.native.build import program, run
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.tools.gpu_check.__main__ import check
from umbra.tools.gpu_check.stage import STAGES, GpuStage, chosen


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fake as libcuda.so.1."""
    folder = tmp_path_factory.mktemp("driver")
    flags = ["-O1", "-fPIC", "-pthread", "-Wall", "-Wextra"]
    built = program("fake_cuda.so", "g++", flags, [ROOT / "tests/fakes/cuda/cuda.cpp"], ["-shared"])
    shutil.copy(built, folder / "libcuda.so.1")
    return folder


def test_on_the_fake(driver: Path, tmp_path: Path) -> None:
    stages, report = "machine,link,bridge,latency,moves,watchdog", tmp_path / "report.json"
    environment = os.environ | {"LD_LIBRARY_PATH": str(driver), "PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-m", "umbra.tools.gpu_check", "--only", stages, "--report", str(report))
    with pytest.raises(AssertionError, match="skipped in"):  # the exit status, for what needs torch's GPU
        run(*command, cwd=ROOT, env=environment)
    outcomes = json.loads(report.read_text())
    skipped = {(o["stage"], o["text"]) for o in outcomes if o["result"] != "pass"}
    no_gpu = {(stage, "torch sees no GPU") for stage in ("link", "latency", "moves")}
    assert skipped == no_gpu, report.read_text()
    assert {o["stage"] for o in outcomes} == set(stages.split(","))
    assert "| machine | GPU | pass |" in report.with_suffix(".md").read_text()
    assert "==== watchdog" in report.with_suffix(".log").read_text()


def test_a_stage_that_cannot_begin_or_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others run, and the table has them all."""
    report, broken = tmp_path / "report.json", GpuStage("no_such_stage", "", 60)
    assert check([broken, GpuStage("cpu_tests", "", 1.0)], report, 120) == 1
    assert check([broken], report, 0.5) == 1
    printed = capsys.readouterr().out
    for text in ("the process ended with status", "did not end within 1 s", "no time was left"):
        assert text in printed


def test_arguments() -> None:
    assert [stage.name for stage in chosen("latency,machine")] == ["latency", "machine"]
    assert "cpu_tests" not in [stage.name for stage in chosen(None)]
    assert sum(stage.limit_s for stage in STAGES if stage.default) <= 480
    with pytest.raises(UserError, match="no stage 'x': choose of machine, build"):
        chosen("x")

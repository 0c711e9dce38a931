"""A rank that is halted is named within a limit, and ends its job."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from executor.launch import halts
from tests.tiny import save_tiny, write_case
from umbra.files import ROOT


def test_a_process_that_stays_halted_is_killed_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halts, "LOOK_S", 0.02)
    monkeypatch.setattr(halts, "HALTED_S", 0.4)
    with (
        halts.Halts() as watch,
        subprocess.Popen(["sleep", "600"]) as brief,
        subprocess.Popen(["sleep", "600"]) as long,
    ):
        for each in (brief, long):
            each.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        brief.send_signal(signal.SIGCONT)
        assert long.wait(30) == -signal.SIGKILL
        assert watch.reasons == {long.pid: "halted by a signal for 0.4 s"}
        assert brief.poll() is None
        brief.kill()


@pytest.mark.slow
def test_a_halted_rank_ends_its_job_and_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", num_key_value_heads=8)
    case = write_case(tmp_path / f"halted{os.getpid()}.yaml", tmp_path / "model")
    start = f"""
from umbra.errors import run_main
from executor.config.load import load_case
from executor.launch import halts
from executor.launch.launch import launch
halts.HALTED_S = 1.0
case = load_case({str(case)!r}, ["world_size=2", "exe_mode=eager"])
run_main(lambda argv: launch(case, ["tests/executor/launch/rank_program.py", {str(case)!r}, "halt"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", start], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1
    line = r"error: rank 1 \(pid \d+\) failed: halted by a signal for 1 s; all ranks' logs: .*\n"
    assert re.fullmatch(line, done.stderr), done.stderr

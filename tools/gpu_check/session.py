"""Runs stages, each in a process of its own, within a limit for each and one for all."""

import os
import subprocess
import sys
import time
from pathlib import Path

from umbra.base.files import ROOT
from umbra.tools.gpu_check.stage import GpuStage
from umbra.tools.npu_check.events import Events
from umbra.tools.npu_check.outcome import FAIL, SKIPPED, Outcome
from umbra.tools.npu_check.processes import end_group, how_it_ended, last_line

POLL_S = 0.05


def run_stage(stage: GpuStage, logs: Path, left_s: float) -> list[Outcome]:
    """The outcomes of all cases of a stage, for which `left_s` seconds are left at most. A case that dies or does not
    end fails, and those after it are not run."""
    limit = min(stage.limit_s, left_s)
    if limit < 1:
        return [Outcome(stage.name, "all", SKIPPED, text="no time was left")]
    events, log = Events(logs / f"{stage.name}.jsonl"), logs / f"{stage.name}.log"
    events.path.unlink(missing_ok=True)
    with open(log, "wb") as out:
        command = [sys.executable, "-m", "umbra.tools.gpu_check", "--stage", stage.name, "--events", str(events.path)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(os.environ), stdout=out, stderr=out, start_new_session=True
        )
    begun = time.monotonic()
    while process.poll() is None and time.monotonic() - begun < limit:
        time.sleep(POLL_S)
    status = process.poll()
    end_group(process)
    outcomes, open_case = events.read()
    if status == 0:
        return outcomes
    why = f"did not end within {limit:.0f} s" if status is None else f"the process {how_it_ended(status)}"
    text = f"{why}: {last_line(log)}"[:400]
    return [*outcomes, Outcome(stage.name, open_case or "start", FAIL, time.monotonic() - begun, text)]

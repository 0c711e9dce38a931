"""Launches the ranks of a server, or is one of them, with a fault: that of FAULT, on rank 1, from its fifth step with
requests on."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from umbra.base.errors import UserError
from umbra.executor.engine.schedule.scheduler import Scheduler, Step
from umbra.executor.model_runner import ModelRunner
from umbra.serving.ranks import launcher, worker
from umbra.serving.ranks.processes import run_and_leave

FAULT = os.environ["FAULT"]
steps = 0
schedule, setup = Scheduler.schedule, ModelRunner.setup


def faulty_schedule(self: Scheduler) -> Step | None:
    global steps
    step = schedule(self)
    steps += step is not None and step.sequences[0].id >= 0  # not the warm-up
    if steps >= 5:
        if FAULT == "raise":
            raise RuntimeError("boom\nin a step")
        if FAULT == "hang":
            time.sleep(600)
        if FAULT == "differ" and step:
            return Step(step.sequences[1:], step.decode)
    return step


def faulty_setup(self: ModelRunner) -> None:
    if FAULT == "refuse":
        raise UserError("the cup is empty")
    time.sleep(600)


if os.environ.get("RANK") == "1":
    Scheduler.schedule = faulty_schedule  # type: ignore[method-assign]
    if FAULT in ("refuse", "load"):
        ModelRunner.setup = faulty_setup  # type: ignore[method-assign,assignment]
launcher.WORKER = [__file__]
run_and_leave(worker.main if "RANK" in os.environ else launcher.main)

"""Runs the stages, each in a process of its own, and never waits longer than a case may take."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from umbra.tools.npu_check import processes
from umbra.tools.npu_check.environment import stage_environment
from umbra.tools.npu_check.events import Events
from umbra.tools.npu_check.hints import hint
from umbra.tools.npu_check.outcome import FAIL, PASS, SKIPPED, Outcome
from umbra.tools.npu_check.stage import STAGES, Stage
from umbra.tools.npu_check.worker import AGAIN

POLL_S = 0.05
MOST_HANGS = 2  # cases of a stage that may hang; the others are then not tried


def missing(stage: Stage, known: Sequence[Outcome]) -> str | None:
    """The first thing that the stage needs and that has failed or was skipped, such as `stage 2, bridge`; None: it can
    run. What is not known, since only some stages are run, is taken for good."""
    for need in stage.needs:
        name, _, case = need.partition("/")
        earlier = [o for o in known if o.stage == name and o.case in (case or o.case)]
        if any(o.result != PASS for o in earlier):
            number = next(s.number for s in STAGES if s.name == name)
            return f"stage {number}" + (f", {case}" if case else "")
    return None


def run_stage(stage: Stage, known: Sequence[Outcome], logs: Path) -> list[Outcome]:
    """The outcomes of all cases of a stage."""
    if lacking := missing(stage, known):
        return [Outcome(stage.name, "all", SKIPPED, text=f"needs {lacking}")]
    events, log = Events(logs / f"{stage.name}.jsonl"), logs / f"{stage.name}.log"
    events.path.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    environment = stage_environment(dict(os.environ))
    hangs = 0
    while True:
        arguments = ["--stage", stage.name, "--events", str(events.path)]
        process = processes.start(arguments, environment, log, True)
        try:
            text = watch(process, events, stage.limit_s)
        finally:
            processes.end_group(process)  # with ranks that it may have left behind
        done, open_case = events.read()
        status = process.poll()
        if status == 0 and done and not text:
            return done
        if status == AGAIN:
            continue
        hangs += bool(text)
        text = text or f"the process {processes.how_it_ended(status or 0)}: {processes.last_line(log)}"[:400]
        events.end(Outcome(stage.name, open_case or "start", FAIL, text=text, hint=hint(text)))
        if hangs == MOST_HANGS:
            events.end(Outcome(stage.name, "other cases", SKIPPED, text=f"{hangs} cases did not end"))
        if open_case is None or hangs == MOST_HANGS:
            return events.read()[0]


def watch(process: processes.Process, events: Events, limit_s: float) -> str:
    """Waits for the process; returns why it must be ended, if no case has begun or ended for `limit_s`."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        now = events.path.stat().st_size if events.path.is_file() else 0
        if now != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > limit_s:
            return f"did not end within {limit_s:g} s"
        time.sleep(POLL_S)
    return ""

"""The process of one stage: runs its cases in turn and writes what each came to."""

import os
import re
import signal
import threading
import time
import traceback
from pathlib import Path

from umbra.tools.npu_check.events import Events
from umbra.tools.npu_check.hints import POISON, hint
from umbra.tools.npu_check.outcome import FAIL, PASS, SKIPPED, Check, Outcome, Skipped
from umbra.tools.npu_check.stage import Stage, find

CODE = re.compile(r"\b(?:107|161|207|361|507|561)\d{3}\b|\bE[A-Z]\d{4}\b")
AGAIN = 3  # exit status: the device is of no use to this process any more, but cases are left


def run_cases(stage: Stage, events: Events) -> int:
    """Runs the cases without an outcome. -> exit status"""
    done = {outcome.case for outcome in events.read()[0]}
    for check in stage.checks(events.path.parent / stage.name):
        if check.name in done:
            continue
        print(f"-- {check.name}", flush=True)
        events.begin(check.name)
        outcome = run_case(stage.name, check)
        events.end(outcome)
        if outcome.result == FAIL and POISON.search(outcome.text):
            return AGAIN
    return 0


def run_case(stage: str, check: Check) -> Outcome:
    begun = time.perf_counter()
    try:
        result = check.run()
    except Skipped as why:
        return Outcome(stage, check.name, SKIPPED, time.perf_counter() - begun, str(why))
    except Exception as error:
        traceback.print_exc()
        text = cause(error)
        return Outcome(stage, check.name, FAIL, time.perf_counter() - begun, text, hint(text))
    return Outcome(stage, check.name, PASS, time.perf_counter() - begun, result.text, "", result.measured)


def cause(error: BaseException) -> str:
    """One line: the first of the message, one with the error's code if that is another, and what caused the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    codes = [line for line in lines[1:] if CODE.search(line)][:1]
    behind = [cause(error.__cause__)] if error.__cause__ else []
    return " / ".join([lines[0], *codes, *behind])[:400]


def stage_process(name: str, events: Path) -> int:
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    return run_cases(find(name), Events(events))


def end_with_parent(parent: int) -> None:
    """If the process that watches this one is killed, nothing would end this one, or its ranks, where they hang."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgrp(), signal.SIGKILL)

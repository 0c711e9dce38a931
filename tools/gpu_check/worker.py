"""The process of one stage: runs its cases in turn and writes what each came to."""

import os
import threading
import time
import traceback

from umbra.tools.gpu_check.stage import GpuStage
from umbra.tools.npu_check.events import Events
from umbra.tools.npu_check.outcome import FAIL, PASS, SKIPPED, Check, Outcome, Skipped
from umbra.tools.npu_check.worker import cause, end_with_parent


def stage_process(stage: GpuStage, events: Events) -> None:
    """Never returns: the driver's threads, which a failed case may leave behind, must not hold up the end."""
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        for check in stage.checks():
            print(f"-- {check.name}", flush=True)
            events.begin(check.name)
            events.end(run_case(stage.name, check))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run_case(stage: str, check: Check) -> Outcome:
    begun = time.perf_counter()
    try:
        passed = check.run()
    except Skipped as why:
        return Outcome(stage, check.name, SKIPPED, time.perf_counter() - begun, str(why))
    except Exception as error:
        traceback.print_exc()
        return Outcome(stage, check.name, FAIL, time.perf_counter() - begun, cause(error))
    return Outcome(stage, check.name, PASS, time.perf_counter() - begun, passed.text, "", passed.measured)

"""Stage 9: the demo model with most experts on the CPU, inside the captured step, against all on the device."""

import functools
from functools import partial
from pathlib import Path

from umbra.tools.npu_check.environment import ascend_overrides
from umbra.tools.npu_check.outcome import Check, Passed
from umbra.tools.npu_check.stages import model

SLOTS = 40  # of 160 experts
TOLERANCE = 0.02  # the CPU's sums are rounded to bfloat16 apart from the device's


def checks(logs: Path) -> list[Check]:
    return [Check(mode, partial(against_residents, logs, mode)) for mode in ("eager", "npugraph_ex")]


@functools.cache
def resident_logits(logs: Path) -> model.Logits:
    return model.logits_of(ascend_overrides("exe_mode=eager"), logs / "resident")[0]


def against_residents(logs: Path, mode: str) -> Passed:
    expected = resident_logits(logs)
    offload = ("offload_config.mode=fixed", f"slots={SLOTS}", "shadow_threads=2", "measure_s=0.1")
    ours, measured = model.logits_of(ascend_overrides(f"exe_mode={mode}", *offload), logs / mode, expected)
    if not measured["missed"]:
        raise RuntimeError("no expert was computed on the CPU")
    return Passed(f"{model.compare(ours, expected, TOLERANCE)}; {model.summary(measured)}", measured)

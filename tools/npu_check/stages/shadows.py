"""Stage 9: the demo model with most experts on the CPU, inside the captured step, against all on the device."""

from functools import partial
from pathlib import Path

from tools.npu_check.environment import ascend_overrides
from tools.npu_check.outcome import Check, Found
from tools.npu_check.stages import model

SLOTS = 40  # of 160 experts
TOLERANCE = 0.02  # the CPU's sums are rounded to bfloat16 apart from the device's


def checks(logs: Path) -> list[Check]:
    return [Check(mode, partial(against_residents, logs, mode)) for mode in ("eager", "npugraph_ex")]


def against_residents(logs: Path, mode: str) -> Found:
    own = ascend_overrides(f"exe_mode={mode}")
    expected, _ = model.logits_of(own, logs / f"{mode}_resident")
    offload = ("offload_config.mode=fixed", f"slots={SLOTS}", "shadow_threads=2")
    ours, measured = model.logits_of([*own, *offload], logs / f"{mode}_shadows", expected)
    if not measured["missed"]:
        raise RuntimeError("no expert was computed on the CPU: the comparison differs from what it should be")
    return Found(f"{model.compare(ours, expected, TOLERANCE)}; {model.told(measured)}", measured)

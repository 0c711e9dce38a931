"""The report to send back: a table of all cases, failures with hints, fitted constants, all measurements as JSON."""

import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from umbra.base.files import ROOT, write_whole
from umbra.tools.npu_check.constants import constants
from umbra.tools.npu_check.outcome import FAIL, PASS, SKIPPED, Outcome
from umbra.tools.npu_check.stage import STAGES

FAKE = "fake device: nothing of this is evidence about hardware"


def line(outcome: Outcome) -> str:
    """One line for the terminal."""
    number = next(stage.number for stage in STAGES if stage.name == outcome.stage)
    text = f"{number:2} {outcome.stage:<12} {outcome.case:<44} {outcome.result:<7} {outcome.seconds:6.1f} s  "
    return (text + outcome.text).rstrip() + (f"\n{'':15}hint: {outcome.hint}" if outcome.hint else "")


def tally(outcomes: Sequence[Outcome]) -> str:
    counts = {result: sum(o.result == result for o in outcomes) for result in (PASS, FAIL, SKIPPED)}
    return f"{counts[PASS]} passed, {counts[FAIL]} failed, {counts[SKIPPED]} skipped"


def render(facts: dict[str, Any], outcomes: Sequence[Outcome], fake: bool) -> str:
    parts = ["# Umbra on Ascend: the first hour", *([f"**{FAKE}**"] if fake else []), f"{tally(outcomes)}."]
    missing = [stage.name for stage in STAGES if stage.name not in {o.stage for o in outcomes}]
    if missing:
        parts.append(f"Not run: {', '.join(missing)}.")
    parts.append("\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]))
    rows = [f"| {o.stage} | {o.case} | {o.result} | {o.seconds:.1f} | {_cell(o.text)} |" for o in outcomes]
    parts.append("\n".join(["| stage | case | | seconds | |", "|---|---|---|---|---|", *rows]))
    if failures := [o for o in outcomes if o.result == FAIL]:
        parts += ["## Failures", "\n".join(f"- {o.stage}, {o.case}: {o.text}. Hint: {o.hint}" for o in failures)]
    if fitted := constants(outcomes):
        head = ["| constant | assumed | measured | unit | from |", "|---|---|---|---|---|"]
        lines = [f"| {c.name} | {c.assumed} | {c.measured:.4g} | {c.unit} | {c.source} |" for c in fitted]
        parts += ["## Constants", "\n".join(head + lines)]
    measured = {f"{o.stage}/{o.case}": o.measured for o in outcomes if o.measured}
    parts += ["## Measurements", f"```json\n{json.dumps(measured, indent=1)}\n```"]
    return scrubbed("\n\n".join(parts)) + "\n"


def write(path: Path, facts: dict[str, Any], outcomes: Sequence[Outcome], fake: bool) -> None:
    text = render(facts, outcomes, fake)
    write_whole(path, lambda file: file.write(text.encode()))


def scrubbed(text: str) -> str:
    """Without the names of this machine, its addresses, its user and their folders."""
    for name, stands in ((str(ROOT), "."), (os.path.expanduser("~"), "~"), (socket.gethostname(), "HOST")):
        if len(name) > 1:
            text = text.replace(name, stands)
    return re.sub(r"\b(?!127\.0\.0\.1\b)(?:\d{1,3}\.){3}\d{1,3}(?=[:\s,;)/]|$)", "ADDRESS", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

"""The results of earlier runs: stages that passed are not run again while nothing has changed that they depend on."""

import json
import subprocess
from pathlib import Path
from typing import Any

from umbra.base.files import ROOT, write_json
from umbra.executor.platform.ascend.environment import cann_home
from umbra.executor.platform.ascend.trusted_files import source_digest
from umbra.executor.platform.ascend.versions import read_versions
from umbra.tools.npu_check.outcome import Outcome

SOURCES = ("umbra", "ops", "text", "models", "cpu_offload", "executor", "serving", "tools")
NATIVE = (".cpp", ".h", ".sh", ".txt")


def facts() -> dict[str, Any]:
    """The commit, a digest of the sources, and the installed versions."""
    native = [p for p in (ROOT / "ops").rglob("*") if p.suffix in NATIVE and "build" not in p.relative_to(ROOT).parts]
    versions = read_versions(cann_home())
    return {
        "commit": _commit(),
        "sources": source_digest(ROOT, [*(ROOT / path for path in SOURCES), *native])[:16],
        "torch": versions.torch,
        "torch_npu": versions.torch_npu,
        "cann": versions.cann,
        "driver": versions.driver,
    }


class StageResults:
    """The outcomes of finished stages, in a file."""

    def __init__(self, path: Path, now: dict[str, Any]):
        self.path, self.facts = path, now
        self.stages: dict[str, list[Outcome]] = {}
        self.changed = ""  # the fact that differs from those of the file, which then counts for nothing
        try:
            kept = json.loads(path.read_text())
        except (OSError, ValueError):
            return
        self.changed = next((name for name in now if kept["facts"].get(name) != now[name]), "")
        if not self.changed:
            self.stages = {name: [Outcome.from_json(o) for o in outcomes] for name, outcomes in kept["stages"].items()}

    def keep(self, stage: str, outcomes: list[Outcome]) -> None:
        self.stages[stage] = outcomes
        stages = {name: [o.to_json() for o in outcomes] for name, outcomes in self.stages.items()}
        write_json(self.path, {"facts": self.facts, "stages": stages})


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    return git.stdout.strip() or "unknown"

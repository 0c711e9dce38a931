"""YAML: cases, clusters, and hardware."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from executor.config.load import CASES, load_case
from planner.cluster import read_cluster
from planner.machine import FOLDER, read_hardware
from tests.fuzz.target import Target
from umbra.files import ROOT

STRANGE = [b"a: &a [*a]", b"? !!set {x}\n: <<", b"a: 0b1_0:59.5e3", b"!!omap [x: 2001-01-01 00:00:00 +01:00]"]


def _yaml(read: Callable[[Path], Any], seeds: list[bytes], longest: int = 4096) -> Callable[[Path], Target]:
    def make(folder: Path) -> Target:
        def run(data: bytes) -> None:
            (folder / "case.yaml").write_bytes(data)
            read(folder / "case.yaml")

        return Target(run, [*seeds, *STRANGE], json=False, longest=longest)

    return make


def _sections(folder: Path, *needed: str) -> list[bytes]:
    """Each section of each file alone, beside the keys that are `needed`: PyYAML takes several milliseconds for a whole
    file, most of them for its comments."""
    files = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))]
    kept = [{name: file[name] for name in (*needed, key)} for file in files for key in file if key not in needed]
    return [yaml.safe_dump(section, default_flow_style=None, sort_keys=False).encode() for section in kept]


case = _yaml(
    lambda path: load_case(str(path)),
    [(CASES / f"{name}.yaml").read_bytes() for name in ("demo", "demo_chat", "demo_offload", "demo_tp8")],
)
cluster = _yaml(read_cluster, _sections(ROOT / "planner" / "clusters", "case", "hardware"), longest=1024)
hardware = _yaml(lambda path: read_hardware(str(path)), _sections(FOLDER), longest=1024)

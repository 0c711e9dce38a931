"""YAML: cases, clusters, and hardware."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from executor.config.load import CASES, load_case
from executor.planning.cluster.cluster import read_cluster
from executor.planning.cluster.hardware import FOLDER, read_hardware
from files import ROOT
from tests.fuzz.target import Target

STRANGE = [b"a: &a [*a]", b"? !!set {x}\n: <<", b"a: 0b1_0:59.5e3", b"!!omap [x: 2001-01-01 00:00:00 +01:00]"]


def _yaml(read: Callable[[Path], Any], shipped: list[Path]) -> Callable[[Path], Target]:
    def make(folder: Path) -> Target:
        def run(data: bytes) -> None:
            (folder / "case.yaml").write_bytes(data)
            read(folder / "case.yaml")

        return Target(run, [*(path.read_bytes() for path in shipped), *STRANGE], json=False)

    return make


case = _yaml(
    lambda path: load_case(str(path)),
    [CASES / f"{name}.yaml" for name in ("demo", "demo_chat", "demo_offload", "demo_tp8")],
)
cluster = _yaml(read_cluster, sorted((ROOT / "clusters").glob("*.yaml")))
hardware = _yaml(lambda path: read_hardware(str(path)), sorted(FOLDER.glob("*.yaml")))

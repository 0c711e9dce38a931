"""The YAML of cases."""

from pathlib import Path

from executor.config.load import CASES, load_case
from tests.fuzz.target import Target


def case(folder: Path) -> Target:
    def run(data: bytes) -> None:
        (folder / "case.yaml").write_bytes(data)
        load_case(str(folder / "case.yaml"))

    shipped = [(CASES / f"{name}.yaml").read_bytes() for name in ("demo", "demo_chat", "demo_offload", "demo_tp8")]
    strange = [b"a: &a [*a]", b"? !!set {x}\n: <<", b"a: 0b1_0:59.5e3", b"!!omap [x: 2001-01-01 00:00:00 +01:00]"]
    return Target(run, [*shipped, *strange], json=False)

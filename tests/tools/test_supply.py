"""Locked packages."""

import re
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from umbra.files import ROOT

LOCKS, REQUIREMENTS = ROOT / "tools" / "supply" / "locks", ROOT / "tools" / "requirements"
FILES = {  # those of each lock
    "main": ("main.txt", "dev.txt"),
    **{name: (f"{name}.txt",) for name in ("ascend", "compare", "fuzz", "supply")},
}
ENVIRONMENTS = [
    {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "sys_platform": "linux",
    }
    for python, machine in product(("3.10", "3.11", "3.12", "3.13", "3.14"), ("x86_64", "aarch64"))
]


def pins(path: Path) -> list[Requirement]:
    """Those of a requirement file; of a lock file, each of them must have a hash."""
    text = re.sub(r" \\\n\s*", " ", path.read_text())  # a pin and its hashes are one line
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    assert path.suffix != ".lock" or all(re.search(r"(\s--hash=sha256:[0-9a-f]{64})+$", line) for line in lines)
    return [Requirement(line.split(" --hash")[0]) for line in lines]


def chosen(path: Path, environment: dict[str, str]) -> dict[str, str]:
    """The version of each package that is installed in the environment; two of one package are a mistake."""
    held = [pin for pin in pins(path) if not pin.marker or pin.marker.evaluate(environment)]
    versions = {pin.name.replace("_", "-").lower(): str(pin.specifier) for pin in held}
    assert len(versions) == len(held), environment
    return versions


@pytest.mark.parametrize("name", FILES)
def test_locks_have_what_the_requirements_pin(name: str) -> None:
    """On every Python and processor; a change of a requirement without `bash tools/supply/lock.sh` fails here."""
    for environment in ENVIRONMENTS:
        locked = chosen(LOCKS / f"{name}.lock", environment)
        if name == "main":
            cpu, cuda = (chosen(LOCKS / f"torch-{kind}.lock", environment) for kind in ("cpu", "cuda"))
            assert cpu["torch"].split("+")[0] == cuda["torch"]
            locked |= cuda
        for file in FILES[name]:
            assert chosen(REQUIREMENTS / file, environment).items() <= locked.items()


def test_setup_installs_from_locks_alone() -> None:
    text = (ROOT / "tools" / "setup.sh").read_text()
    calls = re.findall(r"-m pip install(?:[^\n]*\\\n)*[^\n]*", text)
    assert len(calls) == 3
    for call in calls:  # from the index with hashes and without any build, or without the index
        assert (
            "--require-hashes" in call and "--only-binary :all:" in call and "--no-deps" in call
        ) or "--no-index" in call


def test_a_lock_names_no_index() -> None:
    for path in LOCKS.iterdir():
        assert "://" not in path.read_text(), path

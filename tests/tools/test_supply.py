"""Locked packages."""

import re
from itertools import product
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

from umbra.base.files import ROOT

LOCKS = ROOT / "tools" / "supply" / "locks"
GROUPS = {name: (name,) for name in ("ascend", "compare", "dev", "fuzz", "supply")} | {"main": ("run", "build")}
ENVIRONMENTS = [
    {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "sys_platform": "linux",
    }
    for python, machine in product(("3.10", "3.11", "3.12", "3.13", "3.14"), ("x86_64", "aarch64"))
]


def required(group: str) -> list[Requirement]:
    """The packages of a dependency group of pyproject.toml; `run`: what running needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = project["project"]["dependencies"] if group == "run" else project["dependency-groups"][group]
    return [Requirement(line) for line in lines]


def locked_in(path: Path) -> list[Requirement]:
    """The packages of a lock file; each of them must have a hash."""
    text = re.sub(r" \\\n\s*", " ", path.read_text())  # a pin and its hashes are one line
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    assert all(re.search(r"(\s--hash=sha256:[0-9a-f]{64})+$", line) for line in lines)
    return [Requirement(line.split(" --hash")[0]) for line in lines]


def chosen(pins: list[Requirement], environment: dict[str, str]) -> dict[str, str]:
    """The version of each package that is installed in the environment; two of one package are a mistake."""
    held = [pin for pin in pins if not pin.marker or pin.marker.evaluate(environment)]
    versions = {pin.name.replace("_", "-").lower(): str(pin.specifier) for pin in held}
    assert len(versions) == len(held), environment
    return versions


@pytest.mark.parametrize("name", GROUPS)
def test_locks_have_what_the_requirements_pin(name: str) -> None:
    """On every Python and processor; a change of a requirement without `bash tools/supply/lock.sh` fails here."""
    for environment in ENVIRONMENTS:
        locked = chosen(locked_in(LOCKS / f"{name}.lock"), environment)
        if name == "main":
            cpu, cuda = (chosen(locked_in(LOCKS / f"torch-{kind}.lock"), environment) for kind in ("cpu", "cuda"))
            assert cpu["torch"].split("+")[0] == cuda["torch"]
            locked |= cuda
        for group in GROUPS[name]:
            assert chosen(required(group), environment).items() <= locked.items()


def test_setup_installs_from_locks_alone() -> None:
    text = (ROOT / "tools" / "setup.sh").read_text()
    calls = re.findall(r"-m pip install(?:[^\n]*\\\n)*[^\n]*", text)
    assert len(calls) == 1
    for word in ("--require-hashes", "--only-binary :all:", "--no-deps"):
        assert word in calls[0]


def test_a_lock_names_no_index() -> None:
    for path in LOCKS.iterdir():
        assert "://" not in path.read_text(), path

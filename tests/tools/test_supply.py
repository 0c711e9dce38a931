"""Locked packages, the bill of materials, the audit, and builds that give the same bytes."""

import json
import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from errors import UserError
from files import ROOT
from tests.ops.cpu.native.build import INCLUDES, SOURCES, run
from tools.supply import audit, sbom
from tools.supply.packages import Package, installed
from tools.supply.pins import (
    LOCKS,
    TORCH_CPU,
    TORCH_CUDA,
    Pin,
    environments,
    lock_path,
    read,
    read_requirements,
)
from tools.supply.pins import SOURCES as REQUIREMENTS

HASH = "a" * 64


def chosen(pins: list[Pin], environment: dict[str, str]) -> dict[str, str]:
    """The version of each package that is installed in the environment; two of one package are a mistake."""
    held = [pin for pin in pins if pin.holds(environment)]
    versions = {pin.name: pin.version for pin in held}
    assert len(versions) == len(held), environment
    return versions


@pytest.mark.parametrize("torch", [TORCH_CPU, TORCH_CUDA])
@pytest.mark.parametrize("name", REQUIREMENTS)
def test_locks_have_what_the_requirements_pin(name: str, torch: str) -> None:
    """On every Python and processor; a change of a requirement without `python -m tools.supply.lock` fails here."""
    locked = read(lock_path(name)) + (read(lock_path(torch)) if name == "main" else [])
    assert all(pin.hashes for pin in locked)
    for environment in environments():
        wanted, found = chosen(read_requirements(REQUIREMENTS[name]), environment), chosen(locked, environment)
        assert wanted == {key: found[key].split("+")[0] for key in wanted}


def test_every_requirement_file_has_a_lock() -> None:
    locked = {file for files in REQUIREMENTS.values() for file in files}
    assert {path.name for path in ROOT.glob("requirements*.txt")} == locked


def test_a_requirement_that_is_not_locked_is_seen() -> None:
    everywhere = list(environments())
    assert chosen([Pin("a", "1", 'python_version < "3.11"'), Pin("a", "2", 'python_version >= "3.11"')], everywhere[0])
    with pytest.raises(AssertionError):
        chosen([Pin("a", "1"), Pin("a", "2", 'python_version >= "3.11"')], everywhere[-1])


def test_what_is_installed_is_locked_with_all_that_it_needs() -> None:
    """The lock files are complete, for they are installed without looking for dependencies."""
    locked = {pin.name for name in ("main", TORCH_CPU) for pin in read(lock_path(name))}
    packages = {package.name: package for package in installed()}
    assert {need for name in locked & packages.keys() for need in packages[name].needs} <= locked


def test_unlocked_lines_are_refused(tmp_path: Path) -> None:
    for line in ("numpy", "numpy>=2", "numpy==2.0 --hash=md5:0", "-r other.txt", "numpy @ file:///x.whl"):
        (tmp_path / "a.lock").write_text(f"{line}\n")
        with pytest.raises(UserError, match="not a pinned package"):
            read(tmp_path / "a.lock")


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


ONE = Package("one", "1.0", "MIT", ">=3.10", ("two",))
TWO = Package("two", "2.0", "BSD-3-Clause AND Zlib", "", ())
PINS = [Pin("one", "1.0", hashes=(HASH,)), Pin("two", "2.0", hashes=(HASH,))]


@pytest.mark.parametrize(
    ("package", "complaint"),
    [
        (Package("one", "1.1", "MIT", "", ()), "one 1.1: no lock file has it (locked: 1.0): run `bash infer.sh`"),
        (Package("three", "1", "MIT", "", ()), "three 1: no lock file has it (locked: none): run `bash infer.sh`"),
        (Package("one", "1.0", "MIT AND GPL-3.0-only", "", ()), "one 1.0: the licence GPL-3.0-only is not accepted"),
        (Package("one", "1.0", "unknown", "", ()), "one 1.0: the licence unknown is not accepted"),
        (Package("one", "1.0", "MIT", ">=3.11", ()), "one 1.0: is locked for Python 3.10.0, and needs >=3.11"),
    ],
)
def test_the_audit_complains(package: Package, complaint: str) -> None:
    assert not list(audit.complaints([ONE, TWO], PINS))
    (said,) = audit.complaints([package, TWO], PINS)
    assert said.startswith(complaint)


def test_the_bill_of_materials(tmp_path: Path) -> None:
    sbom.main([str(tmp_path / "bill.json")])
    made = json.loads((tmp_path / "bill.json").read_text())
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    parts = {part["bom-ref"]: part for part in made["components"]}
    assert all(part["licenses"] for part in parts.values())
    torch = parts[f"pkg:pypi/torch@{version('torch')}"]
    assert torch["properties"]  # the hashes of the locked files
    native = {file["name"] for file in parts["umbra-native"]["components"]}
    assert {str(p.relative_to(ROOT)) for p in SOURCES.rglob("*.cpp") if "build" not in p.parts} <= native
    links = {entry["ref"]: entry["dependsOn"] for entry in made["dependencies"]}
    assert links.keys() == parts.keys() | {sbom.OWN}
    assert {ref for refs in links.values() for ref in refs} <= parts.keys()
    assert any("pybind11" in ref for ref in links["umbra-native"])
    assert sbom.bill([ONE, TWO], PINS) == sbom.bill([ONE, TWO], PINS)


def test_sources_compile_to_the_same_bytes_anywhere(tmp_path: Path) -> None:
    """A part of `python -m tools.supply.reproduce`: a file in two folders, with two times."""
    made = []
    for folder, then in ((tmp_path / "a", 1e9), (tmp_path / "b" / "deeper", 1.1e9)):
        folder.mkdir(parents=True)
        (folder / "probe.cpp").write_bytes((SOURCES / "runtime" / "probe.cpp").read_bytes())
        os.utime(folder / "probe.cpp", (then, then))
        command = ["g++", "-std=c++17", "-O3", "-fPIC", "-shared", *INCLUDES, str(folder / "probe.cpp")]
        run(*command, "-o", str(folder / "out.so"))
        made.append((folder / "out.so").read_bytes())
    assert made[0] == made[1]


def test_no_source_asks_for_its_place_or_time() -> None:
    for path in (p for p in SOURCES.rglob("*") if p.suffix in (".cpp", ".h") and "build" not in p.parts):
        assert not re.search(r"__(DATE|TIME|TIMESTAMP|FILE)__|\bassert\(|<cassert>", path.read_text()), path

"""Says what is wrong with the installed packages as far as their metadata tells; exits with status 1 if anything is:

    .venv/bin/python -m tools.supply.audit                  without a network
    .venv/bin/python -m tools.supply.audit --advisories     also asks pip-audit, over one, for known vulnerabilities

Checked are: a version that no lock file has, a package that none has, a licence that is not on the list of accepted
ones, a locked Python that the package refuses. Whether a version was yanked or has a known vulnerability is in no
package: the first is said by `python -m tools.supply.lock`, the second by `--advisories`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from errors import UserError, run_main
from files import ROOT
from tools.supply.packages import Package, installed
from tools.supply.pins import LOCKS, TORCH_CPU, TORCH_CUDA, Pin, environments, lock_path, read

ACCEPTED = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
    "CNRI-Python", "ISC", "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib",
}  # fmt: skip
OF_VENV = "pip"  # comes with the interpreter (`python -m venv`), not from the index
TOOLS = ROOT / "build" / "supply"
AUDITED = ("main", TORCH_CPU, TORCH_CUDA)


def complaints(packages: list[Package], pins: list[Pin]) -> Iterator[str]:
    """One line for each thing that is wrong."""
    locked: dict[str, list[Pin]] = {}
    for pin in pins:
        locked.setdefault(pin.name, []).append(pin)
    for package in packages:
        name = f"{package.name} {package.version}"
        own = [pin for pin in locked.get(package.name, []) if pin.version == package.version]
        if not own and package.name != OF_VENV:
            known = ", ".join(sorted({pin.version for pin in locked.get(package.name, [])})) or "none"
            yield f"{name}: no lock file has it (locked: {known}): run `bash infer.sh`"
        for part in re.split(r" (?:AND|OR) |[()]", package.licence):
            if part.strip() and part.strip() not in ACCEPTED:
                yield f"{name}: the licence {part.strip()} is not accepted (audit.py: ACCEPTED)"
        for python in sorted({e["python_full_version"] for e in environments() for pin in own if pin.holds(e)}):
            if python not in SpecifierSet(package.pythons):
                yield f"{name}: is locked for Python {python}, and needs {package.pythons}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.supply.audit", description=__doc__.split("\n")[0])
    parser.add_argument("--advisories", action="store_true", help="also ask pip-audit for known vulnerabilities")
    advisories = parser.parse_args(arguments).advisories
    packages = installed()
    pins = [pin for path in sorted(LOCKS.glob("*.lock")) for pin in read(path)]
    found = list(complaints(packages, pins))
    print(f"{len(packages)} packages: " + ", ".join(f"{n} {name}" for name, n in licence_counts(packages)))
    print("\n".join(found) or "no complaint")
    status = int(bool(found))
    if advisories:
        if not (TOOLS / "pip_audit").exists():
            raise UserError(
                f"{TOOLS.relative_to(ROOT)} has no pip-audit: install locks/supply.lock as lock.py here says"
            )
        for name in AUDITED:
            command = [
                sys.executable,
                "-m",
                "pip_audit",
                "--disable-pip",
                "--require-hashes",
                "-r",
                str(lock_path(name)),
            ]
            status |= subprocess.run(command, env=os.environ | {"PYTHONPATH": str(TOOLS)}).returncode
    sys.exit(status)


def licence_counts(packages: list[Package]) -> list[tuple[str, int]]:
    return Counter(package.licence for package in packages).most_common()


if __name__ == "__main__":
    run_main(main)

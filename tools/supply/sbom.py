"""Writes a bill of materials, CycloneDX JSON: the packages installed here with their licences and the hashes of their
files, and the native sources with theirs:

    .venv/bin/python -m tools.supply.sbom sbom.json

It has no time and no machine in it: the same tree and packages give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from errors import run_main
from files import ROOT, write_json
from tools.supply.packages import OWN, Package, installed
from tools.supply.pins import Pin, lock_path, read

# Native code of Umbra's own: each part, its folder, and the packages whose code is compiled into it.
NATIVE = {
    "umbra-native": ("ops/cpu/csrc", ["pybind11"]),
    "umbra-vector-core": ("ops/ascend/vector_core", []),
    "umbra-ascend-bridge": ("ops/ascend/csrc", []),
}
SUFFIXES = {".cpp", ".h", ".c", ".txt", ".toml", ".cmake"}
LICENCE = "Apache-2.0"


def bill(packages: list[Package], pins: list[Pin]) -> dict[str, Any]:
    hashes = {(pin.name, pin.version): pin.hashes for pin in pins}
    names = {package.name: reference(package) for package in packages}
    parts = [package_component(p, hashes.get((p.name, p.version), ())) for p in packages]
    parts += [native_component(name, ROOT / folder) for name, (folder, _) in NATIVE.items()]
    needs = {reference(p): [names[n] for n in p.needs if n in names] for p in packages}
    needs |= {name: [names[n] for n in inside if n in names] for name, (_, inside) in NATIVE.items()}
    needs[OWN] = [*sorted(names.values()), *NATIVE]
    own = {"type": "application", "bom-ref": OWN, "name": OWN, "version": version(OWN), "licenses": licences(LICENCE)}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": parts,
        "dependencies": [{"ref": ref, "dependsOn": sorted(on)} for ref, on in sorted(needs.items())],
    }


def reference(package: Package) -> str:
    return f"pkg:pypi/{package.name}@{package.version}"


def licences(expression: str) -> list[dict[str, str]]:
    return [] if expression == "unknown" else [{"expression": expression}]


def package_component(package: Package, hashes: tuple[str, ...]) -> dict[str, Any]:
    """A package; each of its properties is the hash of one of the files that the index has of this version."""
    return {
        "type": "library",
        "bom-ref": reference(package),
        "name": package.name,
        "version": package.version,
        "licenses": licences(package.licence),
        "purl": reference(package),
        "properties": [{"name": "umbra:locked-sha256", "value": digest} for digest in hashes],
    }


def native_component(name: str, folder: Path) -> dict[str, Any]:
    files = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and "build" not in p.parts)
    contents = [
        {
            "type": "file",
            "bom-ref": str(path.relative_to(ROOT)),
            "name": str(path.relative_to(ROOT)),
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}],
        }
        for path in files
    ]
    own = {"type": "library", "bom-ref": name, "name": name, "version": version(OWN), "licenses": licences(LICENCE)}
    return {**own, "components": contents}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.supply.sbom", description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="where the bill is written")
    file = parser.parse_args(arguments).file
    pins = [pin for path in sorted(lock_path("main").parent.glob("*.lock")) for pin in read(path)]
    made = bill(installed(), pins)
    write_json(file, made)
    print(f"{file}: {len(made['components'])} components")


if __name__ == "__main__":
    run_main(main)

"""Writes the lock files from the requirement files, with every package that they need and the hashes of all its files:

    .venv/bin/python -m pip install --target build/supply --no-deps --require-hashes -r tools/supply/locks/supply.lock
    .venv/bin/python -m tools.supply.lock [--upgrade]

Packages that are locked already keep their version; `--upgrade` takes the newest one of those that no requirement pins.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from errors import UserError, run_main
from files import ROOT, write_whole
from tools.supply.pins import LOCKS, PYTHONS, SOURCES, TORCH_CPU, TORCH_CUDA, Pin, environments, lock_path, read

UV = ROOT / "build" / "supply" / "bin" / "uv"
# Wheels of PyTorch for CPUs, which the index does not have: the lines of `sha256sum FILE`, added by hand.
TORCH_WHEELS = LOCKS / "torch-cpu.sha256"
WITHOUT_OTHERS = ("ascend", "compare-moe")  # installed with --no-deps: what they need beside is in .venv, or not wanted


def resolve(name: str, upgrade: bool) -> list[Pin]:
    """What the requirement files of `name` need on all supported machines."""
    if not UV.exists():
        raise UserError(
            f"{UV.relative_to(ROOT)} is missing: install tools/supply/locks/supply.lock as lock.py there says"
        )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lock"
        before = [lock_path(part) for part in ([name, TORCH_CUDA] if name == "main" else [name])]
        out.write_text("".join(path.read_text() for path in before if path.exists()))
        command = [
            str(UV),
            "pip",
            "compile",
            "--quiet",
            "--universal",
            "--generate-hashes",
            "--annotation-style",
            "line",
        ]
        command += ["--no-header", "--python-version", PYTHONS[0], "--output-file", str(out)]
        command += ["--upgrade"] * upgrade + ["--no-deps"] * (name in WITHOUT_OTHERS)
        command += ["--constraint", str(lock_path("main"))] * (name != "main")
        done = subprocess.run([*command, *SOURCES[name]], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{' '.join(SOURCES[name])} cannot be resolved: {' '.join(done.stderr.split())}")
        print(
            "".join(line for line in done.stderr.splitlines(True) if line.startswith("warning")), end=""
        )  # yanked ones
        pins = read(out)
    return [pin for pin in pins if any(pin.holds(environment) for environment in environments())]


def torch_for_cpus(torch: Pin) -> list[Pin]:
    """PyTorch's wheels for CPUs of the version that `torch` pins."""
    hashes: dict[str, list[str]] = {}
    for line in TORCH_WHEELS.read_text().splitlines():
        digest, wheel = line.split()
        hashes.setdefault(wheel.split("-")[1], []).append(digest)
    return [Pin(torch.name, v, hashes=tuple(h)) for v, h in hashes.items() if v.split("+")[0] == torch.version]


def text_of(pins: Iterable[Pin], sources: str) -> str:
    lines = [f"# Made from {sources} by `python -m tools.supply.lock`: change those, then run it."]
    for pin in pins:
        lines.append(f"{pin.name}=={pin.version}" + (f" ; {pin.marker}" if pin.marker else ""))
        for digest in pin.hashes:
            lines[-1] += " \\"
            lines.append(f"    --hash=sha256:{digest}")
        lines += [f"    # via {', '.join(pin.needed_by)}"] * bool(pin.needed_by)
    return "\n".join(lines) + "\n"


def write_lock(name: str, pins: list[Pin], sources: str) -> None:
    write_whole(lock_path(name), lambda file: file.write(text_of(pins, sources).encode()))
    print(f"{lock_path(name).relative_to(ROOT)}: {len(pins)} packages")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.supply.lock", description=__doc__.split("\n")[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that the requirements allow")
    upgrade = parser.parse_args(arguments).upgrade
    for name, files in SOURCES.items():
        pins, sources = resolve(name, upgrade), " and ".join(files)
        if name == "main":
            (torch,) = [pin for pin in pins if pin.name == "torch"]
            write_lock(TORCH_CPU, torch_for_cpus(torch), f"{files[0]} and {TORCH_WHEELS.name}")
            write_lock(TORCH_CUDA, [pin for pin in pins if pin.of_torch], files[0])
            pins = [pin for pin in pins if not pin.of_torch]
        write_lock(name, pins, sources)


if __name__ == "__main__":
    run_main(main)

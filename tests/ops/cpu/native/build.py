"""Compiles the native code outside the build of the module, for tests."""

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from files import ROOT

SOURCES = ROOT / "ops" / "cpu" / "csrc"


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done  # type: ignore[no-any-return]


def core_sources(machine: str) -> list[Path]:
    """Everything but the Python side, with the kernels of one architecture."""
    folder = {"x86_64": "x86", "aarch64": "arm"}[machine]
    return [p for p in (*SOURCES.glob("*.cpp"), *(SOURCES / folder).glob("*.cpp")) if p.name != "bind.cpp"]


def compile_all(compiler: str, flags: Sequence[str], sources: Sequence[Path], to: Path) -> list[str]:
    """The object files, made in parallel; a warning fails."""

    def compiled(path: Path) -> str:
        made = str(to / f"{path.stem}.o")
        done = run(compiler, "-std=c++17", *flags, "-c", str(path), "-o", made)
        assert not done.stderr, done.stderr[-4000:]
        return made

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        return list(workers.map(compiled, sources))

"""Compiles kernels, or the host side of ops, into a shared library: once for each content of the sources."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from files import ROOT

HERE = Path(__file__).parent

OP_HOST = ROOT / "ops/ascend/vector_core/op_host"
CACHE = ROOT / ".venv" / "umbra-twin"
LIBRARY_WORKSPACE = 16 << 20  # bytes at the start of a workspace that belong to CANN's library
FLAGS = ["-std=c++17", "-O2", "-ftree-vectorize", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-Wall"]
FLAGS += ["-Werror=narrowing"]  # clang, which the real compiler is, refuses it


class TwinError(Exception):
    """A rule of the device or its API that a kernel broke, or a source that the real API would not compile."""


@dataclass(frozen=True)
class Library:
    path: Path

    def load(self) -> ctypes.CDLL:
        return _load(self.path)


@cache
def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _digest(files: Sequence[Path], flags: Sequence[str]) -> str:
    content = hashlib.sha256("\0".join(flags).encode())
    for file in files:
        content.update(file.name.encode() + b"\0" + file.read_bytes())
    return content.hexdigest()[:24]


def compile_shared(sources: Sequence[Path], watched: Sequence[Path], flags: Sequence[str]) -> Library:
    """A library of `sources`; it is built again when one of them, one of `watched` or a flag changes."""
    files = sorted({file for file in [*sources, *watched] if file.is_file()})
    where = CACHE / f"{sources[0].stem}-{_digest(files, [*FLAGS, *flags])}.so"
    if not where.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=CACHE, suffix=".so.part", delete=False) as part:
            command = ["g++", *FLAGS, *flags, *map(str, sources), "-o", part.name, "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            os.unlink(part.name)
            raise TwinError(f"{sources[0].name} does not compile:\n{done.stderr}")
        os.replace(part.name, where)  # whole or not at all, whoever else builds it
    return Library(where)


def build(
    sources: Path | Sequence[Path],
    tiling_header: Path = OP_HOST / "umbra_gemv_tiling.h",
    tiling_struct: str = "UmbraGemvTiling",
) -> Library:
    """Kernels, unmodified. `tiling_header` defines `tiling_struct` with CANN's macros, as the host includes it."""
    sources = [sources] if isinstance(sources, Path) else list(sources)
    beside = [file for source in sources for file in source.parent.iterdir() if file.suffix == ".h"]
    twin = [HERE / "runner.cpp", *(HERE / "include").rglob("*.h")]
    flags = [
        *(f"-I{folder}" for folder in [HERE / "include", *{source.parent for source in sources}]),
        f"-DTWIN_TILING_HEADER={str(tiling_header)!a}".replace("'", '"'),
        f"-DTWIN_TILING_STRUCT={tiling_struct}",
        "-include",
        str(HERE / "include" / "kernel_tiling.h"),
    ]
    return compile_shared([*sources, HERE / "runner.cpp"], [*beside, *twin, tiling_header], flags)

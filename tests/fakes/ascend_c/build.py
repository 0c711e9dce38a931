"""Compiles kernels, or the host side of ops, into a shared library, once for each content of the sources; and checks
with clang what g++ cannot."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from umbra.base.files import ROOT

HERE = Path(__file__).parent

OP_HOST = ROOT / "ops/ascend/vector_core/op_host"
CACHE = ROOT / ".venv" / "umbra-twin"
LIBRARY_WORKSPACE = 16 << 20  # bytes at the start of a workspace that belong to CANN's library
FLAGS = [
    "-std=c++17",
    "-ftree-vectorize",
    "-march=native",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
]
FLAGS += ["-Werror=narrowing"]  # the real compiler, clang, refuses narrowing


class TwinError(Exception):
    """A kernel broke a rule of the device or its API, or the real API would not compile a source."""


@dataclass(frozen=True)
class Library:
    path: Path

    def load(self) -> ctypes.CDLL:
        return _load(self.path)


@cache
def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def compile_shared(
    sources: Sequence[Path],
    watched: Sequence[Path],
    options: Sequence[str],
    search: Sequence[str],
    optimise: str = "-O2",
) -> Library:
    """Returns a shared library of `sources` (C++ files and objects), built once for each content of `sources` and
    `watched`.

    `search` are flags that only say where watched files are; equal sources in another folder give the same library.
    """
    where = _cached(f"{sources[0].stem}.so", [*sources, *watched], [optimise, *options])
    if not where.exists():
        _compile([optimise, "-shared", *options, *search, *map(str, sources), "-ldl"], sources[0], where)
    return Library(where)


def build(
    sources: Path | Sequence[Path],
    tiling_header: Path = OP_HOST / "umbra_gemv_tiling.h",
    tiling_struct: str = "UmbraGemvTiling",
    optimise: str = "-O2",
) -> Library:
    """Returns a library of unmodified kernels. `tiling_header`, the header that the host includes, defines
    `tiling_struct` with CANN's macros. `optimise`: -O0 compiles in a third of the time, for kernels that run once."""
    sources = [sources] if isinstance(sources, Path) else list(sources)
    beside = [file for source in sources for file in source.parent.iterdir() if file.suffix == ".h"]
    twin = sorted((HERE / "include").rglob("*.h"))
    search = [
        *(f"-I{folder}" for folder in [HERE / "include", *{source.parent for source in sources}]),
        f"-DTWIN_TILING_HEADER={str(tiling_header)!a}".replace("'", '"'),
        "-include",
        str(HERE / "include" / "kernel_tiling.h"),
    ]
    options = [f"-DTWIN_TILING_STRUCT={tiling_struct}"]
    return compile_shared([*sources, _runner(twin)], [*beside, *twin, tiling_header], options, search, optimise)


def clang() -> str | None:
    """The newest clang++ on the machine, or None."""
    names = ("clang++", *(f"clang++-{version}" for version in range(30, 13, -1)))
    return next(filter(shutil.which, names), None)


def check(
    code: str, tiling_header: Path = OP_HOST / "umbra_gemv_tiling.h", tiling_struct: str = "UmbraGemvTiling"
) -> str:
    """Returns clang's complaints about `code`, one or more kernels; "" if it has none. Unlike g++ it knows address
    spaces, so a pointer to global memory without __gm__ is an error, and so is a call of a function without
    __aicore__."""
    compiler = clang()
    if compiler is None:
        raise TwinError("no clang++: install clang")
    include = HERE / "include"
    command = [
        *(compiler, "-x", "cuda", "--cuda-host-only", "-nocudainc", "-nocudalib", "-fsyntax-only", "-std=c++17"),
        *("-Wno-unknown-cuda-version", "-Wno-deprecated-declarations", "-ferror-limit=0", "-fno-caret-diagnostics"),
        *("-D__host__=__attribute__((host))", "-D__device__=__attribute__((device))", "-DTWIN_STRICT"),
        *(f'-DTWIN_TILING_HEADER="{tiling_header}"', f"-DTWIN_TILING_STRUCT={tiling_struct}"),
        *(f"-I{include}", "-include", str(include / "strict.h"), "-"),
    ]
    return subprocess.run(command, input=code, capture_output=True, text=True).stderr


def _runner(twin: Sequence[Path]) -> Path:
    """The object file of runner.cpp, which every library of kernels contains."""
    source = HERE / "runner.cpp"
    where = _cached("runner.o", [source, *twin], [])
    if not where.exists():
        _compile(["-O2", "-c", f"-I{HERE / 'include'}", str(source)], source, where)
    return where


def _cached(name: str, files: Sequence[Path], options: Sequence[str]) -> Path:
    """The path in the cache of the file made from `files` with `options`; names and contents of `files` decide it."""
    content = hashlib.sha256("\0".join([*FLAGS, *options]).encode())
    for file, text in sorted({(file.name, file.read_bytes()) for file in files if file.is_file()}):
        content.update(file.encode() + b"\0" + text)
    stem, _, suffix = name.partition(".")
    return CACHE / f"{stem}-{content.hexdigest()[:24]}.{suffix}"


def _compile(arguments: Sequence[str], source: Path, where: Path) -> None:
    """Compiles `source` to `where`. Processes that do this at the same time each write a file of their own and rename
    it, so `where` is either whole or absent."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=CACHE, suffix=f"{where.suffix}.part", delete=False) as part:
        command = ["g++", *FLAGS, *arguments, "-o", part.name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        os.unlink(part.name)
        raise TwinError(f"{source.name} does not compile:\n{done.stderr}")
    os.replace(part.name, where)

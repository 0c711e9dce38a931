"""Compiles the native code for tests, apart from the build of the module. Each object file and program is made once and
kept below build/, under a name that is a hash of its command, of the compiler and of the files that go into it: those
that the compiler read when it was first made. Several processes may ask at once: a file appears under its name only
when it is whole.
"""

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fcntl import LOCK_EX, flock
from pathlib import Path

import pybind11

from umbra.base.files import ROOT

SOURCES = ROOT / "ops" / "cpu" / "csrc"
TESTS = ROOT / "tests" / "ops" / "cpu" / "native"
BRIDGE = ROOT / "ops" / "ascend" / "csrc"
OP_HOST = ROOT / "ops" / "ascend" / "vector_core" / "op_host"
TWIN_HOST = ROOT / "tests" / "fakes" / "ascend_c" / "host"
INCLUDES = [f"-I{SOURCES}", f"-I{ROOT}"]
CACHE = ROOT / "build" / "test_native"
# The sources of programs that run ops with the generic kernels, and of the pool of shadow experts.
PRODUCTS = [
    "runtime/pool",
    *(f"kernels/{name}" for name in ("pack", "panel", "blocks", "records", "products", "moe", "slots", "elementwise")),
    *(f"kernels/{name}" for name in ("attention", "delta", "generic")),
]
SHADOW = [f"shadow/{name}" for name in ("shadow", "worker", "copier")]


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done


@functools.cache
def hash_of(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if Path(file).exists() else "none"


@functools.cache
def headers() -> str:
    """The names of all headers. A new one may be found in place of another, so it changes what a command means."""
    used = [
        str(p.relative_to(ROOT)) for folder in (SOURCES, TESTS, BRIDGE, OP_HOST, TWIN_HOST) for p in folder.rglob("*.h")
    ]
    return "\n".join(sorted(used))


@functools.cache
def version_of(compiler: str) -> str:
    return run(compiler, "--version").stdout


def made_once(name: str, command: Sequence[str]) -> Path:
    """The file that `command`, followed by `-o` and the file's path, makes. A warning fails."""
    key = hashlib.sha256("\0".join([*command, version_of(command[0]), headers()]).encode()).hexdigest()[:24]
    CACHE.mkdir(parents=True, exist_ok=True)
    inputs = CACHE / f"{key}.inputs"  # the files that the compiler read, one a line

    def path() -> Path:
        content = "\0".join(map(hash_of, inputs.read_text().splitlines()))
        return CACHE / f"{key}-{hashlib.sha256(content.encode()).hexdigest()[:24]}-{name}"

    with open(CACHE / f"{key}.lock", "w") as lock:
        flock(lock, LOCK_EX)  # of two processes that need the same file, one makes it and the other waits
        if not inputs.exists() or not path().exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                new, rule, listed = (Path(folder) / file for file in (name, "rule", "inputs"))
                done = run(*command, *(["-MMD", "-MF", str(rule)] if "-c" in command else []), "-o", str(new))
                assert not done.stderr, done.stderr[-4000:]
                read = shlex.split(rule.read_text().replace("\\\n", " "))[1:] if rule.exists() else command
                listed.write_text("\n".join(file for file in read if file.endswith((".c", ".cpp", ".h"))))
                os.replace(listed, inputs)
                os.replace(new, path())
        return path()


def core_sources(machine: str) -> list[Path]:
    """Every source but the Python bindings, with the kernels of one architecture."""
    folder = {"x86_64": "x86", "aarch64": "arm"}[machine]
    rooms = (SOURCES / "kernels", SOURCES / "runtime", SOURCES / "shadow", SOURCES / "kernels" / folder)
    return [path for room in rooms for path in sorted(room.glob("*.cpp"))]


def sanitized(sanitizer: str) -> list[str]:
    """The flags of everything that runs under a sanitizer, so that programs share object files."""
    # Kernels read packed rows through wider types on purpose; x86 and ARM allow any alignment there.
    flags = ["-O1", "-g1", f"-fsanitize={sanitizer}", "-fno-sanitize=alignment", "-fno-sanitize-recover=undefined"]
    return [*flags, "-w", "-fPIC", "-pthread"]


def module_under(sanitizer: str, core: Sequence[Path]) -> Path:
    """The native module of the sources `core` and of the bindings, which are compiled without the sanitizer: they only
    hand addresses on, and with it pybind11's templates would take twice as long to compile as all kernels."""
    flags = sanitized(sanitizer)
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    bindings = compile_all("g++", ["-O0", "-w", "-fPIC", *includes], sorted((SOURCES / "bindings").glob("*.cpp")))
    return made_once("_native.so", ["g++", *flags, *bindings, *compile_all("g++", flags, core), "-shared"])


def project_with(module: Path, tree: Path) -> None:
    """Copies the project to `tree`, with `module` for its native module."""
    # Besides what is not needed, folders in which other processes write meanwhile.
    ignored = shutil.ignore_patterns(
        ".*", "__pycache__", "results", "*_cache", "build", "_native*.so", "csrc", "*.safetensors"
    )
    shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)  # umbra/ops is a link to ops
    shutil.copy(module, tree / "ops" / "cpu" / "_native.so")


def compile_all(compiler: str, flags: Sequence[str], sources: Sequence[Path]) -> list[str]:
    """The object files of `sources`, made in parallel."""

    def compiled(path: Path) -> str:
        own = ["-ffp-contract=off"] * (path.stem in ("panel", "blocks", "records"))  # as in csrc/CMakeLists.txt
        return str(made_once(f"{path.stem}.o", [compiler, "-std=c++17", *INCLUDES, *flags, *own, "-c", str(path)]))

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        return list(workers.map(compiled, sources))


def program(name: str, compiler: str, flags: Sequence[str], sources: Sequence[Path], link: Sequence[str] = ()) -> str:
    """An executable or shared library of `sources`; `flags` compile them, `link` are added when they are linked."""
    objects = compile_all(compiler, flags, sources)
    return str(made_once(name, [compiler, *flags, *objects, *link]))

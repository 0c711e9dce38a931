"""The library of preload.cpp from Python: building it, starting a program with it, and its block of memory."""

import ctypes
import errno
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from umbra.base.files import ROOT

SOURCE = Path(__file__).with_name("preload.cpp")
LIBRARY = "FAULTS_LIBRARY"  # the variable with the library's file, in a process that it is loaded into
PATH_MAX = 4096
EVER = 1 << 40

# What a call of each kind fails with, in the order of preload.cpp.
KINDS = {
    "new": errno.ENOMEM,  # C++ memory of the native module
    "tensor": errno.ENOMEM,  # memory of PyTorch's CPU allocator
    "mmap": errno.ENOMEM,
    "madvise": errno.EINVAL,
    "mbind": errno.EPERM,
    "open": errno.EMFILE,
    "read": errno.EIO,
    "write": errno.ENOSPC,
    "rename": errno.EIO,
    "fsync": errno.EIO,
    "mkdir": errno.ENOSPC,
    "thread": errno.EAGAIN,
    "send": errno.ENOBUFS,
}
NAMES = list(KINDS)


class Block(ctypes.Structure):
    """`Block` of preload.cpp."""

    _fields_ = (
        ("counts", ctypes.c_int64 * len(KINDS)),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("log", ctypes.c_int32),
        ("clock_s", ctypes.c_int64),
        ("root", ctypes.c_char * PATH_MAX),
        ("what", ctypes.c_char * PATH_MAX),
    )


class Faults:
    """The faults of this process and those that it forks; they have the same counts."""

    def __init__(self) -> None:
        library = ctypes.CDLL(os.environ[LIBRARY])
        self.count = library.faults_count  # (True): this process's calls count from now on
        library.faults_block.restype = ctypes.POINTER(Block)
        self.block: Block = library.faults_block().contents

    def arm(self, root: Path, kind: str = "new", n: int = 0, forever: bool = False, error: int = 0) -> None:
        """The n-th call of a kind that counts fails, and with `forever` all later ones; 0: none does."""
        block = self.block
        block.counts[:], block.what = [0] * len(KINDS), b""
        block.root = os.fsencode(f"{root}/")
        block.kind, block.error = NAMES.index(kind), error or KINDS[kind]
        block.first, block.last = (n, EVER if forever else n) if n else (0, -1)

    @property
    def counts(self) -> dict[str, int]:
        return dict(zip(NAMES, self.block.counts, strict=True))

    @property
    def happened(self) -> bool:
        """Returns whether a call failed."""
        return bool(self.block.first) and self.block.counts[self.block.kind] >= self.block.first

    @property
    def what(self) -> str:
        """The file that the call that failed was for, or the size of memory."""
        return os.fsdecode(self.block.what)


@functools.cache
def library(folder: Path) -> Path:
    """Builds the library in `folder`, unless that is done."""
    built = folder / "preload.so"
    if not built.exists():
        new = folder / f"preload.{os.getpid()}.so"
        flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(["c++", *flags, "-o", str(new), str(SOURCE), "-ldl", "-pthread"], check=True)
        new.replace(built)
    return built


def with_faults(program: Sequence[str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command and the environment that run a module or script of this project with the library."""
    path = str(library(folder))
    variables = {"LD_PRELOAD": path, LIBRARY: path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return [sys.executable, *program], os.environ | variables


def unsynced(log: str) -> list[str]:
    """The renames of a log of calls by which a loss of power could make something visible that is not whole: of a file
    that was changed since it was last forced to the disk, or of a folder with such a file or such names."""
    dirty: set[str] = set()
    wrong = []
    for line in log.splitlines():
        call, path, to = line.split("\t")
        if call in ("create", "mkdir"):
            dirty |= {path, str(Path(path).parent)}
        elif call == "write":
            dirty.add(path)
        elif call == "fsync":
            dirty.discard(path)
        elif call == "rename":
            changed = {name for name in dirty if name == path or name.startswith(f"{path}/")}
            if changed:
                wrong.append(f"{path} -> {to}: {sorted(changed)}")
            dirty -= changed
            dirty |= {str(Path(path).parent), str(Path(to).parent)}
    return wrong

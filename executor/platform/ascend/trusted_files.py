"""Checks that files belong to this user, are not links and are writable by this user alone, and so are their folders.

Files that are loaded from a cache can run code, so all of this is checked before any byte of them is used.
"""

import hashlib
import os
import stat
from pathlib import Path

CHUNK = 1 << 20


class Untrusted(Exception):
    """The error of a path that is not used, with the reason."""


def check_own(path: Path, status: os.stat_result) -> None:
    """Raise Untrusted if others could have changed `path`. `status` is its own, not that of a link's target."""
    if stat.S_ISLNK(status.st_mode):
        raise Untrusted(f"{path.name} is a symbolic link")
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise Untrusted(f"{path.name} is neither a file nor a folder")
    if status.st_uid != os.getuid():
        raise Untrusted(f"{path.name} belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Untrusted(f"{path.name} can be written by others (mode {stat.S_IMODE(status.st_mode):o})")


def own_files(folder: Path) -> list[Path]:
    """Every file below `folder`, sorted. All of them and all folders are checked."""
    files = []
    for path in sorted(folder.iterdir()):
        check_own(path, status := path.lstat())
        files += own_files(path) if stat.S_ISDIR(status.st_mode) else [path]
    return files


def close_to_others(folder: Path) -> None:
    """Take away the write permission of group and others below `folder`, which the umask may have given."""
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))


def read_own(path: Path, limit: int) -> bytes:
    """The bytes of a file of at most `limit` bytes; the checks are made on the descriptor that is read."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        check_own(path, status := os.fstat(file.fileno()))
        if status.st_size > limit:
            raise Untrusted(f"{path.name} has {status.st_size} bytes, more than {limit}")
        return file.read(limit)


def fingerprint(path: Path) -> list[int | str]:
    """[bytes, SHA-256]"""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
            size += len(block)
    return [size, digest.hexdigest()]


def source_digest(root: Path, sources: list[Path]) -> str:
    """One SHA-256 over the names (relative to `root`) and texts of the Python files in `sources`, files or folders."""
    files = {f for source in sources for f in ([source] if source.is_file() else source.rglob("*.py"))}
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root).as_posix()}\0{fingerprint(path)}\n".encode())
    return digest.hexdigest()

"""The project's version and folders; writing files so that they appear whole or not at all; reading untrusted JSON."""

import contextlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from umbra.base.errors import UserError

VERSION = "0.2.0"  # as in pyproject.toml
PACKAGE = Path(__file__).resolve().parents[1]
IN_TREE = (PACKAGE.parent / "yaml_configs").is_dir()  # else the package is installed, with cases and demos inside it
ROOT = PACKAGE.parent if IN_TREE else PACKAGE  # has yaml_configs/, checkpoints/ and the folder of each sub-package
WORK = ROOT if IN_TREE else Path.cwd()  # where relative paths in cases start, programs run and results/ are written
CACHES = ROOT if IN_TREE else Path.home() / ".cache" / "umbra"  # has compile_cache/ and packed_cache/
LARGEST_FILE = 24 << 20  # an index of 200,000 tensors has 20 MB
MOST_VALUES = 1 << 19  # lists, mappings and their entries in a file; each takes up to a hundred bytes of memory
LFS_POINTER = b"version https://git-lfs.github.com/"  # how a file begins that Git LFS has put in place of a large one
WIDE = 1 << 20  # bytes of a file with other characters than ASCII: one of them makes all take four bytes


def located(path: str | Path) -> Path:
    """The absolute path of a file or folder that a case names. A relative path starts at WORK; if nothing is there, it
    may name something that comes along with an installed package."""
    given = WORK / Path(path).expanduser()
    return given if IN_TREE or given.exists() or not (ROOT / path).exists() else ROOT / path


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a temporary file, then rename it to `path`, so that no process ever reads a part of it. It is on the disk
    before it gets its name, so that a loss of power leaves the whole file or none as well."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None
        raise


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`; raises UserError if there is none or the file is unreasonably large."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: not a file")
        if status.st_size > LARGEST_FILE:
            raise UserError(f"{path}: larger than {LARGEST_FILE >> 20} MB, not a config file")
        written = path.read_bytes()
        check_pointer(path, written)
        data = parsed(written)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return data


def check_pointer(path: Path, begin: bytes) -> None:
    """Raises UserError if a file that begins so is a pointer of Git LFS."""
    if begin.startswith(LFS_POINTER):
        raise UserError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull` in {path.parent}")


def parsed(data: bytes, most: int = MOST_VALUES, **options: Any) -> Any:
    """The JSON in `data`. Raises ValueError if it is none, or if it would take much more memory than `data`, which is
    known before: it may have `most` values. Raises RecursionError if it is nested too deeply. `options` are those of
    json.loads."""
    if sum(map(data.count, (b",", b"[", b"{"))) > most:
        raise ValueError(f"more than {most} values")
    if len(data) > WIDE and not data.isascii():
        raise ValueError(f"larger than {WIDE >> 20} MB, and with other characters than ASCII")
    return json.loads(data.decode(), **options)

"""The project's root folder, and a way to write files so that they appear whole or not at all."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from errors import UserError

ROOT = Path(__file__).resolve().parent


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

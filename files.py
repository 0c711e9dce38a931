"""The project's root folder, and a way to write files so that they appear whole or not at all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from errors import UserError

ROOT = Path(__file__).resolve().parent


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a temporary file, then rename it to `path`, so that no process ever reads a part of it."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def write_json(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))

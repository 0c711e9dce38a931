"""A resolved case as a file: the process that has read a case's YAML writes it once, and those that it starts read it.

It is JSON: every key with its value, as in a `Case`, sizes filled in.
"""

import dataclasses
import json
from pathlib import Path

import msgspec

from umbra.base.errors import UserError
from umbra.base.files import LARGEST_FILE, write_whole
from umbra.executor.config.case import Case


def write_resolved(case: Case, path: Path) -> None:
    pieces: list[bytes] = []
    size = 0
    for piece in json.JSONEncoder().iterencode(dataclasses.asdict(case)):  # aliases of one YAML text are written out
        size += len(piece)
        if size > LARGEST_FILE:
            raise UserError(f"case {case.name}: its prompts have more than {LARGEST_FILE >> 20} MB together")
        pieces.append(piece.encode())
    write_whole(path, lambda file: file.writelines(pieces))


def read_resolved(path: Path) -> Case:
    """The case that `write_resolved` has written. Its rules were checked before it was written."""
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > LARGEST_FILE:
        raise UserError(f"{path}: larger than {LARGEST_FILE >> 20} MB, not a resolved case")
    try:
        return msgspec.convert(json.loads(data), Case)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise UserError(f"{path}: not a resolved case: {error}") from None

"""Reads a tokenizer's files once and keeps the result in `packed_cache/`: importing transformers and reading them takes
seconds, which the next start, and the other processes of this one, do not need.

A record is found by a digest of all that it was made from. It appears whole or not at all.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from umbra.base.errors import UserError
from umbra.base.files import CACHES, write_whole
from umbra.text.conventions import Conventions
from umbra.text.tiktoken_file import converted
from umbra.text.tokenizer_file import LARGEST, adds_bos, check_tokenizer

RECORDS = CACHES / "packed_cache" / "tokenizers"
MOST_RECORDS = 32  # that are kept; those that were used last
LAYOUT = 1  # raised whenever a record of the same files becomes another one
SUFFIXES = (".json", ".jinja", ".txt", ".model")  # of the files that may decide what a tokenizer does
LIBRARIES = ("transformers", "tokenizers")


class TokenizerRecord(msgspec.Struct, frozen=True):
    backend: str  # the tokenizer of the library `tokenizers`, in its JSON
    special_tokens: dict[str, Any]  # by their roles, such as bos_token: variables of chat templates
    chat_template: str | dict[str, str]  # of several, which have names, all; empty: there is none
    eos_token_id: int | None


def read_record(folder: Path, conventions: Conventions) -> TokenizerRecord:
    """The record of the tokenizer in `folder`. Raises UserError, or whatever the libraries raise, if its files are not
    readable."""
    check_tokenizer(folder)
    path = RECORDS / f"{_digest(folder, conventions)}.msgpack"
    if record := _kept(path):
        return record
    with _making():
        record = _kept(path) or _made(folder, conventions)
        with contextlib.suppress(OSError, UserError):  # without it, the next start is slower
            if not path.exists():
                write_whole(path, lambda file: file.write(msgspec.msgpack.encode(record)))
                os.chmod(path, 0o600)
                _forget_old()
        return record


def _made(folder: Path, conventions: Conventions) -> TokenizerRecord:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    with converted(folder, conventions.classes) as read:
        tokenizer = AutoTokenizer.from_pretrained(read, local_files_only=True, trust_remote_code=False)
    backend = tokenizer.backend_tokenizer
    if adds_bos(folder) and tokenizer.bos_token_id not in backend.encode("").ids:
        tokenizer.add_bos_token = True  # which transformers 5 looks for in tokenizer.json alone
    backend.no_padding()
    backend.no_truncation()
    templates = tokenizer.chat_template or ""
    if not all(isinstance(t, str) for t in (templates.values() if isinstance(templates, dict) else [templates])):
        raise ValueError("chat_template: must be text, or texts with names")
    return TokenizerRecord(
        backend.to_str(), {**tokenizer.special_tokens_map}, templates, _number(tokenizer.eos_token_id)
    )


def _number(id: Any) -> int | None:
    return id if isinstance(id, int) else None


def _digest(folder: Path, conventions: Conventions) -> str:
    """Names everything that a record is made from."""
    digest = hashlib.blake2b(digest_size=16)
    versions = [f"{name} {version(name)}" for name in LIBRARIES]
    digest.update(repr((LAYOUT, versions, sorted(conventions.classes.items()))).encode())
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size <= LARGEST:
            data = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def _kept(path: Path) -> TokenizerRecord | None:
    """The record in the file `path`; None if there is none, or if another user could have written it."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                return None
            record = msgspec.msgpack.decode(file.read(), type=TokenizerRecord)
        os.utime(path)  # it was used
        return record
    except (OSError, msgspec.MsgspecError):
        return None


@contextlib.contextmanager
def _making() -> Iterator[None]:
    """One process at a time makes a record, so that the processes of one start do not make the same one."""
    try:
        RECORDS.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(RECORDS, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # there is no place for one
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _forget_old() -> None:
    for path in sorted(RECORDS.glob("*.msgpack"), key=lambda p: p.stat().st_mtime)[:-MOST_RECORDS]:
        path.unlink(missing_ok=True)

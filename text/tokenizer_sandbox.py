"""Encodes texts where a tokenizer of an unusual kind can be ended.

Tokenizers are programs of a checkpoint's author too: a regular expression, or a vocabulary of long tokens, may take
minutes for a text of some thousand characters. Byte-pair encoding with the expressions of published models takes time
in proportion to the text; such tokenizers run in the process that uses them.

This module, run as a program, is the process that has the tokenizer; it forks another for each text.
"""

import contextlib
import json
import sys
from typing import Any

import msgspec

from umbra.text.sandbox import Sandbox, read, tried, write
from umbra.text.tokenizer_file import patterns

BASE_SECONDS = 2.0  # CPU time allowed for any text
CHARACTERS_PER_SECOND = 250_000  # one more second for each
BASE_BYTES = 1 << 29  # memory allowed for any text
BYTES_PER_CHARACTER = 256


def is_linear(backend: Any, known: frozenset[str]) -> bool:
    """Returns whether `backend`, a tokenizer of the library, encodes a text in time proportional to its length. A match
    of one of the expressions `known` takes a number of steps proportional to its own."""
    present = [part for part in (backend.normalizer, backend.pre_tokenizer) if part is not None]
    used = {pattern for part in present for pattern in patterns(json.loads(part.__getstate__()))}
    return type(backend.model).__name__ == "BPE" and used <= known


class Encoder:
    """Encodes with `backend`, a tokenizer in the library's JSON, in another process, one text at a time."""

    def __init__(self, backend: str):
        self._sandbox = Sandbox("umbra.text.tokenizer_sandbox", backend.encode())

    def ids(self, text: str, special: bool) -> list[int]:
        """Raises ValueError with the reason if the tokenizer fails, or takes too much time or memory."""
        answer = self._sandbox.answer(msgspec.msgpack.encode((text, special)))
        ids: list[int] | str = msgspec.msgpack.decode(answer, type=list[int] | str)
        if isinstance(ids, str):
            raise ValueError(ids)
        return ids


def main() -> None:
    """Answers each text on standard input with its ids, or with why there are none."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(read(sys.stdin.buffer).decode())
    with contextlib.suppress(EOFError):
        while True:
            text, special = msgspec.msgpack.decode(read(sys.stdin.buffer))
            write(sys.stdout.buffer, _tried(backend, text, special))


def _tried(backend: Any, text: str, special: bool) -> bytes:
    seconds = BASE_SECONDS + len(text) / CHARACTERS_PER_SECOND
    memory = BASE_BYTES + BYTES_PER_CHARACTER * len(text)
    answer = tried(lambda: _encoded(backend, text, special), seconds, memory)
    more = f"it takes more than {seconds:.3g} s or {memory >> 20} MB for {len(text)} characters"
    return msgspec.msgpack.encode(more) if answer is None else answer


def _encoded(backend: Any, text: str, special: bool) -> bytes:
    try:
        return msgspec.msgpack.encode(backend.encode(text, add_special_tokens=special).ids)
    except BaseException as error:  # what Rust calls a panic is no Exception
        return msgspec.msgpack.encode(str(error)[:1000])


if __name__ == "__main__":
    main()

"""Compiles the grammars of requests once before they reach the ranks, in processes that can be ended: llguidance has
limits of its own, but the time and the memory of some grammars, such as conjunctions of patterns, have none.

One process has the tokenizer and forks another for each grammar. It has a single thread, so that forking it is safe,
and it ends when its standard input is closed, as it is when the front ends.
"""

import contextlib
import sys
from collections.abc import Collection
from pathlib import Path

import msgspec

from umbra.base.errors import UserError
from umbra.executor.engine.schedule.grammar import Grammars
from umbra.executor.engine.schedule.request import Grammar
from umbra.text.sandbox import Sandbox, read, tried, write

SECONDS = 0.5  # of a processor, for one grammar; ranks, which compile it again, go on with other requests meanwhile
MEMORY = 1 << 29  # bytes for one grammar
TOO_MUCH = f"it takes more than {SECONDS:g} s or {MEMORY >> 20} MB to compile: make it simpler"


class Compiler:
    """Compiles for the checkpoint in `folder`, whose end-of-sequence ids are `ends`."""

    def __init__(self, folder: Path, vocabulary: int, ends: Collection[int]):
        setup = msgspec.msgpack.encode((str(folder), vocabulary, sorted(ends)))
        self.sandbox = Sandbox("umbra.serving.api.compiling", setup)

    def start(self) -> None:
        """Has the process read the tokenizer, for which the first question would wait; takes seconds."""
        self.problem("regex", "a")

    def problem(self, kind: str, text: str) -> str:
        """Returns why the engine could not follow a grammar; empty: it can. To be called in a thread, for up to
        about a second."""
        return self.sandbox.answer(msgspec.msgpack.encode((kind, text))).decode()

    def close(self) -> None:
        self.sandbox.close()


def main() -> None:
    """The process with the tokenizer: answers each grammar on its standard input with what is wrong with it."""
    grammars = read_grammars(read(sys.stdin.buffer))
    with contextlib.suppress(EOFError):
        while True:
            kind, text = msgspec.msgpack.decode(read(sys.stdin.buffer))
            write(sys.stdout.buffer, _tried(Grammar(kind, text), grammars))


def read_grammars(setup: bytes) -> Grammars | str:
    """The grammars of a compiler's `setup`, with all that every grammar needs, so that forks have it; or why none can
    be followed."""
    folder, vocabulary, ends = msgspec.msgpack.decode(setup)
    try:
        grammars = Grammars.read(Path(folder), vocabulary, ends)
        grammars.matcher(Grammar("regex", "a"))
    except UserError as error:
        return str(error)
    return grammars


def _tried(grammar: Grammar, grammars: Grammars | str) -> bytes:
    if isinstance(grammars, str):
        return grammars.encode()
    problem = tried(lambda: problem_of(grammar, grammars).encode(), SECONDS, MEMORY)
    return TOO_MUCH.encode() if problem is None else problem


def problem_of(grammar: Grammar, grammars: Grammars) -> str:
    """Returns what is wrong with `grammar`, after its first step as well; empty: nothing."""
    try:
        grammars.matcher(grammar)
    except UserError as error:
        return str(error).removeprefix("grammar: ")
    return ""


if __name__ == "__main__":
    main()

"""Compiles the grammars of requests once before they reach the ranks, in processes that can be ended: llguidance has
limits of its own, but the time and the memory of some grammars, such as conjunctions of patterns, have none.

One process has the tokenizer and forks another for each grammar. It has a single thread, so that forking it is safe,
and it ends when its standard input is closed, as it is when the front ends.
"""

import contextlib
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from copy import copy
from typing import IO, Any, cast

import msgspec

from errors import UserError
from executor.checkpoint.tokenizer import Tokenizer
from executor.engine.request import Grammar
from executor.serving.messages import Ready
from files import ROOT

SECONDS = 0.5  # of a processor, for one grammar; ranks, which compile it again, then halt for about as long
MEMORY = 1 << 29  # bytes for one grammar
TOO_MUCH = f"it takes more than {SECONDS:g} s or {MEMORY >> 20} MB to compile: make it simpler"
HEADER = struct.Struct("<I")


class Compiler:
    def __init__(self, tokenizer: Tokenizer, ready: Ready):
        backend = copy(tokenizer.backend)
        backend.no_padding()
        backend.no_truncation()
        self._setup = msgspec.msgpack.encode((backend.to_str(), ready.vocabulary, sorted(ready.stop_ids)))
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def problem(self, kind: str, text: str) -> str:
        """Why the engine could not follow a grammar; empty: it can. To be called in a thread, for up to
        about a second."""
        with self._lock:
            for _ in range(2):
                with contextlib.suppress(OSError, EOFError):
                    return self._ask(msgspec.msgpack.encode((kind, text)))
                self.close()  # somebody has killed it
        raise RuntimeError("the process that compiles grammars does not stay alive")

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _ask(self, question: bytes) -> str:
        fresh = not self.process
        if not self.process:
            command = [sys.executable, "-m", "executor.serving.compiling"]
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        to, answers = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)
        if fresh:
            _write(to, self._setup)
        _write(to, question)
        return _read(answers).decode()


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes:
    """The next message. Raises EOFError if there is none."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return stream.read(HEADER.unpack(header)[0])


def main() -> None:
    """The process with the tokenizer: answers each grammar on its standard input with what is wrong with it."""
    from llguidance import LLTokenizer

    text, vocabulary, ends = msgspec.msgpack.decode(_read(sys.stdin.buffer))
    tokens = LLTokenizer(text, n_vocab=vocabulary, eos_token=ends)
    _compiled(Grammar("regex", "a"), tokens)  # what all grammars need is made before the first fork
    with contextlib.suppress(EOFError):
        while True:
            kind, text = msgspec.msgpack.decode(_read(sys.stdin.buffer))
            _write(sys.stdout.buffer, _tried(Grammar(kind, text), tokens))


def _tried(grammar: Grammar, tokens: Any) -> bytes:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(2)  # what llguidance says of the end of its memory
        limit()
        os.write(writing, _compiled(grammar, tokens).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        answer = stream.read()
    _, status = os.waitpid(child, 0)
    return TOO_MUCH.encode() if status else answer


def limit() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _compiled(grammar: Grammar, tokens: Any) -> str:
    """What is wrong with `grammar`, after its first step as well; empty: nothing."""
    from llguidance import LLMatcher

    from executor.engine.grammar import checked

    try:
        matcher = LLMatcher(tokens, checked(grammar, tokens), log_level=0)
        matcher.compute_bitmask()
    except UserError as error:
        return str(error).removeprefix("grammar: ")
    return " ".join(matcher.get_error().split())[:300]


if __name__ == "__main__":
    main()

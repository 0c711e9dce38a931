"""Compiles the grammars of requests once before they reach the ranks, in processes that can be ended: llguidance has
limits of its own, but the time and the memory of some grammars, such as conjunctions of patterns, have none.

One process has the tokenizer and forks another for each grammar. It has a single thread, so that forking it is safe,
and it ends when its standard input is closed, as it is when the front ends.
"""

import contextlib
import sys
from copy import copy
from typing import Any

import msgspec

from umbra.base.errors import UserError
from umbra.executor.engine.schedule.request import Grammar
from umbra.serving.ranks.messages import Ready
from umbra.text.sandbox import Sandbox, read, tried, write
from umbra.text.tokenizer import Tokenizer

SECONDS = 0.5  # of a processor, for one grammar; ranks, which compile it again, then pause for about as long
MEMORY = 1 << 29  # bytes for one grammar
TOO_MUCH = f"it takes more than {SECONDS:g} s or {MEMORY >> 20} MB to compile: make it simpler"


class Compiler:
    def __init__(self, tokenizer: Tokenizer, ready: Ready):
        backend = copy(tokenizer.backend)
        backend.no_padding()
        backend.no_truncation()
        setup = msgspec.msgpack.encode((backend.to_str(), ready.vocabulary, sorted(ready.stop_ids)))
        self.sandbox = Sandbox("umbra.serving.api.compiling", setup)

    def problem(self, kind: str, text: str) -> str:
        """Returns why the engine could not follow a grammar; empty: it can. To be called in a thread, for up to
        about a second."""
        return self.sandbox.answer(msgspec.msgpack.encode((kind, text))).decode()

    def close(self) -> None:
        self.sandbox.close()


def main() -> None:
    """The process with the tokenizer: answers each grammar on its standard input with what is wrong with it."""
    tokens = tokens_of(read(sys.stdin.buffer))
    with contextlib.suppress(EOFError):
        while True:
            kind, text = msgspec.msgpack.decode(read(sys.stdin.buffer))
            write(sys.stdout.buffer, _tried(Grammar(kind, text), tokens))


def tokens_of(setup: bytes) -> Any:
    """The tokenizer of a compiler's `setup`, with all that every grammar needs, so that forks have it."""
    from llguidance import LLTokenizer

    text, vocabulary, ends = msgspec.msgpack.decode(setup)
    tokens = LLTokenizer(text, n_vocab=vocabulary, eos_token=ends)
    compiled(Grammar("regex", "a"), tokens)
    return tokens


def _tried(grammar: Grammar, tokens: Any) -> bytes:
    problem = tried(lambda: compiled(grammar, tokens).encode(), SECONDS, MEMORY)
    return TOO_MUCH.encode() if problem is None else problem


def compiled(grammar: Grammar, tokens: Any) -> str:
    """Returns what is wrong with `grammar`, after its first step as well; empty: nothing."""
    from llguidance import LLMatcher

    from umbra.executor.engine.schedule.grammar import checked

    try:
        matcher = LLMatcher(tokens, checked(grammar, tokens), log_level=0)
        matcher.compute_bitmask()
    except UserError as error:
        return str(error).removeprefix("grammar: ")
    return " ".join(matcher.get_error().split())[:300]


if __name__ == "__main__":
    main()

"""Grammars that no limit of llguidance stops are stopped by the process that tries them."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from serving.api import compiling
from serving.api.compiling import Compiler
from serving.ranks.messages import Ready
from tests.serving.api.front import family_tokenizer
from text.sandbox import Ended, Helper, limit

# The automaton of all of them together has a state for each set of them.
ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(10, 60)]})


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    tokenizer = family_tokenizer("qwen3")
    size, end = tokenizer.backend.get_vocab_size(), tokenizer.hf.eos_token_id
    compiler = Compiler(
        tokenizer,
        Ready(
            longest=9, batch_size=1, vocabulary=size, page_size=16, pages=1, groups=1, stop_ids=[end], prefill_rate=1.0
        ),
    )
    yield compiler
    compiler.close()


def test_good_bad_and_endless_grammars(compiler: Compiler) -> None:
    assert compiler.problem("regex", "a+") == ""
    assert "unclosed group" in compiler.problem("regex", "(")
    assert compiler.problem("json", ENDLESS) == compiling.TOO_MUCH
    assert compiler.problem("lark", 'start: "a"') == ""


def test_a_grammar_that_needs_too_much_memory() -> None:
    """Without its limit, the process would have the pages that it asks for."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        limit(compiling.SECONDS, compiling.MEMORY)
        try:
            bytearray(2 * compiling.MEMORY)
        except MemoryError:
            os.write(writing, b"none")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    assert os.read(reading, 10) == b"none"
    os.close(reading)


def test_it_is_started_again_when_somebody_kills_it(compiler: Compiler) -> None:
    assert compiler.problem("regex", "a") == ""
    assert compiler.helper.process is not None
    os.kill(compiler.helper.process.pid, signal.SIGKILL)
    assert compiler.problem("regex", "a") == ""


def test_it_ends_with_the_front(compiler: Compiler) -> None:
    assert compiler.problem("regex", "a") == ""
    process = compiler.helper.process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=30) == 0


class Asked(Helper):
    """A helper that ends as often as it is told to before it answers."""

    def __init__(self, ends: int):
        super().__init__("serving.api.compiling")
        self.ends, self.asked, self.closed = ends, list[bytes](), False

    def ask(self, data: bytes) -> bytes:
        self.asked.append(data)
        if len(self.asked) <= self.ends:
            raise Ended(-9)
        return "é".encode()

    def close(self) -> int:
        self.closed = True
        return 0


@pytest.mark.parametrize("ends", [0, 1, 2])
def test_a_helper_that_does_not_stay_alive_is_told(ends: int) -> None:
    compiler: Any = Compiler.__new__(Compiler)
    compiler.helper = Asked(ends)
    if ends == 2:
        with pytest.raises(RuntimeError, match=r"the process of serving\.api\.compiling does not stay alive"):
            compiler.problem("regex", "a")
    else:
        assert compiler.problem("regex", "a") == "é"
    assert compiler.helper.asked == [msgspec.msgpack.encode(("regex", "a"))] * min(ends + 1, 2)
    compiler.close()
    assert compiler.helper.closed


def test_a_grammar_is_tried_where_it_can_be_stopped_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, with a timer, and without a standard error."""
    own = os.getpid()

    def compiled(grammar: Any, tokens: Any) -> str:
        try:
            os.fstat(2)
            silent = False
        except OSError:
            silent = True
        timer = signal.getitimer(signal.ITIMER_PROF)[0] > 0
        return f"{grammar} {tokens} {os.getpid() != own} {silent} {timer}"

    monkeypatch.setattr(compiling, "compiled", compiled)
    assert compiling._tried("grammar", "tokens") == b"grammar tokens True True True"  # type: ignore[arg-type]
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0
    monkeypatch.setattr(compiling, "compiled", lambda grammar, tokens: os.kill(os.getpid(), signal.SIGKILL))
    assert compiling._tried("grammar", "tokens").decode() == compiling.TOO_MUCH  # type: ignore[arg-type]
    assert compiling.TOO_MUCH == "it takes more than 0.5 s or 512 MB to compile: make it simpler"

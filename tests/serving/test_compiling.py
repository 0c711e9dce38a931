"""Grammars that no limit of llguidance stops are stopped by the process that tries them."""

import json
import os
import signal
from collections.abc import Iterator

import pytest

from executor.serving import compiling
from executor.serving.compiling import Compiler
from executor.serving.messages import Ready
from tests.serving.front import family_tokenizer

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
        compiling.limit()
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

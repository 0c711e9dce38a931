"""Grammars that no limit of llguidance stops are stopped by the process that tries them."""

import json
import os
import signal
from collections.abc import Iterator

import pytest

from serving.api import compiling
from serving.api.compiling import Compiler
from serving.ranks.messages import Ready
from tests.serving.api.front import family_tokenizer

# The automaton of all of them together has a state for each set of them.
ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(10, 60)]})


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    tokenizer = family_tokenizer("qwen3")
    size, end = tokenizer.backend.get_vocab_size(), tokenizer.hf.eos_token_id
    compiler = Compiler(tokenizer, Ready(9, 1, size, 16, 1, 1, [end], 1.0))
    yield compiler
    compiler.close()


def test_good_bad_and_endless_grammars(compiler: Compiler) -> None:
    assert compiler.problem("regex", "a+") == ""
    assert "unclosed group" in compiler.problem("regex", "(")
    assert compiler.problem("json", ENDLESS) == compiling.TOO_MUCH
    assert compiler.problem("lark", 'start: "a"') == ""


def test_its_process_is_started_again_and_ends_with_the_front(compiler: Compiler) -> None:
    assert compiler.problem("regex", "a") == ""
    assert compiler.helper.process is not None
    os.kill(compiler.helper.process.pid, signal.SIGKILL)
    assert compiler.problem("regex", "a") == ""
    process = compiler.helper.process
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=30) == 0

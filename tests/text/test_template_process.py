"""What the process that renders chat templates does with one question, in this process."""

import io
import json
import resource
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from text import template as module
from text.sandbox import Ended, limit_memory, read, write
from text.template import (
    BAD,
    GOOD,
    LONGER,
    LONGEST,
    MEMORY,
    SECONDS,
    TOO_MUCH,
    PlainNamespace,
    _answer,
    failed,
    main,
    sandbox,
    variables_of,
)


def answer(source: str, **variables: Any) -> bytes:
    return _answer(sandbox().from_string, json.dumps([source, variables]).encode())


def test_a_text_or_why_there_is_none() -> None:
    assert answer("{{ a }}\ud83d!", a="é") == GOOD + "é\ud83d!".encode("utf-8", "surrogatepass")
    assert answer("{{ raise_exception('no system message') }}") == BAD + b"no system message"
    assert answer("{{ a.b.c }}").startswith(BAD)
    assert answer("{% if %}").startswith(BAD)
    assert answer("{{ raise_exception('x' * 2000) }}") == BAD + b"x" * 1000
    assert _answer(sandbox().from_string, b"no JSON").startswith(BAD)

    def hungry(source: str) -> Any:
        raise MemoryError

    assert _answer(hungry, b'["", {}]') == BAD + TOO_MUCH.encode()


def test_a_text_may_be_so_long() -> None:
    source = "{{ 'x' * n }}"
    question = json.dumps([source, {"n": 10**6}]).encode()
    most = LONGER * len(question) + LONGEST
    assert most > 10**5
    for more, right in ((0, True), (1, False)):
        question = json.dumps([source, {"n": most + more}]).encode()
        most_here = LONGER * len(question) + LONGEST
        assert most_here >= most
        exact = json.dumps([source, {"n": most_here + more}]).encode()
        assert len(exact) == len(question)
        found = _answer(sandbox().from_string, exact)
        said = f"it makes {most_here + more} characters of {len(exact)}".encode()
        assert found == (GOOD + b"x" * most_here if right else BAD + said)


def test_what_templates_may_use() -> None:
    assert answer("{{ {'b': 1, 'a': 'é<'} | tojson }}") == GOOD + '{"b": 1, "a": "é<"}'.encode()
    assert answer("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}") == (
        GOOD + b'{"a":"\\u00e9","b":1}'
    )
    assert answer("{{ [1] | tojson(indent=1) }}") == GOOD + b"[\n 1\n]"
    assert answer("{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}") == GOOD + b"1"
    assert answer("a\n  {% generation %}\nb{% endgeneration %}\nc") == GOOD + b"a\nbc"
    assert answer("{% set n = namespace(a=1, b=2) %}{% set n.a = 5 %}{{ n.a + n.b }}") == GOOD + b"7"
    assert answer("{{ dict([('a', 1)], b=2)['a'] + dict(b=2).b }}") == GOOD + b"3"
    assert len(answer("{{ strftime_now('%Y') }}")) == len(GOOD) + 4
    assert answer("{% set n = namespace(_a=1) %}").startswith(BAD)
    assert answer("{{ ''.__class__ }}").startswith(BAD) or answer("{{ ''.__class__ }}") == GOOD
    namespace = PlainNamespace({"a": 1})
    with pytest.raises(SecurityError, match="a namespace cannot have the attribute '_b'"):
        namespace["_b"] = 2


def test_messages_as_templates_see_them() -> None:
    messages = [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": "b", "reasoning_content": "c"},
        {"role": "assistant", "content": "b", "thinking": ""},
    ]
    assert variables_of(messages, {"tools": None}) == {
        "tools": None,
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "c", "thinking": "c"},
            {"role": "assistant", "content": "b", "reasoning_content": "", "thinking": ""},
        ],
        "documents": None,
        "add_generation_prompt": True,
    }
    assert str(failed("a\n  b" + "c" * 400)) == f"the checkpoint's chat template failed: a b{'c' * 297}"


def test_questions_are_answered_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own time; memory is limited once, and files may not grow."""
    done: list[Any] = []
    questions, answers = io.BytesIO(), io.BytesIO()
    for text in ("a", "{{ 1 + 1 }}"):
        write(questions, json.dumps([text, {}]).encode())
    questions.seek(0)
    monkeypatch.setattr(module, "limit_memory", done.append)
    monkeypatch.setattr(module.resource, "setrlimit", lambda *given: done.append(given))
    monkeypatch.setattr(module.signal, "setitimer", lambda *given: done.append(given))
    monkeypatch.setattr(module.sys, "stdin", SimpleNamespace(buffer=questions))
    monkeypatch.setattr(module.sys, "stdout", SimpleNamespace(buffer=answers))
    main()
    monkeypatch.undo()
    answers.seek(0)
    assert [read(answers), read(answers)] == [GOOD + b"a", GOOD + b"2"]
    timed = [(signal.ITIMER_PROF, SECONDS), (signal.ITIMER_PROF, 0)]
    assert done == [MEMORY, (resource.RLIMIT_FSIZE, (0, 0)), *timed, *timed]


def test_memory_is_limited_beyond_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.__setitem__(kind, limit))
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[0]) * resource.getpagesize()
    limit_memory(1 << 30)
    soft, hard = limits[resource.RLIMIT_AS]
    assert soft == hard
    assert abs(soft - before - (1 << 30)) < 1 << 28
    assert limits[resource.RLIMIT_CORE] == (0, 0)


class Helper:
    """One that ends with each of `statuses`, and then answers."""

    def __init__(self, *statuses: int):
        self.statuses, self.asked = [*statuses], 0

    def ask(self, question: bytes) -> bytes:
        self.asked += 1
        if self.statuses:
            raise Ended(self.statuses.pop(0))
        return GOOD


def test_messages_are_framed_and_whole() -> None:
    stream = io.BytesIO()
    write(stream, b"abc")
    assert stream.getvalue() == b"\x03\0\0\0abc"
    for end in range(7):
        with pytest.raises(EOFError):
            read(io.BytesIO(stream.getvalue()[:end]))
    assert sys.getsizeof(read(io.BytesIO(stream.getvalue()))) > 0

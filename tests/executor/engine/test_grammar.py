"""Grammars over single bytes: what they allow, how large they may be, and how they end."""

from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLTokenizer

from errors import UserError
from executor.engine import grammar as module
from executor.engine.grammar import Grammars, Matcher, checked
from executor.engine.request import Grammar

BYTES = LLTokenizer("byte")


@pytest.fixture
def grammars() -> Any:
    made: Any = Grammars.__new__(Grammars)
    made.tokens = BYTES
    return made


def follows(matcher: Matcher, text: str) -> list[bool]:
    return [matcher.accept(byte) for byte in text.encode()]


def test_an_answer_is_followed_token_by_token(grammars: Grammars) -> None:
    matcher = grammars.matcher(Grammar("regex", "ab?c"))
    assert matcher.allowed()[ord("a") // 8] == 1 << ord("a") % 8
    assert sum(byte.bit_count() for byte in matcher.allowed()) == 1
    assert matcher.accept(ord("a"))
    assert sum(byte.bit_count() for byte in matcher.allowed()) == 2
    assert follows(matcher, "c") == [True]
    wrong = grammars.matcher(Grammar("regex", "ab?c"))
    assert follows(wrong, "ax") == [True, False]
    assert follows(wrong, "c") == [False]  # nothing follows a mistake


def test_a_matcher_that_has_failed_takes_no_token() -> None:
    taken: list[int] = []

    def consume(token: int) -> bool:
        taken.append(token)
        return token == 1

    for failed, found, seen in ((False, [True, False], [1, 2]), (True, [False, False], [])):
        taken.clear()
        made: Any = SimpleNamespace(is_error=lambda failed=failed: failed, consume_token=consume)
        assert [Matcher(made).accept(token) for token in (1, 2)] == found
        assert taken == seen


def test_json_has_no_spaces_between_its_parts(grammars: Grammars, capfd: pytest.CaptureFixture[str]) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'
    for text, length in (('{"a":true', 9), ('{"a": true', 5), ('{ "a":true', 1), ('{"a":true }', 9)):
        assert sum(follows(grammars.matcher(Grammar("json", schema)), text)) == length
    assert capfd.readouterr() == ("", "")  # what a model gets wrong is not logged


def test_a_grammar_may_have_so_many_characters_and_no_more(monkeypatch: pytest.MonkeyPatch, grammars: Grammars) -> None:
    monkeypatch.setattr(module, "LARGEST", 5)
    assert grammars.checked(Grammar("regex", "abcde")) == checked(Grammar("regex", "abcde"), BYTES)
    with pytest.raises(UserError, match="grammar: 6 characters are more than 5"):
        grammars.checked(Grammar("regex", "abcdef"))


@pytest.mark.parametrize(
    ("kind", "text"), [("json", "{"), ("json", '{"type": 7}'), ("regex", "(["), ("lark", "start: no")]
)
def test_what_is_wrong_is_said_in_one_line(kind: str, text: str) -> None:
    with pytest.raises(UserError, match=r"^grammar: ") as raised:
        checked(Grammar(kind, text), BYTES)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) <= 300 + len("grammar: ")


def test_long_complaints_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wordy:
        grammar_from_regex = grammar_from_lark = staticmethod(lambda text: text)
        problems: Any = (True, ["x " * 400, "another"])

        @staticmethod
        def grammar_from_json_schema(text: str, defaults: Any) -> str:
            raise RecursionError("y\n" * 400)

        @classmethod
        def validate_grammar_with_warnings(cls, text: str, tokens: object) -> Any:
            return cls.problems

    monkeypatch.setattr(module, "LLMatcher", Wordy)
    with pytest.raises(UserError) as raised:
        checked(Grammar("json", "{}"), BYTES)
    assert str(raised.value) == "grammar: " + "y " * 150
    with pytest.raises(UserError) as raised:
        checked(Grammar("regex", "a"), BYTES)
    assert str(raised.value) == "grammar: " + "x " * 150
    Wordy.problems = (False, ["a warning"])
    assert checked(Grammar("regex", "a"), BYTES) == "a"


def test_an_answer_with_a_grammar_needs_an_end() -> None:
    tokenizer: Any = SimpleNamespace(folder="folder")
    with pytest.raises(UserError, match="folder: names no end-of-sequence token, which an answer with a grammar needs"):
        Grammars(tokenizer, 9, [])

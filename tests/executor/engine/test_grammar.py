"""Grammars over single bytes: what they allow, how large they may be, and how they end."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from executor.engine.grammar import LARGEST, Grammars, Matcher, checked
from executor.engine.request import Grammar
from text.tokenizer import Tokenizer
from umbra.errors import UserError
from umbra.files import ROOT

BYTES = LLTokenizer("byte")


def matcher(kind: str, text: str) -> Matcher:
    return Matcher(LLMatcher(BYTES, checked(Grammar(kind, text), BYTES), log_level=0))


def follows(matcher: Matcher, text: str) -> list[bool]:
    return [matcher.accept(byte) for byte in text.encode()]


def test_an_answer_is_followed_token_by_token() -> None:
    right, wrong = matcher("regex", "ab?c"), matcher("regex", "ab?c")
    assert right.allowed()[ord("a") // 8] == 1 << ord("a") % 8
    assert sum(byte.bit_count() for byte in right.allowed()) == 1
    assert follows(right, "ac") == [True, True]
    assert follows(wrong, "ax") == [True, False]
    assert follows(wrong, "c") == [False]  # nothing follows a mistake


def test_json_has_no_spaces_between_its_parts(capfd: pytest.CaptureFixture[str]) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'
    for text, length in (('{"a":true', 9), ('{"a": true', 5), ('{ "a":true', 1), ('{"a":true }', 9)):
        assert sum(follows(matcher("json", schema), text)) == length
    assert capfd.readouterr() == ("", "")  # what a model gets wrong is not logged


@pytest.mark.parametrize(
    ("kind", "text"),
    [("json", "{"), ("json", '{"type": 7}'), ("regex", "(["), ("lark", "start: no"), ("regex", "a" * (LARGEST + 1))],
)
def test_what_is_wrong_is_said_in_one_line(kind: str, text: str) -> None:
    with pytest.raises(UserError, match=r"^grammar: ") as raised:
        checked(Grammar(kind, text), BYTES)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) <= 300 + len("grammar: ")


def test_an_answer_with_a_grammar_needs_an_end() -> None:
    tokenizer = Tokenizer(ROOT / "checkpoints" / "austen_moe")
    with pytest.raises(UserError, match="austen_moe: names no end-of-sequence token, which an answer with a grammar"):
        Grammars(tokenizer, 9, [])

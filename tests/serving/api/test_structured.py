"""Grammars that requests ask for, and those of tool calls, followed token by token by llguidance itself."""

from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from executor.engine.grammar import Grammars
from executor.engine.request import Grammar as EngineGrammar
from serving.api import structured
from serving.api.fields import Fields
from serving.ranks.messages import Grammar
from tests.serving.api.front import family_tokenizer
from text.formats import FORMATS, TAGS
from text.parser import Parser


def follows(grammar: Grammar, text: str, family: str = "qwen3") -> bool:
    """Whether `text` is a whole answer that `grammar` allows."""
    tokenizer = family_tokenizer(family)
    size, end = tokenizer.backend.get_vocab_size(), tokenizer.hf.eos_token_id
    grammars = Grammars(tokenizer, size, [end])
    matcher = LLMatcher(grammars.tokens, grammars.checked(EngineGrammar(grammar.kind, grammar.text)))
    tokens = tokenizer.encode(text, chat=False)
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


def marks(family: str) -> structured.Marks:
    """Those that llguidance takes for special tokens: all that the tokenizer of the family has."""
    backend = family_tokenizer(family).backend
    return structured.Marks({mark: id for mark in TAGS if (id := backend.token_to_id(mark)) is not None})


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"x":[1]}', "[]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, '{"a":1}', '{"a":"1"}'),
        ({"response_format": {"type": "regex", "pattern": "a+/b"}}, "aa/b", "b"),
        ({"guided_json": SCHEMA}, '{"a":1}', '{"b":1}'),
        ({"guided_json": '{"type": "boolean"}'}, "true", "1"),
        ({"guided_regex": "[0-9]{2}"}, "12", "1"),
        ({"guided_choice": ["a.b", "c"]}, "a.b", "aXb"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy", "x"),
        ({"structured_outputs": {"regex": "a|b"}}, "b", "c"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("opened", [None, False, True])
def test_what_a_request_asks_for(fields: dict[str, Any], good: str, bad: str, opened: bool | None) -> None:
    grammar = structured.wanted_grammar(msgspec.convert(fields, Fields))
    assert grammar is not None
    if opened is not None and grammar.kind == "lark":
        pytest.skip("a Lark grammar describes the whole answer")
    if opened is None:
        assert follows(grammar, good)
        assert not follows(grammar, bad)
        return
    grammar = structured.after_reasoning(grammar, opened, marks("qwen3"))
    thoughts = "I think.\nSo.</think>\n\n" if opened else "<think>I think.</think>\n\n"
    assert follows(grammar, thoughts + good)
    assert not follows(grammar, thoughts + bad)
    assert follows(grammar, good) == (not opened)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "parameters": schema | {"additionalProperties": False}}}


TOOLS = [
    tool("weather", town={"type": "string"}, days={"type": "integer"}),
    tool("time"),
    tool("sum", of={"type": "array"}),
]
CALLS = {
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"town":"Bath"}}\n</tool_call>',
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="town">\nBath\n</parameter>\n'
        '<parameter name="days">\n3\n</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=town>\nBath\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("opened", [None, False, True])
def test_demanded_calls(family: str, opened: bool | None) -> None:
    tokens = "minimax_m2" if family == "minimax_m2" else "qwen3"
    format = FORMATS[family]
    for several in (False, True):
        grammar = structured.calls_grammar(TOOLS, format, several, opened, marks(tokens))
        thoughts = {None: "", False: "", True: "Hm.</think>\n\n"}[opened]
        assert follows(grammar, thoughts + CALLS[family], tokens)
        assert not follows(grammar, thoughts + "Hello", tokens)
        assert not follows(grammar, thoughts + CALLS[family].replace("weather", "storm"), tokens)
        assert not follows(grammar, thoughts + CALLS[family].replace("town", "city"), tokens)
    answer = Parser(format, TOOLS).whole(CALLS[family])
    assert [call.name for call in answer.tool_calls] == ["weather"]


def test_marks_that_are_plain_text() -> None:
    """As in the demo's tokenizer."""
    text = structured.calls_grammar(TOOLS, None, False, True, structured.Marks({})).text
    assert '"<tool_call>"' in text
    assert '[suffix="</think>"]' in text
    assert "<[" not in text

"""Grammars that requests ask for, and those of tool calls, followed token by token by llguidance itself; and those
that no limit of llguidance stops, stopped by the process that tries them."""

import json
import os
import re
import signal
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import pytest

from tests.serving.api.front import family_tokenizer
from tests.text.checkpoints import FORMAT_OF, eos_of
from umbra.executor.engine.schedule.grammar import Grammars
from umbra.executor.engine.schedule.request import Grammar
from umbra.models.registry import conventions
from umbra.serving.api import compiling, schemas, structured
from umbra.serving.api.compiling import Compiler
from umbra.serving.api.errors import ApiError
from umbra.serving.api.fields import Fields
from umbra.text.formats import Mark
from umbra.text.parser import reader


def follows(grammar: Grammar, text: str, family: str = "qwen3") -> bool:
    """Returns whether `text` is a whole answer that `grammar` allows."""
    matcher = grammars_of(family).matcher(grammar).matcher
    tokens = family_tokenizer(family).encode(text, chat=False)
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


@lru_cache
def grammars_of(family: str) -> Grammars:
    tokenizer = family_tokenizer(family)
    return Grammars.read(tokenizer.folder, tokenizer.backend.get_vocab_size(), [eos_of(tokenizer)])


def marks(family: str) -> structured.GrammarMarks:
    """Returns the marks that llguidance takes for special tokens: all that the tokenizer of the family has."""
    backend = family_tokenizer(family).backend
    names = (*conventions().tags, *conventions().formats["harmony"].tokens)
    return structured.GrammarMarks({mark: id for mark in names if (id := backend.token_to_id(mark)) is not None})


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def asked(**fields: Any) -> Grammar | None:
    return structured.wanted_grammar(msgspec.convert(fields, Fields))


HM = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
WAYS: list[tuple[str, Any, str, str]] = [  # fields, their values, and texts that follow them or do not
    ("response_format", {"type": "json_object"}, '{"x":[1]}', "[]"),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, '{"a":1}', '{"a":"1"}'),
    ("response_format", {"type": "grammar", "grammar": 'start: "x"'}, "x", "y"),
    ("guided_json", SCHEMA, '{"a":1}', '{"b":1}'),
    ("guided_regex", "[0-9]{2}\\\\", "12\\", "1"),
    ("guided_choice", ["a.b", "c"], "a.b", "aXb"),
    ("guided_grammar", 'start: "x" "y"', "xy", "x"),
    ("structured_outputs.regex", "a|b", "b", "c"),
    ("structured_outputs.json_object", True, "{}", "[]"),
]


@pytest.mark.parametrize(("field", "value", "good", "bad"), WAYS)
def test_what_a_request_asks_for(field: str, value: Any, good: str, bad: str) -> None:
    """With and without reasoning before it; a Lark grammar describes the whole answer."""
    first, _, second = field.partition(".")
    fields = {first: {second: value} if second else value}
    grammar = asked(**fields)
    assert grammar is not None
    assert structured.grammar_field(msgspec.convert(fields, Fields)) == field
    assert follows(grammar, good)
    assert not follows(grammar, bad)
    for opened in (False, True) if grammar.kind != "lark" else ():
        reasoned = structured.after_reasoning(grammar, opened, marks("qwen3"), None)
        thoughts = "I think.\nSo.</think>\n\n" if opened else "\n<think>I think.</think>\n"
        assert follows(reasoned, thoughts + good)
        assert not follows(reasoned, thoughts + bad)
        assert follows(reasoned, good) == (not opened)
    final = structured.in_final_message(grammar, marks("harmony"))
    assert follows(final, f"{HM}<|channel|>final<|message|>{good}", "harmony")
    assert not follows(final, f"{HM}<|channel|>final<|message|>{bad}", "harmony")
    assert not follows(final, good, "harmony")
    if field != "guided_regex":
        with pytest.raises(ApiError, match="is given as well: give one of them"):
            asked(**fields, guided_regex="x")


NONE: list[dict[str, Any]] = [
    {},
    {"response_format": {}},
    {"response_format": {"type": "text", "pattern": "a"}},
    {"structured_outputs": {}},
    {"structured_outputs": {"json_object": False}},
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": "{"}, "guided_json: is no JSON"),
    ({"guided_regex": "ab\\"}, "guided_regex: ends with a backslash that escapes nothing"),
    ({"guided_regex": "é" * (structured.LARGEST // 2 + 1)}, "guided_regex: must have 1 to 65536 bytes"),
    *(
        ({"response_format": format}, f"response_format.{error}")
        for format, error in [
            ({"pattern": "a"}, "type: None is none of text, json_object, json_schema, regex, grammar"),
            ({"type": "json_schema", "json_schema": {"schema": "{}"}}, "json_schema.schema: must be a JSON schema"),
            ({"type": "regex", "grammar": "a"}, "pattern: must be a string"),
        ]
    ),
]


def test_what_is_no_grammar_is_named() -> None:
    for fields in NONE:
        assert asked(**fields) is None
    for fields, error in WRONG:
        with pytest.raises(ApiError) as refused:
            asked(**fields)
        assert str(refused.value).startswith(error)
        assert (refused.value.status, refused.value.param) == (400, error.partition(": ")[0])
    assert asked(guided_regex="a" * structured.LARGEST) == Grammar("regex", "a" * structured.LARGEST)


def nested(levels: int) -> Any:
    return {"not": nested(levels - 1)} if levels > 1 else True


def test_schemas_up_to_the_limits() -> None:
    many = {f"p{number}": True for number in range(schemas.MOST_PROPERTIES)}
    half = dict([*many.items()][: schemas.MOST_PROPERTIES // 2])
    for schema in (nested(schemas.DEEPEST), {"properties": many}, {"properties": half, "not": {"properties": half}}):
        schemas.check_schema("p", schema)
    for schema, error in (
        (nested(schemas.DEEPEST + 1), f"p: is nested more than {schemas.DEEPEST} levels deep"),
        ({"anyOf": [nested(schemas.DEEPEST - 1)]}, f"p: is nested more than {schemas.DEEPEST} levels deep"),
        ({"properties": {**many, "q": True}}, f"p: has more than {schemas.MOST_PROPERTIES} properties"),
        ({"properties": {**half, "q": True}, "not": {"properties": half}}, "p: has more than"),
    ):
        with pytest.raises(ApiError, match=error):
            schemas.check_schema("p", schema)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "parameters": schema | {"additionalProperties": False}}}


def test_tools_have_no_properties_beyond_those_they_name() -> None:
    inner = {"properties": {"a": {"type": "string"}}}
    outer = {"type": "object", "properties": {"o": inner, "l": {"items": inner}, "free": {"type": "object"}}}
    closed = schemas.closed(outer)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["o"] == closed["properties"]["l"]["items"] == inner | {"additionalProperties": False}
    assert closed["properties"]["free"] == {"type": "object"}
    for said in ({"properties": {}, "additionalProperties": True}, {"properties": {}, "anyOf": [True]}, True):
        assert schemas.closed(said) == said


TOOLS = [tool("weather", town={"type": "string"}, days={"type": "integer"}), tool("time")]
CALLS = {
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"town":"Bath"}}\n</tool_call>',
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="town">\nBath\n</parameter>\n'
        '<parameter name="days">\n3\n</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "glm45": "<tool_call>weather\n<arg_key>town</arg_key>\n<arg_value>Bath</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "glm47": "<tool_call>weather<arg_key>town</arg_key><arg_value>Bath</arg_value></tool_call>",
    "harmony": f'{HM}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{"town":"Bath"}}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:7<|tool_call_argument_begin|>"
    '{"town":"Bath"}<|tool_call_end|><|tool_calls_section_end|>',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"town":"Bath"}',
    "mistral_json": '[TOOL_CALLS] [{"name": "weather", "arguments": {"town":"Bath"}}]',
    "llama3": '{"name": "weather", "parameters": {"town":"Bath"}}',
    "hy3": "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>town</arg_key>\n<arg_value>Bath</arg_value>\n"
    "</tool_call>\n</tool_calls>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"town":"Bath"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"town":"Bath"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gemma4": '<|tool_call>call:weather{town:<|"|>Bath<|"|>}<tool_call|>',
    "qwen35": "<tool_call>\n<function=weather>\n<parameter=town>\nBath\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("opened", [None, False, True])
def test_demanded_calls(family: str, opened: bool | None) -> None:
    format = FORMAT_OF[family]
    for several in (False, True):
        grammar = structured.calls_grammar(TOOLS, format, several, opened, marks(family))
        thoughts = f"Hm.{format.think_end}\n\n" if opened and not format.tokens else ""
        assert follows(grammar, thoughts + CALLS[family], family)
        assert not follows(grammar, thoughts + "Hello", family)
        assert not follows(grammar, thoughts + CALLS[family].replace("weather", "storm"), family)
        assert not follows(grammar, thoughts + CALLS[family].replace("town", "city"), family)
    said = re.split("(<[|].*?[|]>)", CALLS[family])
    answer = reader(format, TOOLS, False, True).whole(*(Mark(part) if part[:2] == "<|" else part for part in said))
    assert [call.name for call in answer.tool_calls] == ["weather"]


# The automaton of all of them together has a state for each set of them.
ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(10, 60)]})


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    tokenizer = family_tokenizer("qwen3")
    compiler = Compiler(tokenizer.folder, tokenizer.backend.get_vocab_size(), [eos_of(tokenizer)])
    yield compiler
    compiler.close()


def test_good_bad_and_endless_grammars(compiler: Compiler) -> None:
    assert compiler.problem("regex", "a+") == ""
    assert "unclosed group" in compiler.problem("regex", "(")
    assert compiler.problem("json", ENDLESS) == compiling.TOO_MUCH
    assert compiler.problem("lark", 'start: "a"') == ""


def test_its_process_is_started_again_and_ends_with_the_front(compiler: Compiler) -> None:
    assert compiler.problem("regex", "a") == ""
    assert compiler.sandbox.process is not None
    os.kill(compiler.sandbox.process.pid, signal.SIGKILL)
    assert compiler.problem("regex", "a") == ""
    process = compiler.sandbox.process
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=300) == 0

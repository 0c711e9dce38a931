"""The limits of grammars that a request may ask for, to the byte, level and property; and the text of grammars."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from serving.api import structured
from serving.api.errors import ApiError
from serving.api.fields import Fields
from serving.api.structured import (
    DEEPEST,
    LARGEST,
    MOST_PROPERTIES,
    Marks,
    _grammar,
    after_reasoning,
    calls_grammar,
    check_schema,
)
from serving.ranks.expert_news import FADE, ExpertNews
from serving.ranks.messages import Grammar, Residency
from text.formats import FORMATS


def nested(levels: int, leaf: Any = True) -> Any:
    found = leaf
    for _ in range(levels - 1):
        found = {"not": found}
    return found


def refused(schema: Any) -> str:
    with pytest.raises(ApiError) as caught:
        check_schema("p", schema)
    return str(caught.value)


def test_schemas_up_to_the_limits() -> None:
    check_schema("p", nested(DEEPEST))
    assert refused(nested(DEEPEST + 1)) == f"p: is nested more than {DEEPEST} levels deep"
    check_schema("p", {"anyOf": [nested(DEEPEST - 2)]})
    assert "levels deep" in refused({"anyOf": [nested(DEEPEST - 1)]})
    many = {f"p{number}": True for number in range(MOST_PROPERTIES)}
    check_schema("p", {"properties": many})
    assert refused({"properties": {**many, "q": True}}) == f"p: has more than {MOST_PROPERTIES} properties"
    half = dict(list(many.items())[: MOST_PROPERTIES // 2])
    check_schema("p", {"properties": half, "not": {"properties": half}})
    assert "properties" in refused({"properties": {**half, "q": True}, "not": {"properties": half}})
    check_schema("p", {"properties": ["no object"]})
    for wrong in ([], "x", 3, None):
        assert refused(wrong) == "p: must be a JSON schema: an object or a boolean"


def test_grammars_up_to_the_largest() -> None:
    assert _grammar("p", "regex", "a" * LARGEST) == Grammar("regex", "a" * LARGEST)
    for value in ("a" * (LARGEST + 1), "é" * (LARGEST // 2 + 1), ""):
        with pytest.raises(ApiError, match=f"p: must have 1 to {LARGEST} bytes"):
            _grammar("p", "lark", value)
    for ends, right in (("a\\", False), ("a\\\\", True), ("a\\\\\\", False), ("a", True)):
        if right:
            assert _grammar("p", "regex", ends).text == ends
        else:
            with pytest.raises(ApiError, match="ends with a backslash"):
                _grammar("p", "regex", ends)
    assert _grammar("p", "lark", "a\\").text == "a\\"
    assert _grammar("p", "choice", ["a.b", "c"]) == Grammar("regex", r"a\.b|c")
    assert _grammar("p", "json", "true") == Grammar("json", "{}")
    assert _grammar("p", "json", False) == Grammar("json", "false")
    assert _grammar("p", "json", '{"a": 1}') == Grammar("json", '{"a": 1}')
    with pytest.raises(ApiError, match="p: is no JSON"):
        _grammar("p", "json", "{")


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"function": {"name": name, "parameters": parameters}}


def test_a_grammar_of_calls_up_to_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    text = calls_grammar([tool("look")], None, False, None, Marks({})).text
    monkeypatch.setattr(structured, "LARGEST", len(text))
    assert calls_grammar([tool("look")], None, False, None, Marks({})).text == text
    monkeypatch.setattr(structured, "LARGEST", len(text) - 1)
    with pytest.raises(ApiError, match="tools: their schemas make a grammar of more than"):
        calls_grammar([tool("look")], None, False, None, Marks({}))


def test_the_text_of_grammars_of_calls() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    compact = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
    one, two = tool("look", schema), tool("go")
    empty = json.dumps({"type": "object", "properties": {}, "x-guidance": {"whitespace_flexible": False}})
    call = '"<tool_call>" "\\n" (call0 | call1) "\\n" <[9]>'
    rules = [
        'call0: "{\\"name\\": \\"look\\", \\"arguments\\": " call0a "}"', f"call0a: %json {compact}",
        'call1: "{\\"name\\": \\"go\\", \\"arguments\\": " call1a "}"', f"call1a: %json {empty}",
    ]  # fmt: skip
    marks = Marks({"</tool_call>": 9})
    for several, calls in ((False, call), (True, f'{call} ("\\n" {call}){{0,7}}')):
        found = calls_grammar([one, two], FORMATS["qwen3"], several, None, marks)
        assert found == Grammar("lark", "\n".join(["start: calls", f"calls: {calls}", *rules]) + "\n")
    reasoned = calls_grammar([one], None, False, True, Marks({})).text
    assert reasoned.startswith('start: thoughts "\\n\\n" calls\nthoughts[suffix="</think>"]: ')
    left_out = calls_grammar([one], None, False, False, Marks({"</think>": 4, "<think>": 3})).text
    first = 'start: (<[3]> thoughts "\\n\\n")? calls\nthoughts: thoughts_text <[4]>\nthoughts_text: /(.|\\n)*/\ncalls: '
    assert left_out.startswith(first)


def test_parameters_of_calls_by_their_types() -> None:
    format = next(format for format in FORMATS.values() if format.call)
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}, "t": {}, "b": True}
    schema = {"properties": properties, "required": ["n", "b"]}
    marks = Marks({})
    lines = calls_grammar([tool("look", schema)], format, True, None, marks).text.splitlines()
    quote = '\\"' if format.call.endswith("name=") else ""

    def opened(name: str) -> str:
        return json.dumps(f"{format.parameter}{quote[1:]}{name}{quote[1:]}>\n")

    end = json.dumps(format.parameter_end)
    parts = [
        f'{opened("n")} call0p0 "\\n" {end} "\\n"',
        *(f'({opened(n)} call0p{i} "\\n")?' for n, i in (("s", 1), ("t", 2))),
    ]
    parts.append(f'{opened("b")} call0p3 "\\n"')
    calling = json.dumps(f"{format.call}{quote[1:]}look{quote[1:]}>\n")
    assert f"call0: {calling} {' '.join(parts)} {json.dumps(format.call_end)}" in lines
    assert 'call0p0: %json {"type": "integer", "x-guidance": {"whitespace_flexible": false}}' in lines
    suffix = json.dumps("\n" + format.parameter_end)
    for number in (1, 2, 3):
        assert f"call0p{number}[suffix={suffix}]: /(.|\\n)*/" in lines
    block = f'{json.dumps(format.block)} "\\n" (call0) ("\\n" (call0)){{0,7}} "\\n" {json.dumps(format.block_end)}'
    assert f"calls: {block}" in lines


def test_grammars_behind_reasoning() -> None:
    lark = Grammar("lark", "start: A")
    assert after_reasoning(lark, True, Marks({})) is lark
    text = after_reasoning(Grammar("regex", "a/b\\/c\n"), True, Marks({})).text
    assert text.splitlines()[-1] == r"answer: /a\/b\/c\n/"
    text = after_reasoning(Grammar("json", "{}"), True, Marks({})).text
    assert text.splitlines()[-1] == 'answer: %json {"x-guidance": {"whitespace_flexible": false}}'
    assert after_reasoning(Grammar("json", "false"), True, Marks({})).text.endswith("answer: %json false\n")


def test_heat_of_experts_fades() -> None:
    published = np.array([[True, False], [False, True]])
    offload = SimpleNamespace(counts=np.array([[5, 5], [5, 5]]), published=published)
    news = ExpertNews(SimpleNamespace(offload=offload))  # type: ignore[arg-type]
    assert news.changed() == Residency(2, 2, b"\x09", bytes(4))
    assert news.changed() is None
    offload.counts = offload.counts + np.array([[3, 0], [1, 0]])
    assert news.changed() == Residency(2, 2, b"\x09", bytes([255, 0, 85, 0]))
    assert news.changed() is None  # nothing new fades nothing
    offload.counts = offload.counts + np.array([[0, 2], [0, 0]])
    heat = np.array([FADE * (1 - FADE) * 0.75, 1 - FADE, FADE * (1 - FADE) * 0.25, 0])
    assert news.changed() == Residency(2, 2, b"\x09", bytes(np.round(255 * heat / heat.max()).astype(np.uint8)))
    offload.published = ~published
    found = news.changed()
    assert found
    assert found.resident == b"\x06"


ANY = Grammar("json", '{"type": "object"}')
WAYS: list[tuple[dict[str, Any], str, Grammar]] = [
    ({"guided_json": {"a": 1}}, "guided_json", Grammar("json", '{"a": 1}')),
    ({"guided_regex": "a"}, "guided_regex", Grammar("regex", "a")),
    ({"guided_choice": ["a", "b"]}, "guided_choice", Grammar("regex", "a|b")),
    ({"guided_grammar": "start: A"}, "guided_grammar", Grammar("lark", "start: A")),
    ({"structured_outputs": {"json": "true"}}, "structured_outputs.json", Grammar("json", "{}")),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex", Grammar("regex", "a")),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", Grammar("regex", "a")),
    ({"structured_outputs": {"grammar": "start: A"}}, "structured_outputs.grammar", Grammar("lark", "start: A")),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", ANY),
    ({"response_format": {"type": "json_object"}}, "response_format", ANY),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}}, "response_format",
        Grammar("json", '{"a": 1}'),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "response_format",
        Grammar("json", "false"),
    ),
    ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format", Grammar("regex", "a")),
    ({"response_format": {"type": "grammar", "grammar": "start: A"}}, "response_format", Grammar("lark", "start: A")),
]  # fmt: skip


@pytest.mark.parametrize(("given", "field", "grammar"), WAYS)
def test_every_way_to_ask_for_a_grammar(given: dict[str, Any], field: str, grammar: Grammar) -> None:
    fields = msgspec.convert(given, Fields)
    assert structured.wanted_grammar(fields) == grammar
    assert structured.grammar_field(fields) == field
    both = msgspec.convert(given | {"guided_regex": "x"} if "guided_regex" not in given else given, Fields)
    if both.guided_regex == "x":
        with pytest.raises(ApiError) as caught:
            structured.wanted_grammar(both)
        first, second = ("guided_regex", field) if field not in ("guided_json",) else (field, "guided_regex")
        assert (caught.value.param, str(caught.value)) == (
            second, f"{second}: {first} is given as well: give one of them"
        )  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        {}, {"response_format": None}, {"response_format": {}}, {"response_format": {"type": "text"}},
        {"structured_outputs": None}, {"structured_outputs": {}}, {"structured_outputs": {"json_object": False}},
        {"response_format": {"type": "text", "pattern": "a"}, "guided_regex": None},
    ],
)  # fmt: skip
def test_requests_without_a_grammar(given: dict[str, Any]) -> None:
    assert structured.wanted_grammar(msgspec.convert(given, Fields)) is None


@pytest.mark.parametrize(
    ("format", "param", "text"),
    [
        ({"pattern": "a"}, "type", "None is none of text, json_object, json_schema, regex, grammar"),
        ({"type": 5}, "type", "5 is none of"),
        ({"type": ["regex"]}, "type", "['regex'] is none of"),
        ({"type": "yaml"}, "type", "'yaml' is none of"),
        ({"type": "json_schema"}, "json_schema.schema", "must be a JSON schema"),
        ({"type": "json_schema", "json_schema": "x"}, "json_schema.schema", "must be a JSON schema"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, "json_schema.schema", "must be a JSON schema"),
        ({"type": "regex"}, "pattern", "must be a string"),
        ({"type": "regex", "grammar": "a"}, "pattern", "must be a string"),
        ({"type": "grammar", "grammar": 5}, "grammar", "must be a string"),
    ],
)
def test_wrong_formats_are_named(format: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(ApiError) as caught:
        structured.wanted_grammar(Fields(response_format=format))
    assert (caught.value.status, caught.value.param) == (400, f"response_format.{param}")
    assert str(caught.value).startswith(f"response_format.{param}: {text}")


def test_schemas_of_requests_and_tools_are_checked() -> None:
    with pytest.raises(ApiError) as caught:
        structured.wanted_grammar(Fields(guided_json="[]"))
    assert str(caught.value) == "guided_json: must be a JSON schema: an object or a boolean"
    with pytest.raises(ApiError) as caught:
        calls_grammar([tool("a"), tool("b", nested(DEEPEST + 1))], None, False, None, Marks({}))
    assert caught.value.param == "tools[1].function.parameters"
    with pytest.raises(ApiError) as caught:
        structured.wanted_grammar(Fields(guided_regex="ab\\"))
    assert caught.value.param == "guided_regex"
    with pytest.raises(ApiError) as caught:
        _grammar("p", "regex", "")
    assert str(caught.value) == f"p: must have 1 to {LARGEST} bytes"


def test_experts_and_memory_of_a_snapshot() -> None:
    arena = SimpleNamespace(frames=100, slot_frames=48, free_frames=4)
    published = np.array([[True, False, True], [False, True, True]])
    offload = SimpleNamespace(counts=np.zeros((2, 3), np.int64), published=published, arena=arena)
    news = ExpertNews(SimpleNamespace(offload=offload, hits=90, misses=10, exposed_s=0.5))  # type: ignore[arg-type]
    assert news.fields() == {
        "experts_resident": 4, "experts": 6, "expert_hits": 90, "expert_misses": 10, "shadow_exposed_s": 0.5,
        "arena_frames": 100, "expert_frames": 48, "free_frames": 4,
    }  # fmt: skip
    found = news.changed()
    assert found
    assert (found.layers, found.experts, found.resident, found.heat) == (2, 3, bytes([0b110101]), bytes(6))

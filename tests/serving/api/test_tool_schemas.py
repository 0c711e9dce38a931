"""Arguments of demanded and of strict calls follow their schemas, whatever the model would rather write: random walks
through the grammars of random schemas, in every family's format."""

import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.serving.api.front import family_tokenizer
from tests.serving.api.test_structured import CALLS, follows, grammars_of, marks, tool
from tests.text.checkpoints import FORMAT_OF, eos_of
from umbra.executor.engine.schedule.request import Grammar
from umbra.serving.api import structured
from umbra.serving.api.errors import ApiError
from umbra.serving.api.raw_values import searched
from umbra.serving.api.schemas import closed, held
from umbra.text.formats import Mark
from umbra.text.parser import reader
from umbra.text.tool_arguments import bounded

LONGEST = 150  # tokens of a walk, after which it closes whatever it can
CLOSINGS = ("\n</parameter>\n", "</arg_value>", '"', "]", "}", ",", "\n", '<|"|>', "0", "x", "/", "b")
CALLED = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"  # without messages before it
WORDS = ["", "a", "null", "5", "true", "1", "two words", "a\nb", '"quoted"', "<b>", "{x", " led", "Österreich"]
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
PATTERNS = [r"(^a|b)c?$", r"^\d{3}$", r"^[a-c]+$", r"x", r"^a|b$", r"^(red|blue)$", r"^\w+/\d*$", r"^[^<]{2,}$"]
NUMBERS = {"integer": st.integers(-20, 20), "number": st.integers(-40, 40).map(lambda n: n / 2)}


@st.composite
def strings(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["plain", "enum", "const", "pattern", "length"]))
    more: dict[str, Any] = {"type": "string"} if kind in ("plain", "pattern", "length") or draw(st.booleans()) else {}
    if kind == "enum":
        more["enum"] = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3, unique=True))
    elif kind == "const":
        more["const"] = draw(st.sampled_from(WORDS))
    elif kind == "pattern":
        more["pattern"] = draw(st.sampled_from(PATTERNS))
    elif kind == "length":
        more["minLength"] = draw(st.integers(0, 4))
        more |= {"maxLength": more["minLength"] + draw(st.integers(0, 5))} if draw(st.booleans()) else {}
    return more


@st.composite
def numbers(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(NUMBERS)))
    limits = sorted(draw(st.lists(NUMBERS[kind], max_size=2)))
    return {"type": kind, **dict(zip(("minimum", "maximum"), limits, strict=False))}


MIXED = st.lists(st.sampled_from(["a", "5", 5, None, True, "true", 1.5]), min_size=1, max_size=4, unique_by=repr)
SIMPLE = st.one_of(
    strings(),
    numbers(),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {}, {"$ref": "#/$defs/colour"}]),
    st.sampled_from([["string", "null"], ["integer", "string"], ["boolean", "string"]]).map(lambda t: {"type": t}),
    MIXED.map(lambda values: {"enum": values}),
)


def objects(inner: st.SearchStrategy[dict[str, Any]], least: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.sampled_from(["town", "b", "c_d"]), inner, min_size=least, max_size=3)
    return properties.flatmap(
        lambda known: (
            st.sets(st.sampled_from(sorted(known))).map(
                lambda required: {"type": "object", "properties": known, "required": sorted(required)}
            )
            if known
            else st.just({"type": "object", "properties": {}})
        )
    )


def arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(inner, st.integers(0, 2)).map(
        lambda drawn: {"type": "array", "items": drawn[0], "minItems": drawn[1], "maxItems": drawn[1] + 1}
    )


def any_of(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"anyOf": parts}


VALUES = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(objects(inner), arrays(inner), st.lists(inner, min_size=2, max_size=2).map(any_of)),
    max_leaves=4,
)
DEFINITIONS = {"$defs": {"colour": {"enum": ["red", "blue"]}}}
PARAMETERS = objects(VALUES, 1).map(lambda schema: schema | DEFINITIONS)


def walk(grammar: Grammar, family: str, seed: int) -> list[int]:
    """The tokens of an answer that takes any token which the grammar allows, up to its end."""
    tokenizer, draw = family_tokenizer(family), random.Random(seed)
    matcher, end = grammars_of(family).matcher(grammar).matcher, eos_of(tokenizer)
    closings = [tokenizer.encode(text, chat=False) for text in CLOSINGS]
    ids = tokenizer.encode(CALLED if FORMAT_OF[family].tokens else "", chat=False)
    assert matcher.consume_tokens(ids)
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [id for id in range(8 * len(mask)) if mask[id // 8] >> id % 8 & 1]
        assert allowed, tokenizer.whole_text(ids)
        tokens = [draw.choice(allowed)]
        if len(ids) > LONGEST or draw.random() < 0.4:
            whole = [closing for closing in closings if matcher.validate_tokens(closing) == len(closing)]
            tokens = [end] if end in allowed else draw.choice(whole) if whole else tokens
        assert matcher.consume_tokens(tokens)
        ids += tokens
        assert len(ids) < 20 * LONGEST, tokenizer.whole_text(ids)
    return ids


def arguments(ids: list[int], family: str, tools: list[dict[str, Any]]) -> list[str]:
    """The arguments of all calls in an answer."""
    tokenizer = family_tokenizer(family)
    texts = re.split(r"(<[|].*?[|]>)", tokenizer.whole_text([id for id in ids if id != eos_of(tokenizer)]))
    pieces = [Mark(text) if text[:2] == "<|" and FORMAT_OF[family].tokens else text for text in texts]
    return [call.arguments for call in reader(FORMAT_OF[family], tools, False, True).whole(*pieces).tool_calls]


@pytest.mark.parametrize("family", CALLS)
@settings(max_examples=8, phases=[Phase.generate])
@given(parameters=PARAMETERS, seed=st.integers(0, 1 << 30))
def test_every_call_follows_its_schema(family: str, parameters: dict[str, Any], seed: int) -> None:
    check(family, parameters, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("family", CALLS)
@settings(max_examples=300, phases=[Phase.generate])
@given(parameters=PARAMETERS, seed=st.integers(0, 1 << 30))
def test_every_call_follows_its_schema_at_length(family: str, parameters: dict[str, Any], seed: int) -> None:
    check(family, parameters, seed)


def check(family: str, parameters: dict[str, Any], seed: int) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    grammar = structured.calls_grammar(tools, FORMAT_OF[family], False, None, marks(family))
    ids = walk(grammar, family, seed)
    (call,) = arguments(ids, family, tools)
    jsonschema_rs.validate(parameters, json.loads(call, parse_float=bounded))  # a walk may write 1E999


@pytest.mark.parametrize("format", FORMATS)
def test_a_string_without_quotes_has_the_format_of_its_schema(format: str) -> None:
    parameters = {"properties": {"town": {"type": "string", "format": format}}, "required": ["town"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    grammar = structured.calls_grammar(tools, FORMAT_OF["qwen35"], False, None, marks("qwen35"))
    for seed in range(4):
        (call,) = arguments(walk(grammar, "qwen35", seed), "qwen35", tools)
        jsonschema_rs.validate(parameters, json.loads(call), validate_formats=True)


def strict_tool(**properties: Any) -> dict[str, Any]:
    loose = tool("weather", **properties)
    return {**loose, "function": {**loose["function"], "strict": True}}


@pytest.mark.parametrize("family", CALLS)
def test_strict_tools_are_held_to_their_schemas_where_calls_are_free(family: str) -> None:
    format = FORMAT_OF[family]
    tools = [strict_tool(town={"enum": ["Bath", "York"]}), tool("time")]
    grammar = structured.calls_grammar(tools, format, True, None, marks(family), demanded=False)
    call = re.sub(r',?"days":3|<parameter name="days">\n3\n</parameter>\n', "", CALLS[family])
    call = re.sub(r"<arg_key>days.*</arg_value>\n", "", call, flags=re.DOTALL)
    said = "<|channel|>final<|message|>It rains." if format.tokens else "It rains.\n"
    assert follows(grammar, said, family)
    before = "" if format.tokens or format.bare else "So:\n"
    assert follows(grammar, before + call, family)
    assert not follows(grammar, before + call.replace("Bath", "Rome"), family)


def test_what_a_grammar_cannot_hold_is_named() -> None:
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string", "pattern": "(?=a)b"}, "uniqueItems": True},
            "size": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "kind": {"oneOf": [{"const": "a"}, {"type": "integer"}], "format": "unheard-of"},
        },
        "dependentRequired": {"tags": ["size"]},
        "if": {},
        "then": {},
        "minProperties": 1,
    }
    kept, notes = held(schema)
    assert notes == [
        "pattern of tags[]",
        "uniqueItems of tags",
        "oneOf of size",
        "dependentRequired",
        "if",
        "minProperties",
    ]
    assert kept["properties"]["kind"] == {"anyOf": [{"const": "a"}, {"type": "integer"}]}
    assert held({"uniqueItems": False, "required": ["a"], "minProperties": 1}) == ({"required": ["a"]}, [])
    logged: list[str] = []
    wanted = [{"type": "function", "function": {"name": "tag", "parameters": schema}}]
    structured.calls_grammar(wanted, None, False, None, marks("qwen3"), note=logged.append)
    assert logged[1] == "tool tag: uniqueItems of tags is not enforced: a grammar cannot hold it"
    wanted[0]["function"]["strict"] = True  # type: ignore[index]
    with pytest.raises(ApiError, match=r"tools\[0\].function.strict: tag: pattern of tags\[\] cannot be enforced"):
        structured.calls_grammar(wanted, None, False, None, marks("qwen3"))


def test_classes_are_ascii_and_patterns_are_searched_for() -> None:
    grammar = Grammar("regex", structured.ascii_classes(r"[\d.]+\w"))
    assert follows(grammar, "1.2a")
    assert not follows(grammar, "\u0661.2a")
    assert not follows(grammar, "1.2é")
    for pattern, good, bad in (
        (r"b/", "ab/c", "abc"),
        (r"^a|b$", "axx", "xxa"),
        (r"[|]\$", "a|$b", "a$"),
        (r"(^a|b)c", "xbc", "xac"),
        (r"(?:^|/)x$", "a/x", "ax"),
        (r"^(a$|b)c?$", "b", "ac"),
        (r"(^a$|^b$)", "b", "ab"),
    ):
        grammar = Grammar("lark", f"start: {searched(pattern)}")
        assert follows(grammar, good)
        assert not follows(grammar, bad)


def test_a_required_property_that_is_not_described_may_be_anything() -> None:
    assert closed({"properties": {"a": {}}, "required": ["a", "b"]})["properties"] == {"a": {}, "b": {}}

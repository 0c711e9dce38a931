"""Outputs of models, split into reasoning, content and tool calls: the rules of docs/text.md, however text is cut."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from umbra.models.registry import conventions
from umbra.text.answer import Answer, Part, Reader, ToolCall
from umbra.text.parser import Parser

TYPES: dict[str, Any] = {"s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}}
TYPES |= {"b": {"type": "boolean"}, "o": {"type": "object"}, "a": {"type": "array"}}
TYPES |= {"maybe": {"type": ["integer", "null"]}, "choice": {"enum": [1, "one", None]}}
TYPES |= {"any": {"anyOf": [{"oneOf": [{"type": "boolean"}]}, {"allOf": [{"type": "number"}]}]}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": TYPES}}},
    {"type": "function", "function": {"name": "g"}},
]
M2, QWEN3, CODER, GLM = "minimax_m2", "qwen3", "qwen3_coder", "glm45"
KIMI, V3, V31, GEMMA = "kimi_k2", "deepseek_v3", "deepseek_v31", "gemma4"
MISTRAL, LISTED, LLAMA, HY3 = "mistral", "mistral_json", "llama3", "hy3"
TEXTS = [name for name, format in conventions().formats.items() if not format.tokens]


def answer(reasoning: str = "", content: str = "", *calls: tuple[str, dict[str, Any]]) -> Answer:
    return Answer(reasoning, content, tuple(ToolCall(n, json.dumps(a, ensure_ascii=False)) for n, a in calls))


def new(format: str, reasoning: bool = False, split: bool = True, tools: Sequence[Any] = TOOLS) -> Parser:
    return Parser(conventions().formats.get(format), tools, reasoning, split)


def m2(*invokes: str) -> str:
    return "\n<minimax:tool_call>\n" + "".join(f"{invoke}\n" for invoke in invokes) + "</minimax:tool_call>"


def invoke(name: str, **parameters: str) -> str:
    inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in parameters.items())
    return f'<invoke name="{name}">\n{inner}</invoke>'


def glm(name: str, **parameters: str) -> str:
    inner = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in parameters.items())
    return f"\n<tool_call>{name}\n{inner}</tool_call>"


def qwen(text: str) -> str:
    return f"\n<tool_call>\n{text}\n</tool_call>"


def function(**parameters: str) -> str:
    inner = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in parameters.items())
    return f"<function=f>\n{inner}</function>"


SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BLOCK, BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL = '<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"a":1}<|tool_call_end|>'


def kimi(id: str, arguments: str) -> str:
    return SECTION + CALL.replace("functions.g:1", id).replace('{"a":1}', arguments) + SECTION_END


def deepseek(*calls: str) -> str:
    """Calls with `|` for the sign between their parts."""
    marked = (f"<｜tool▁call▁begin｜>{call.replace('|', '<｜tool▁sep｜>')}<｜tool▁call▁end｜>" for call in calls)
    return f"{BLOCK}{''.join(marked)}{BLOCK_END}"


def gemma(call: str) -> str:
    """A call with `'` for the mark around a string."""
    return f"<|tool_call>call:{call}<tool_call|>".replace("'", '<|"|>')


def said(reasoning: str = "", content: str = "", *calls: tuple[str, ...]) -> Answer:
    """An answer whose arguments are as they were written."""
    return Answer(reasoning, content, tuple(ToolCall(*call) for call in calls))


MARKS = "a </parameter> b\n</function>c\n</tool_call>\nd <parameter=i> <tool_call>\n<function=f> e"
EXAMPLE = qwen(function(y="\nz\n"))
A = '<invoke name="f">\n<parameter name="i">1</parameter>\n'
CASES: dict[str, tuple[str, dict[str, Any], str, Answer]] = {
    # Gemma 4, whose arguments are no JSON
    "a thought and two calls": (
        GEMMA,
        {},
        "<|channel>thought\na\n<channel|>b" + gemma("f{i:1,s:'x \"y\", {z:1}\n<tool_call|>'}") + gemma("g{}"),
        said("a", "b", ("f", '{"i":1,"s":"x \\"y\\", {z:1}\\n<tool_call|>"}'), ("g", "{}")),
    ),
    "a call within a thought": (
        GEMMA,
        {},
        "<|channel>thought\na" + gemma("f{a:[1,'b',null],o:{k:true,l:{}}}"),
        said("a", "", ("f", '{"a":[1,"b",null],"o":{"k":true,"l":{}}}')),
    ),
    "a broken call without JSON": (GEMMA, {}, gemma("f{a:") + "x", said("", gemma("f{a:") + "x")),
    "an empty thought": (GEMMA, {}, "<|channel>thought\n<channel|>a", said("", "a")),
    # Reasoning
    "m2 reasoning": (M2, {"reasoning": True}, "a\nb\n</think>\n\nc\n", answer("a\nb", "c\n")),
    "stray opener": (M2, {"reasoning": True}, "<think>\na <think>b\n</think>\n\nc", answer("a b", "c")),
    "call ends reasoning": (M2, {"reasoning": True}, "a" + m2(invoke("g")) + "\nb", answer("a", "b", ("g", {}))),
    "optional, there": (QWEN3, {}, "\n<think>\n\na\n\n</think>\n\nb", answer("a", "b")),
    "block mark in content": (
        M2,
        {},
        "the `<minimax:tool_call>` of\n<minimax:tool_call> </mini" + m2(invoke("g")),
        answer("", "the `<minimax:tool_call>` of\n<minimax:tool_call> </mini", ("g", {})),
    ),
    "inline": (
        M2,
        {"reasoning": True, "split": False},
        "a\n</think>\n\nb" + m2(invoke("g")),
        answer("", "<think>a\n</think>\n\nb", ("g", {})),
    ),
    # Calls of MiniMax-M2
    "two blocks, three calls": (
        M2,
        {},
        "x" + m2(invoke("f", i="1", s="é<b>"), invoke("g")) + m2(invoke("f", s="")) + "\n\ny",
        answer("", "xy", ("f", {"i": 1, "s": "é<b>"}), ("g", {}), ("f", {"s": ""})),
    ),
    "newlines": (
        M2,
        {},
        m2(invoke("f", s="\n\na\n\n"), invoke("f", s="\na"), invoke("f", s="a\n"), invoke("f", s="\n")),
        answer("", "", ("f", {"s": "\na\n"}), ("f", {"s": "\na"}), ("f", {"s": "a\n"}), ("f", {"s": "\n"})),
    ),
    "missing parameter end": (
        M2,
        {},
        m2('<invoke name="f"><parameter name="i">1<parameter name="s">a</parameter></invoke>'),
        answer("", "", ("f", {"i": 1, "s": "a"})),
    ),
    "never closed block": (
        M2,
        {},
        "<minimax:tool_call>" + A + '<parameter name="s">a</param',
        answer("", "", ("f", {"i": 1})),
    ),
    "unknown name": (M2, {}, "x" + m2(invoke("h", i="1"), invoke("g")), answer("", "x", ("g", {}))),
    "bare": (M2, {}, "x\n" + invoke("f", i="1") + "\n</minimax:tool_call>\ny", answer("", "xy", ("f", {"i": 1}))),
    "types": (
        M2,
        {},
        m2(invoke("f", s="1", i=" 1 ", n="1.5e1", b="True", o='{"a": [1]}', a="[null]", maybe="NULL")),
        answer("", "", ("f", {"s": "1", "i": 1, "n": 15.0, "b": True, "o": {"a": [1]}, "a": [None], "maybe": None})),
    ),
    "types that do not fit": (
        M2,
        {},
        m2(invoke("f", s="null", i="1.0", n="nan", b="yes", o="[1]", a='{"a": 1}', other="1")),
        answer(
            "", "", ("f", {"s": "null", "i": "1.0", "n": "nan", "b": "yes", "o": "[1]", "a": '{"a": 1}', "other": "1"})
        ),
    ),
    "types, alternatives": (
        M2,
        {},
        m2(invoke("f", choice="1", any="1"), invoke("f", choice="null", any="false"), invoke("f", choice="1e9")),
        answer("", "", ("f", {"choice": 1, "any": 1}), ("f", {"choice": None, "any": False}), ("f", {"choice": "1e9"})),
    ),
    "hostile values": (
        M2,
        {},
        m2(invoke("f", i="9" * 5000, n="1e999", o='{"a":' * 9999, a="[" * 65 + "]" * 65)),
        answer(
            "", "", ("f", {"i": "9" * 5000, "n": sys.float_info.max, "o": '{"a":' * 9999, "a": "[" * 65 + "]" * 65})
        ),
    ),
    # Calls of Qwen3-Coder
    "coder": (
        CODER,
        {},
        "x" + qwen("<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\na\nb\n</parameter>\n</function>"),
        answer("", "x", ("f", {"i": 1, "s": "a\nb"})),
    ),
    "coder, types and newlines": (
        CODER,
        {"reasoning": True},
        "a" + qwen(function(i="\n1\n", s="\n\n1\n\n", b="\nTrue\n", a="[1]", maybe="\nnull", any="\n")) + "\n</think>b",
        answer("a", "b", ("f", {"i": 1, "s": "\n1\n", "b": True, "a": [1], "maybe": None, "any": ""})),
    ),
    "coder, marks in values": (
        CODER,
        {},
        "x" + qwen(function(s=f"\n{MARKS}{EXAMPLE}\n", i="\n1\n")) + qwen(function(s="a </parameter> b")),
        answer("", "x", ("f", {"s": MARKS + EXAMPLE, "i": 1}), ("f", {"s": "a </parameter> b"})),
    ),
    "coder, lost openers": (
        CODER,
        {},
        f"x {function(i='1')}\n</parameter>\n</function>\n</tool_call>y </function>",
        answer("", "x y </function>", ("f", {"i": 1})),
    ),
    "coder, lost closers": (
        CODER,
        {},
        "<tool_call><function=f>\n<parameter=i>\n1\n<parameter=s>\na\n</function></tool_call>"
        "<tool_call><function=f>\n<parameter=s>\nb\n</tool_call><tool_call><function=f><parameter=s>\nc\n</parameter>"
        "<function=f><parameter=s>\nd\n</function>\n</fun",
        answer("", "", ("f", {"i": 1, "s": "a"}), *(("f", {"s": s}) for s in "bcd")),
    ),
    "coder, closers twice": (
        CODER,
        {},
        "</think>x</tool_call>" + qwen(function(s="\na\n</parameter>\n") + "\n</function>"),
        answer("", "x", ("f", {"s": "a"})),
    ),
    # Calls of GLM-4.5 to 4.7
    "glm": (
        GLM,
        {},
        "\n<think>a</think>\nb" + glm("f", i="1", s="\n1\n", o='{"a": [1]}', other="[1]") + glm("g") + "\n",
        answer("a", "b", ("f", {"i": 1, "s": "\n1\n", "o": {"a": [1]}, "other": "[1]"}), ("g", {})),
    ),
    "glm, without line breaks": (
        GLM,
        {"reasoning": True},
        "a</think>b<tool_call>f<arg_key>s</arg_key><arg_value>x<arg_value>y</arg_value><arg_key>i</arg_key><arg_value>2"
        "</arg_value></tool_call><tool_call>g</tool_call>c",
        answer("a", "bc", ("f", {"s": "x<arg_value>y", "i": 2}), ("g", {})),
    ),
    "glm, lost marks": (
        GLM,
        {},
        "<tool_call>f<arg_key>s</arg_key>x y</arg_value><arg_key>i</arg_key>\n3</arg_value></tool_call>"
        "<tool_call>f<arg_key>s<arg_value>x<arg_key>i</arg_key><arg_value>1</arg_value><tool_call>g",
        answer("", "", ("f", {"s": "x y", "i": 3}), ("f", {"s": "x", "i": 1}), ("g", {})),
    ),
    "glm, marks in text": (
        GLM,
        {"reasoning": True},
        "a <tool_call> and <tool_call>b</think>the `<tool_call>` <tool_call>g <tool_call>",
        answer("a <tool_call> and <tool_call>b", "the `<tool_call>` <tool_call>g <tool_call>"),
    ),
    "glm, without reasoning": (GLM, {}, "\na\n", answer("", "a\n")),
    "glm, unknown": (GLM, {}, "a" + glm("h", i="1") + "b", answer("", "ab")),
    # Calls of Qwen3
    "json": (
        QWEN3,
        {},
        "x" + qwen('{"name": "f", "arguments": {"a": 1.0, "s": "é\\n</tool_call>\\\\\\""}}') + qwen('{"name": "g"}'),
        answer("", "x", ("f", {"a": 1.0, "s": 'é\n</tool_call>\\"'}), ("g", {})),
    ),
    "json, broken": (QWEN3, {}, "x" + qwen('{"name": "f"') + "y", answer("", "x" + qwen('{"name": "f"') + "y")),
    # Calls of Kimi-K2
    "kimi": (
        KIMI,
        {},
        "<think>a</think>b" + kimi("functions.f:2", '{"s": "<|tool_call_end|>"}') + "\n" + kimi(" g:3 ", "\n") + "c",
        said("a", "bc", ("f", '{"s": "<|tool_call_end|>"}', "functions.f:2"), ("g", "{}", "g:3")),
    ),
    "kimi, a section in the singular, calls without it": (
        KIMI,
        {"reasoning": True},
        f"a<|tool_call_section_begin|>{CALL}{CALL.replace('.g:', '.h:')}\n{CALL.replace('functions.g:1', 'g')}"
        "<|tool_call_section_end|>b",
        said("a", "b", ("g", '{"a":1}', "functions.g:1"), ("g", '{"a":1}')),
    ),
    "kimi, no calls": (
        KIMI,
        {"reasoning": True},
        f"a{kimi('functions.g:0', '[]')}</think>b{kimi('functions.g:0', '{')}{CALL.replace(':1', ':x')} {SECTION} c",
        said(
            f"a{kimi('functions.g:0', '[]')}",
            f"b{kimi('functions.g:0', '{').removesuffix(SECTION_END)}{CALL.replace(':1', ':x')} {SECTION} c",
        ),
    ),
    # Calls of DeepSeek
    "deepseek-v3": (
        V3,
        {"reasoning": True},
        "a\n</think>\n\nb\n" + deepseek('function|f\n```json\n{"s": "```"}\n```\n\n', "function|g```{}"),
        said("a", "b" + deepseek("function|g```{}")[len(BLOCK) : -len(BLOCK_END)], ("f", '{"s": "```"}')),
    ),
    "deepseek-v3.1": (
        V31,
        {},
        "x" + deepseek('f|{"a": 1}', "h|{}", "g|", "g {}"),
        said("", "x" + deepseek("g {}")[len(BLOCK) : -len(BLOCK_END)], ("f", '{"a": 1}'), ("g", "{}")),
    ),
    # Calls of Mistral
    "mistral": (
        MISTRAL,
        {},
        '[THINK]a\n[/THINK]b[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"s": "[ARGS]"}[TOOL_CALLS]g[ARGS]{}',
        said("a", "b", ("f", '{"s": "[ARGS]"}'), ("g", "{}")),
    ),
    "older mistral, a list": (
        LISTED,
        {},
        'a[TOOL_CALLS] [{"name": "f", "arguments": {"s": "]"}}, {"name": "h"}, {"name": "g"}]\nb',
        said("", "ab", ("f", '{"s": "]"}'), ("g", "{}")),
    ),
    "older mistral, no list": (LISTED, {}, "a[TOOL_CALLS] [1]", said("", "a[TOOL_CALLS] [1]")),
    # Calls of Llama 3
    "llama": (
        LLAMA,
        {},
        ' {"type": "function", "name": "f", "parameters": {"s": "}"}}; {"name": "g", "parameters": {}}',
        said("", " ", ("f", '{"s": "}"}'), ("g", "{}")),
    ),
    "llama, marked": (LLAMA, {}, 'a\n<|python_tag|>{"name": "g", "parameters": {}}', said("", "a", ("g", "{}"))),
    "llama, behind text": (LLAMA, {}, 'a {"name": "g"}', said("", 'a {"name": "g"}')),
    "llama, no tool": (LLAMA, {}, '{"name": "h", "parameters": {}}', said("", '{"name": "h", "parameters": {}}')),
    "llama, other JSON": (LLAMA, {}, '{"a": "<|python_tag|>{"name": "g"}', said("", '{"a": "', ("g", "{}"))),
    "llama, code": (LLAMA, {}, "<|python_tag|>print(1)", said("", "<|python_tag|>print(1)")),
    # Calls of Hy3
    "hy3": (
        HY3,
        {"reasoning": True},
        "a</think>b\n<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>i</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
        "<tool_call>g<tool_sep></tool_call>\n</tool_calls>",
        answer("a", "b", ("f", {"i": 1}), ("g", {})),
    ),
    "hy3 with a suffix": (
        "hy3_opensource",
        {},
        "<think:opensource>a</think:opensource><tool_calls:opensource><tool_call:opensource>f<tool_sep:opensource>"
        "<arg_key:opensource>s</arg_key:opensource><arg_value:opensource>1</arg_value:opensource>"
        "</tool_call:opensource></tool_calls:opensource>",
        answer("a", "", ("f", {"s": "1"})),
    ),
}


def merged(parts: Iterable[Part]) -> list[Part]:
    """Parts without the cuts within reasoning, content and arguments."""
    joined: list[Part] = []
    for part in parts:
        if joined and part.kind == joined[-1].kind != "end":
            joined[-1] = Part(part.kind, joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


def streamed(parser: Reader, pieces: Iterable[str]) -> list[Part]:
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert all(part.text or part.kind == "end" for part in parts)
    return merged(parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f", "arguments": {"s": "a', Answer("", "", (ToolCall("f", '{"s": "a'),))),
        ('{"name": "f", "argu', Answer("", "", (ToolCall("f", ""),))),
        ('{"na', answer()),
        ('{"name": "unk', answer()),
        ('{"name": "unknown", "arguments": {', answer("", '<tool_call>\n{"name": "unknown", "arguments": {')),
        ('{"other": 1', answer("", '<tool_call>\n{"other": 1')),
    ],
)
def test_a_call_that_the_limit_cuts_off(text: str, expected: Answer) -> None:
    assert new(QWEN3).whole(f"<tool_call>\n{text}", cut=True) == expected
    begun = deepseek("f|")[: -len("<｜tool▁call▁end｜>" + BLOCK_END)]
    assert new(V31).whole(begun + '{"a": ', cut=True) == said("", "", ("f", '{"a":'))
    assert new(V31).whole(begun[:-3], cut=True) == answer()
    begun = gemma("f{i:1,s:'ab")[: -len("<tool_call|>")]
    assert new(GEMMA).whole(begun, cut=True) == said("", "", ("f", '{"i":1,"s":"ab'))


@pytest.mark.parametrize(
    ("format", "text"),
    [(CODER, qwen(function(i="1", s="two"))), (GLM, glm("f", i="1", s="two")), (M2, m2(invoke("f", i="1", s="two")))],
)
def test_a_call_of_parameters_that_the_limit_cuts_off(format: str, text: str) -> None:
    """It has the parameters that are whole, and its object is not ended."""
    cuts = [new(format).whole(text[:end], cut=True).tool_calls for end in range(len(text) + 1)]
    arguments = [calls[0].arguments for calls in cuts if calls]
    assert [*dict.fromkeys(arguments)] == ["", '{"i": 1', '{"i": 1, "s": "two"', '{"i": 1, "s": "two"}']


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        (LISTED, '[TOOL_CALLS] [{"name": "g"}, {"name": "f", "arguments": {"s": "a', ("g", "{}", "f", '{"s": "a')),
        (LISTED, '[TOOL_CALLS] [{"name": "f", "argu', ("f", "")),
        (LLAMA, '{"name": "f", "parameters": {"s": "a', ("f", '{"s": "a')),
        (LLAMA, '{"name": "g"}; {"na', ("g", "{}")),
        (LLAMA, '{"name": "x', ()),
    ],
)
def test_calls_to_the_end_that_the_limit_cuts_off(format: str, text: str, expected: tuple[str, ...]) -> None:
    """An answer in JSON that is none of these calls stays a text."""
    read = new(format).whole(text, cut=True)
    assert tuple(part for call in read.tool_calls for part in (call.name, call.arguments)) == expected
    assert read.content == ("" if expected else text)


@pytest.mark.parametrize("end", ["}}", "}}\n", "}}\n</tool_", "}"])
def test_a_call_whose_arguments_are_whole_before_the_limit(end: str) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1' + end
    for written in (text, text.replace("arguments", "parameters")):
        assert new(QWEN3).whole(written, cut=True) == Answer("", "", (ToolCall("f", '{"a": 1}'),))


@pytest.mark.parametrize("name", CASES)
def test_rules(name: str) -> None:
    format, options, text, expected = CASES[name]
    assert new(format, **options).whole(text) == expected


BITS = [
    *sorted(conventions().tags),
    '<invoke name="f">',
    '<parameter name="i">',
    "<function=f>",
    "<parameter=i>",
    "f",
    "g",
    "i",
    ">",
    "<",
    "</",
    "<th",
    "<tool_call>\n<function=f>\n<parameter=s>\n",
    '{"name": "g", "arguments": {',
    "}}",
    '"',
    "\\",
    '\\"',
    "\n",
    " ",
    "1",
    "null",
    "text",
    "é🙂",
    '"i": "',
    "functions.",
    "g:1",
    "function",
    "```json",
    "\n```",
    "{}",
    "{",
    '{"name": "f", "parameters": {}}',
    '[TOOL_CALLS] [{"name": "g"}, ',
    "<tool_calls><tool_call>f<tool_sep>",
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>",
]
OUTPUTS = st.lists(st.sampled_from(BITS) | st.text(max_size=3), max_size=25).map("".join)


@given(st.sampled_from(TEXTS), OUTPUTS, st.booleans(), st.booleans(), st.booleans(), st.data())
def test_any_cuts_of_any_output_change_nothing(
    format: str, text: str, reasoning: bool, split: bool, tools: bool, data: st.DataObject
) -> None:
    def fresh() -> Parser:
        return new(format, reasoning, split, TOOLS if tools else [])

    whole = streamed(fresh(), [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert streamed(fresh(), [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]) == whole
    assert streamed(fresh(), text) == whole
    # What was given after a part of the output is what any longer output begins with: no mark leaks before it is whole.
    parser, said, final = fresh(), Answer(), Answer.of(whole)
    given: list[Part] = []
    for letter in text:
        given += parser.push(letter)
        said = Answer.of(given)
        assert final.reasoning.startswith(said.reasoning)
        assert final.content.startswith(said.content)
    for call in final.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name in ("f", "g")
    if not tools:
        assert not final.tool_calls
    assert [part for part in whole if part.kind == "end"] == [Part("end")] * len(final.tool_calls)


def test_what_is_certain_is_not_held_back() -> None:
    parser = new(M2, reasoning=True)
    told = [
        ("so", [Part("reasoning", "so")]),
        (" <", [Part("reasoning", " ")]),
        ("thin air", [Part("reasoning", "<thin air")]),
        ("\n", []),
        ("</think>\n\n", []),
        ("a<b", [Part("content", "a<b")]),
        ("\n\n", []),
        ('<minimax:tool_call><invoke name="f"', []),
        (">", [Part("call", "f")]),
        ('<parameter name="i">1<', []),
        ("/parameter>", []),  # with other text behind it, it is of the value
        ('<parameter name="s">é</parameter>', [Part("arguments", '{"i": 1')]),
        ("</invoke>", [Part("arguments", ', "s": "é"'), Part("arguments", "}"), Part("end")]),
        ("</minimax:tool_call>", []),
    ]
    for piece, expected in told:
        assert parser.push(piece) == expected, piece
    assert parser.finish() == []
    assert merged(new(M2).push("a <thi")) == [Part("content", "a <thi")]  # no reasoning can begin behind content
    assert new(M2, tools=[]).push("a\n\n") == [Part("content", "a\n\n")]  # no mark can follow that makes them layout


HOSTILE = [
    "<think",
    "<arg_value>",
    "<tool_call>f",
    "\n",
    '<tool_call>{"\n',
    '<invoke name="g">',
    "<parameter name=",
    '{"a":',
    "</parameter>\n",
    "</function> </parameter>",
    "<|tool_call_begin|>",
    deepseek("f"),
]
STARTS = [
    "",
    "<minimax:tool_call>" + A + '<parameter name="o">',
    '<tool_call>{"name": "g", "arguments": {"a": "',
    '<tool_call>{"name": "g", "arguments": ',
    "<tool_call><function=f><parameter=a>",
    "<tool_call>f<arg_key>s</arg_key>",
]


@pytest.mark.slow
@pytest.mark.parametrize("format", TEXTS)
@pytest.mark.parametrize("bit", HOSTILE)
def test_hostile_outputs_take_linear_work(format: str, bit: str) -> None:
    for start in STARTS:
        for size, letters in ((60_000, False), (1_000, True)):
            text = start + bit * (size // len(bit))
            parser, begin = new(format), time.process_time()
            parts = [p for piece in text for p in parser.push(piece)] if letters else parser.push(text)
            parts += parser.finish()
            assert sum(len(part.text) for part in parts) <= 3 * len(text) + 20
            assert time.process_time() - begin < 20  # quadratic work takes minutes


def test_the_work_of_a_schema_is_bounded() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(100_000):
        deep = {"anyOf": [deep]}
    wide = {"anyOf": [{"anyOf": [{"type": "string"}] * 2000}] * 2000}
    for schema in (deep, wide):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"s": schema}}}}]
        assert new(M2, tools=tools).whole(m2(invoke("f", s="1"))) == answer("", "", ("f", {"s": "1"}))

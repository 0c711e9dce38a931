"""Grammars of parameters that a model writes as they are, without the quotes of JSON, between two marks.

A string is then any text up to the closing mark, and what looks like another type that the schema allows is read as
that (text/tool_arguments.py). So a string with a pattern, a length or certain values, or one beside other types, is a
terminal of its grammar, which has the closing mark and leaves out the texts that would be read as something else:
a lexer that could also go on would not see where the value ends. Each kind of string is a terminal of its own: where
none is left, as of digits that would be a number, llguidance does not notice that within a larger terminal.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import regex_to_lark

from umbra.serving.api.schemas import has_properties
from umbra.text.tool_arguments import Tool, resolved, type_of

ANYTHING = r"/(.|\n)*/"
MOST_CASES = 64  # conjunctions that a schema is made of
DEEPEST = 16  # references and alternatives within each other
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
INTEGER, NUMBER = "/-?(0|[1-9][0-9]{0,15})/", r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?/"
BLANK = r"[\s\x1c-\x1f]"  # what Python's strip() takes off
# Texts that are read as another type, if the schema allows that.
READ_AS = {
    "null": rf"/{BLANK}*[nN][uU][lL][lL]{BLANK}*/",
    "boolean": rf"/{BLANK}*([tT][rR][uU][eE]|[fF][aA][lL][sS][eE]|1|0){BLANK}*/",
    "number": rf"/{BLANK}*[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?{BLANK}*/",
    "object": rf"/{BLANK}*[\[{{](.|\n)*/",
}
READ_AS |= {"integer": READ_AS["number"], "array": READ_AS["object"]}
NUMBER_KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


GROUP = re.compile(r"\?(:|P?<[A-Za-z_]\w*>)")  # what may follow the parenthesis of a group
LONG_MONTHS, SHORT_MONTHS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])", "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
DATE = f"[12][0-9]{{3}}-({LONG_MONTHS}|{SHORT_MONTHS}|02-(0[1-9]|1[0-9]|2[0-8]))"
HOURS = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{HOURS}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{HOURS})"
SPAN = "T({n}H({n}M({n}S)?)?|{n}M({n}S)?|{n}S)".replace("{n}", "[0-9]{1,9}")
DAYS = "({n}Y({n}M({n}D)?)?|{n}M({n}D)?|{n}D)".replace("{n}", "[0-9]{1,9}")
LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
BYTE, HEX = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])", "[0-9a-fA-F]{1,4}"
URI_LETTERS = "[A-Za-z0-9._~!$&'()*+,;=:@-]"
# Of formats of strings, the most common texts: not all that a format allows, but nothing that it does not.
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": f"P([0-9]{{1,9}}W|{DAYS}({SPAN})?|{SPAN})",
    "email": rf"[A-Za-z0-9_+-]{{1,30}}(\.[A-Za-z0-9_+-]{{1,30}})?@{LABEL}(\.{LABEL}){{1,3}}",
    "hostname": rf"{LABEL}(\.{LABEL}){{0,3}}",
    "ipv4": rf"{BYTE}(\.{BYTE}){{3}}",
    "ipv6": f"({HEX}:){{7}}{HEX}|({HEX}(:{HEX}){{0,2}})?::({HEX}(:{HEX}){{0,2}})?",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]{{0,15}}:(//{LABEL}(\.{LABEL}){{0,3}}(:[0-9]{{1,4}})?"
    rf"(/{URI_LETTERS}*)*|{URI_LETTERS}+)"
    rf"(\?({URI_LETTERS}|/)*)?(#({URI_LETTERS}|/)*)?",
}


class RawValue(NamedTuple):
    """Says which texts may stand between the marks of a value."""

    terminals: Sequence[str] = ()  # expressions of texts
    structures: Sequence[Any] = ()  # schemas of objects and arrays
    free: bool = False  # any text is a value


def conjunctions(schema: Any, root: Any, depth: int = 0) -> list[list[dict[str, Any]]]:
    """`schema` as alternatives, each of which is several schemas that hold together, without references to `root`."""
    if not isinstance(schema, dict) or depth > DEEPEST:
        return [[]]
    schema = resolved(schema, root)
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf", "allOf", "$ref")}
    cases: list[list[dict[str, Any]]] = [[rest]]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [case for part in schema[key] for case in conjunctions(part, root, depth + 1)]
            cases = [[*case, *part] for case in cases for part in parts][:MOST_CASES]
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        cases = [[*c, *more] for c in cases for more in conjunctions(part, root, depth + 1)][:MOST_CASES]
    return cases


def properties_of(parts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    """The properties of schemas that hold together, and the names of those that must be there."""
    properties: dict[str, Any] = {}
    required: set[str] = set()
    for part in parts:
        for key, schema in part["properties"].items() if has_properties(part) else ():
            properties[key] = {"allOf": [properties[key], schema]} if key in properties else schema
        names = part.get("required")
        required |= {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
    return properties | {key: {} for key in sorted(required - properties.keys())}, required


def value_of(schema: Any, root: Any, marks: Sequence[str]) -> RawValue | None:
    """Returns the texts that a model may write for `schema`, in which none of `marks` may be; None: JSON, which has no
    string."""
    cases = [(parts, types) for parts in conjunctions(schema, root) if (types := types_of(parts))]
    strings = [parts for parts, types in cases if "string" in types]
    if not strings:
        return None
    others = [(parts, types - {"string"}) for parts, types in cases if types - {"string"}]
    read = Tool({"properties": {"value": schema}, **definitions(root)}).types_of("value")
    unlimited = any(values_of(parts) is None and not [*limits_of(parts)] for parts in strings)
    if unlimited and not read & {"object", "array"} and not any(_limited(parts) for parts, _ in others):
        return RawValue(free=True)
    unlike = [without(marks)]
    unlike += [f"~{text}" for text in dict.fromkeys(READ_AS[t] for t in sorted(read & READ_AS.keys()))]
    if read & {"object", "array"}:  # their own rule begins otherwise
        unlike.append(rf"~/{BLANK}(.|\n)*/")
    texts = [text for parts in strings for text in _strings(parts, marks, unlike)]
    scalars = [text for parts, types in others for text in _scalars(parts, types)]
    structures = [
        {"allOf": parts, "type": sorted(types & {"object", "array"}), **definitions(root)}
        for parts, types in others
        if types & {"object", "array"}
    ]
    if scalars:
        texts.append(f"({' | '.join(dict.fromkeys(scalars))})")
    return RawValue([*dict.fromkeys(texts)], structures)


def without(marks: Iterable[str]) -> str:
    """An expression of texts that have none of `marks`."""
    named = "|".join(regex_to_lark(re.escape(mark), "") for mark in marks)
    return rf"~/(.|\n)*({named})(.|\n)*/"


def definitions(root: Any) -> dict[str, Any]:
    """The parts of `root` that references name."""
    return {key: root[key] for key in ("$defs", "definitions") if isinstance(root, dict) and key in root}


def values_of(parts: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """The values that all of `parts` allow, of those that they name; None: they name none."""
    values: list[Any] | None = None
    for part in parts:
        named = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(named, list):
            keys = [json.dumps(v, sort_keys=True) for v in named]
            values = [v for v in (named if values is None else values) if json.dumps(v, sort_keys=True) in keys]
    return values


def types_of(parts: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    types = TYPES
    for part in parts:
        named = part.get("type")
        if named is not None:
            own = frozenset(named if isinstance(named, list) else [named])
            types &= own | ({"integer"} if "number" in own else set())
    values = values_of(parts)
    return types if values is None else types & frozenset(map(type_of, values))


def _strings(parts: Sequence[Mapping[str, Any]], marks: Sequence[str], unlike: Sequence[str]) -> list[str]:
    """An expression of the strings that all of `parts` allow: those that they name, or those that are `unlike` others;
    none, if all have one of `marks`."""
    if (values := values_of(parts)) is None:
        return [f"({' & '.join([*(limits_of(parts) or [ANYTHING]), *unlike])})"]
    names = [v for v in values if isinstance(v, str) and not any(mark in v for mark in marks)]
    if not names:
        return []
    named = f"({' | '.join(json.dumps(name) if name else '/()/' for name in names)})"
    return [f"({' & '.join([named, *limits_of(parts)])})"]


def limits_of(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Expressions of the lengths, patterns and formats that `parts` demand of a string."""
    limits = []
    for part in parts:
        least, most = part.get("minLength") or 0, part.get("maxLength")
        if least or most is not None:
            limits.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
        if isinstance(part.get("pattern"), str):
            limits.append(searched(part["pattern"]))
        if part.get("format") in FORMATS:
            limits.append(f"/{regex_to_lark(FORMATS[part['format']], 'dw')}/")
    return limits


def _limited(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Says whether values that are no strings may be some of their types only."""
    return values_of(parts) is not None or any(key in part for part in parts for key in NUMBER_KEYS)


def _scalars(parts: Sequence[Mapping[str, Any]], types: frozenset[str]) -> Iterator[str]:
    """Expressions of null, booleans and numbers; none of numbers with limits, which a terminal cannot have beside
    strings."""
    if (values := values_of(parts)) is not None:
        yield from (json.dumps(json.dumps(v)) for v in values if type_of(v) in types - {"object", "array"})
        return
    yield from ('"null"' for _ in types & {"null"})
    yield from ('("true" | "false")' for _ in types & {"boolean"})
    if not _limited(parts):
        yield from (NUMBER if t == "number" else INTEGER for t in sorted(types & {"number", "integer"}))


def searched(pattern: str) -> str:
    """A regular expression of Lark for the texts in which `pattern` is found, as JSON schemas mean it."""
    texts = []
    for part in opened(pattern):
        begins, ends = part.startswith("^"), _ends(part)
        inner = part[begins : len(part) - ends]
        texts.append(f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}")
    return f"/{regex_to_lark('|'.join(texts), 'dw')}/"


def opened(pattern: str) -> list[str]:
    """The alternatives of a regular expression, with those of groups that hold its beginning or end among them."""
    cases, left = list[str](), alternatives(pattern)
    while left and len(cases) + len(left) <= MOST_CASES:
        part = left.pop(0)
        begin, end = _anchored_group(part)
        before, after, parts = part[:begin], part[end + 1 :], alternatives(GROUP.sub("", part[begin + 1 : end]))
        if end < 0:
            cases.append(part)
            continue
        for inner in parts:
            first, last = inner.startswith("^"), _ends(inner)
            if not (first and before not in ("", "^")) and not (last and after not in ("", "$")):
                cut = inner[bool(first and before) : len(inner) - bool(last and after)]
                left.append(before + cut + after)
    return cases + left


def _anchored_group(pattern: str) -> tuple[int, int]:
    """Returns where the first group begins and ends that has ^ or $ in it and is not repeated; -1 and -1: none."""
    begin, anchored = -1, False
    for at, letter, depth in _structure(pattern):
        if letter == "(" and not depth:
            begin, anchored = at, False
        anchored = anchored or letter in "^$"
        if letter == ")" and not depth and anchored and pattern[at + 1 : at + 2] not in ("*", "+", "?", "{"):
            return begin, at
    return -1, -1


def _ends(pattern: str) -> bool:
    return pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1


def alternatives(pattern: str) -> list[str]:
    """The parts of a regular expression between the bars that stand in no group and no class."""
    bars = [at for at, letter, depth in _structure(pattern) if letter == "|" and not depth]
    return [pattern[a + 1 : b] for a, b in zip([-1, *bars], [*bars, len(pattern)], strict=True)]


def _structure(pattern: str) -> Iterator[tuple[int, str, int]]:
    """The letters of a regular expression that are neither escaped nor in a class: where they are, and in how many
    groups, which their own parentheses are not counted for."""
    depth, in_class, escaped = 0, False, False
    for at, letter in enumerate(pattern):
        if escaped:
            escaped = False
        elif letter == "\\":
            escaped = True
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        else:
            depth -= letter == ")"
            yield at, letter, depth
            depth += letter == "("

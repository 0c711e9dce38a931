"""The arguments of a tool call: JSON that models write, and values that the tool's JSON schema gives a type.

All of it is untrusted: depths, sizes and the work that a schema can cause are bounded.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

DEEPEST = 64  # levels of nested lists and objects
MOST_PARTS = 1000  # parts of one parameter's schema that are looked at
MOST_REFERENCES = 16  # from one definition to the next
INTEGER = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
HALF_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(u[0-9A-Fa-f]{0,3})?$")  # at the end of a string that is open
BARE_KEY = re.compile(r"([{,]\s*)([^\s:{}\[\],\"]+)\s*:")  # within an object that is no JSON
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class Tool:
    """A function that the model may call, with the types that its parameters may have."""

    def __init__(self, parameters: object):
        """`parameters` is the function's JSON schema; whatever in it is no schema is passed over."""
        self.root = parameters
        self.schemas: dict[str, list[object]] = {}  # of each parameter, those of which any may apply
        for part in _parts([parameters], parameters):
            properties = part.get("properties")
            for name, schema in properties.items() if isinstance(properties, Mapping) else ():
                self.schemas.setdefault(name, []).append(schema)
        self._read: dict[str, tuple[frozenset[str], frozenset[str]]] = {}

    def types_of(self, parameter: str) -> frozenset[str]:
        """The types that the schema names: by `type`, by values, and by all that it is made of."""
        return self._types_and_strings(parameter)[0]

    def value(self, parameter: str, text: str) -> Any:
        """`text` if it is a string that the schema names; or else as the first type that it can be of those that the
        schema allows, or else as a string."""
        (types, strings), bare = self._types_and_strings(parameter), text.strip()
        if text in strings:
            return text
        if "null" in types and bare.lower() == "null":
            return None
        # Digits beyond Python's limit for integers are no integer here.
        if types & {"integer", "number"} and INTEGER.fullmatch(bare) and len(bare) < 4000:
            return int(bare)
        if "number" in types and NUMBER.fullmatch(bare):
            return bounded(bare)
        if "boolean" in types and bare.lower() in BOOLEANS:
            return BOOLEANS[bare.lower()]
        if types & {"object", "array"}:
            parsed = read_json_text(bare)
            if isinstance(parsed, dict | list) and type_of(parsed) in types:
                return parsed
        return text

    def _types_and_strings(self, parameter: str) -> tuple[frozenset[str], frozenset[str]]:
        if parameter not in self._read:
            self._read[parameter] = _types_and_strings(_parts(self.schemas.get(parameter, []), self.root))
        return self._read[parameter]


def tools_by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Tool]:
    """The tools of a chat in OpenAI's shape, {"type": "function", "function": {"name", "parameters", ...}}."""
    return {tool["function"]["name"]: Tool(tool["function"].get("parameters")) for tool in tools}


def unwrapped(text: str, lines: bool) -> str:
    """The text of a parameter without the newlines of its layout: one on each side, if there is one on each side or
    if the format has values on `lines` of their own."""
    if lines:
        return text.removeprefix("\n").removesuffix("\n")
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == "\n" else text


def read_json_text(text: str) -> Any:
    """The JSON value in `text`; None if it is none, is nested too deeply, or has NaN or Infinity."""
    try:
        value = json.loads(text, parse_float=bounded)
    except (ValueError, RecursionError):
        return None
    level = [value]
    for _ in range(DEEPEST):
        if any(isinstance(v, float) and not math.isfinite(v) for v in level):
            return None
        level = [w for v in level if isinstance(v, dict | list) for w in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return value
    return None


def bounded(text: str) -> float:
    """The number in `text`; the largest float of its sign if floats end before it, so that 1e999 stays a number."""
    value = float(text)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


def repaired(text: str) -> dict[str, Any]:
    """The object that `text` begins, which a model or the limit of tokens has left broken: with what is whole of it and
    the beginning of a string that is open. Without anything of that kind it is empty."""
    closers: list[str] = []
    in_string = escaped = False
    whole = 0, ""  # where the last whole part ends, and what closes it
    for at, letter in enumerate(text):
        if in_string:
            escaped, in_string = letter == "\\" and not escaped, letter != '"' or escaped
        elif letter == '"':
            in_string = True
        elif letter in "{[":
            closers.append("}" if letter == "{" else "]")
        elif letter in "}]" and closers:
            closers.pop()
            whole = at + 1, "".join(reversed(closers))
        elif letter == ",":
            whole = at, "".join(reversed(closers))
        if len(closers) > DEEPEST:
            break
    end = "".join(reversed(closers))
    opened = HALF_ESCAPE.sub(r"\1", text) + '"' if in_string else text
    for attempt in (opened + end, text[: whole[0]] + whole[1]):
        value = read_json_text(attempt)
        if isinstance(value, dict):
            return value
    return {}


def in_json(text: str, quote: str) -> str:
    """The object `text`, or the beginning of one, as JSON: its keys are bare, and strings stand between two `quote`."""
    parts = []
    for number, part in enumerate(text.split(quote)):
        if number % 2:
            parts.append(to_json(part)[1:-1])
        else:
            parts.append(BARE_KEY.sub(lambda key: f"{key[1]}{to_json(key[2])}:", part))
    return '"'.join(parts)


def bare(value: Any, quote: str) -> str:
    """`value` in that notation, with keys in order."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{bare(value[key], quote)}' for key in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{','.join(bare(part, quote) for part in value)}]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else to_json(value)


def to_json(value: Any) -> str:
    """`value` as JSON that can be encoded: only half of a surrogate pair makes it write characters as escapes."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def resolved(schema: object, root: object) -> Any:
    """`schema` with what its `$ref` names within `root` in place of that."""
    for _ in range(MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not isinstance(schema, Mapping):
            return schema
        target: object = root
        for key in reference.removeprefix("#").split("/")[1:]:
            target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        named = target if isinstance(target, Mapping) else {}
        schema = {**named, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def _parts(schemas: Sequence[object], root: object) -> list[Mapping[str, Any]]:
    """The schemas that `schemas` are made of by anyOf, oneOf, allOf and references to `root`, themselves included."""
    reached: list[Mapping[str, Any]] = []
    left = [*schemas]
    while left and len(reached) < MOST_PARTS:
        part = resolved(left.pop(), root)
        if not isinstance(part, Mapping):
            continue
        reached.append(part)
        for key in ("anyOf", "oneOf", "allOf"):
            parts = part.get(key)
            left += parts[:MOST_PARTS] if isinstance(parts, list) else []
    return reached


def _types_and_strings(parts: Sequence[Mapping[str, Any]]) -> tuple[frozenset[str], frozenset[str]]:
    """The types that `parts` name, by `type` and by values; and the strings among these values."""
    types: set[str] = set()
    strings: set[str] = set()
    for part in parts:
        named, values = part.get("type"), [part["const"]] if "const" in part else part.get("enum")
        values = values[:MOST_PARTS] if isinstance(values, list) else []
        types |= {t for t in (named if isinstance(named, list) else [named])[:MOST_PARTS] if isinstance(t, str)}
        types |= set(map(type_of, values))
        strings |= {value for value in values if isinstance(value, str)}
    return frozenset(types), frozenset(strings)


def type_of(value: object) -> str:
    """The name that JSON schemas have for the type of a value."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return kinds.get(type(value), "null")

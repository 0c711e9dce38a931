"""The arguments of a tool call: JSON that models write, and values that the tool's JSON schema gives a type.

All of it is untrusted: depths, sizes and the work that a schema can cause are bounded.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

DEEPEST = 64  # levels of nested lists and objects
MOST_PARTS = 1000  # parts of one parameter's schema that are looked at
INTEGER = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class Tool:
    """A function that the model may call, with the types that its parameters may have."""

    def __init__(self, parameters: object):
        """`parameters` is the function's JSON schema; whatever in it is no schema is passed over."""
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        self.properties = properties if isinstance(properties, Mapping) else {}
        self.types: dict[str, frozenset[str]] = {}

    def value(self, parameter: str, text: str) -> Any:
        """`text` as the first type that it can be of those that the schema allows, or else as a string."""
        if parameter not in self.types:
            self.types[parameter] = _types(self.properties.get(parameter))
        types, bare = self.types[parameter], text.strip()
        if "null" in types and bare.lower() == "null":
            return None
        # Digits beyond Python's limit for integers are no integer here.
        if types & {"integer", "number"} and INTEGER.fullmatch(bare) and len(bare) < 4000:
            return int(bare)
        if "number" in types and NUMBER.fullmatch(bare) and math.isfinite(float(bare)):
            return float(bare)
        if "boolean" in types and bare.lower() in BOOLEANS:
            return BOOLEANS[bare.lower()]
        if types & {"object", "array"}:
            parsed = read_json_text(bare)
            if isinstance(parsed, dict | list) and _type_of(parsed) in types:
                return parsed
        return text


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
    """The JSON value in `text`; None if it is none, is nested too deeply, or has a number that is not finite."""
    try:
        value = json.loads(text)  # also reads NaN
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


def to_json(value: Any) -> str:
    """`value` as JSON that can be encoded: only half of a surrogate pair makes it write characters as escapes."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _types(schema: object) -> frozenset[str]:
    """The types that a schema names: `type`, the values of `enum`, and those of its anyOf, oneOf and allOf."""
    types: set[str] = set()
    left, seen = [schema], 0
    while left and seen < MOST_PARTS:
        part, seen = left.pop(), seen + 1
        if not isinstance(part, Mapping):
            continue
        named, values = part.get("type"), part.get("enum")
        types |= {t for t in (named if isinstance(named, list) else [named])[:MOST_PARTS] if isinstance(t, str)}
        types |= {_type_of(v) for v in (values if isinstance(values, list) else [])[:MOST_PARTS]}
        for key in ("anyOf", "oneOf", "allOf"):
            parts = part.get(key)
            left += parts[:MOST_PARTS] if isinstance(parts, list) else []
    return frozenset(types)


def _type_of(value: object) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return kinds.get(type(value), "null")

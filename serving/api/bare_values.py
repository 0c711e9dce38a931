"""Grammars of arguments in a notation that is no JSON: keys are bare and in order, and a string stands between two
marks (`text.tool_arguments.in_json`)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from umbra.serving.api.raw_values import (
    ANYTHING,
    conjunctions,
    definitions,
    limits_of,
    properties_of,
    types_of,
    values_of,
    without,
)
from umbra.text.tool_arguments import bare

DEEPEST = 6  # values within each other whose schemas are held
MOST_ITEMS = 64  # of a list that a schema bounds
NUMBERS = ("integer", "number")
KEY = r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"


class BareValues:
    """Writes rules for values; `mark` is that of strings as part of a grammar, and `quote` its text."""

    def __init__(self, mark: str, quote: str, root: Any, name: str):
        self._mark, self._quote, self._root, self._name = mark, quote, root, name
        self._count = 0
        self.rules: list[str] = []

    def _new(self, content: str, terminal: bool = False) -> str:
        self._count += 1
        name = f"{self._name}b{self._count}"
        name = name.upper() if terminal else name
        self.rules.append(f"{name}: {content}")
        return name

    def value(self, schema: Any, depth: int = 0) -> str:
        """Returns the name of a rule for the values of `schema`."""
        if depth > DEEPEST:
            return self.anything()
        ways = [way for parts in conjunctions(schema, self._root) for way in self._ways(parts, depth)]
        return self._new(" | ".join(dict.fromkeys(ways)) or self.anything())

    def _ways(self, parts: Sequence[Mapping[str, Any]], depth: int) -> list[str]:
        types = types_of(parts)
        if (values := values_of(parts)) is not None:
            return [self._literal(value) for value in values]
        if not any("type" in part or "properties" in part for part in parts):
            return [self.anything()]
        ways = ['"null"'] if "null" in types else []
        ways += ['"true"', '"false"'] if "boolean" in types else []
        if numbers := [kind for kind in NUMBERS if kind in types]:
            merged: dict[str, Any] = {"allOf": list(parts), "type": numbers, **definitions(self._root)}
            ways.append(self._new(f"%json {json.dumps(merged)}"))
        if "string" in types:
            ways.append(self._string(limits_of(parts)))
        if "array" in types:
            ways.append(self._array(parts, depth))
        if "object" in types:
            ways.append(self._object(parts, depth))
        return ways

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._mark} {json.dumps(value)} {self._mark}" if value else f"{self._mark} {self._mark}"
        return json.dumps(bare(value, self._quote))

    def _string(self, limits: Sequence[str]) -> str:
        text = self._new(f"({' & '.join([*(limits or [ANYTHING]), without([self._quote])])})", terminal=True)
        return f"{self._mark} {text} {self._mark}"

    def _array(self, parts: Sequence[Mapping[str, Any]], depth: int) -> str:
        items = [part["items"] for part in parts if isinstance(part.get("items"), dict)]
        one = self.value({"allOf": items} if items else {}, depth + 1)
        least = max((part.get("minItems") or 0 for part in parts), default=0)
        most = min((part["maxItems"] for part in parts if part.get("maxItems") is not None), default=None)
        if most == 0:
            return '"[" "]"'
        bounds = f"{{{max(least - 1, 0)},{'' if most is None else min(most, MOST_ITEMS) - 1}}}"
        some = one if most == 1 else f'{one} ("," {one}){bounds}'
        return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'

    def _object(self, parts: Sequence[Mapping[str, Any]], depth: int) -> str:
        properties, required = properties_of(parts)
        if not properties:
            closed = any(part.get("additionalProperties") is False for part in parts)
            return '"{" "}"' if closed else self.pairs()
        first, rest = '""', '""'  # what may follow, before and behind a first key
        for key in sorted(properties, reverse=True):
            pair = f"{json.dumps(f'{key}:')} {self.value(properties[key], depth + 1)}"
            whole, more = f"{pair} {rest}", f'"," {pair} {rest}'
            if key in required:
                first, rest = self._new(whole), self._new(more)
            else:
                first, rest = self._new(f"{whole} | {first}"), self._new(f"{more} | {rest}")
        return f'"{{" {first} "}}"'

    def pairs(self) -> str:
        """A part of a grammar for any object."""
        one = f'{KEY} ":" {self.anything()}'
        return f'"{{" ({one} ("," {one})*)? "}}"'

    def anything(self) -> str:
        """Returns the name of a rule for any value."""
        name = f"{self._name}any"
        if not any(rule.startswith(f"{name}:") for rule in self.rules):
            number = self._new('%json {"type": "number"}')
            pair = f'{KEY} ":" {name}'
            objects = f'"{{" ({pair} ("," {pair})*)? "}}"'
            lists = f'"[" ({name} ("," {name})*)? "]"'
            literals = '"null" | "true" | "false"'
            self.rules.append(f"{name}: {number} | {literals} | {self._string([])} | {lists} | {objects}")
        return name


def bare_rules(rule: str, schema: Any, mark: str, quote: str) -> list[str]:
    """The rules of arguments that `schema` describes, of which the first is called `rule`; None: any object."""
    values = BareValues(mark, quote, schema, rule)
    content = values.pairs() if schema is None else values.value(schema)
    return [f"{rule}: {content}", *values.rules]

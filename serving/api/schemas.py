"""Makes of JSON schemas what a grammar can hold: what it cannot is left out and named, and the model may not invent a
property that a schema does not name."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from umbra.serving.api.errors import invalid
from umbra.text.tool_arguments import type_of

DEEPEST = 32  # levels of a schema
MOST_PROPERTIES = 512  # of a schema, in all its levels
NAMED = ("properties", "$defs", "definitions", "patternProperties")  # keywords whose values are schemas by names
NESTED = ("items", "prefixItems", "additionalItems", "anyOf", "allOf", "oneOf", "additionalProperties")  # or schemas
UNHELD = frozenset(
    {"not", "if", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "dependentRequired"}
    | {"dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"}
)
TRIVIAL = {"uniqueItems": (False,), "unevaluatedItems": (True,), "unevaluatedProperties": (True,)}  # say nothing
FOLLOWERS = frozenset({"then", "else"})  # of `if`, without which they say nothing
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # of strings; others are notes to the reader
EVERY_TYPE = frozenset({"null", "boolean", "number", "string", "array", "object"})
LOOKS = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[bBAZzGk1-9])")  # around, or back


def check_schema(param: str, schema: Any) -> None:
    """Raises ApiError for a JSON schema that is too deep or too large."""
    if not isinstance(schema, dict | bool):
        raise invalid(param, "must be a JSON schema: an object or a boolean")
    level, properties = [schema], 0
    for _ in range(DEEPEST):
        properties += sum(len(v["properties"]) for v in level if isinstance(v, dict) and has_properties(v))
        level = [w for v in level if isinstance(v, dict | list) for w in (v.values() if isinstance(v, dict) else v)]
        if properties > MOST_PROPERTIES:
            raise invalid(param, f"has more than {MOST_PROPERTIES} properties")
        if not level:
            return
    raise invalid(param, f"is nested more than {DEEPEST} levels deep")


def has_properties(schema: Mapping[str, Any]) -> bool:
    return isinstance(schema.get("properties"), dict)


def held(schema: Any) -> tuple[Any, list[str]]:
    """`schema` without what a grammar cannot hold; and a note of each such keyword, with the property that has it."""
    notes: list[str] = []
    return _held(schema, "", notes), notes


def _held(schema: Any, path: str, notes: list[str]) -> Any:
    if not isinstance(schema, dict):
        return schema

    def said(keyword: str) -> str:
        return f"{keyword} of {path}" if path else keyword

    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in FOLLOWERS or (key == "format" and value not in FORMATS):
            continue
        if _is_unheld(key, value, schema):
            notes += [] if _says_nothing(key, value, schema) else [said(key)]
        elif key in NAMED and isinstance(value, dict):
            shown = key in ("properties", "patternProperties")
            kept[key] = {n: _held(part, _joined(path, n) if shown else path, notes) for n, part in value.items()}
        elif key in NESTED:
            inner = f"{path}[]" if key in ("items", "prefixItems", "additionalItems") else path
            many = isinstance(value, list)
            kept[key] = [_held(part, inner, notes) for part in value] if many else _held(value, inner, notes)
        else:
            kept[key] = value
    if isinstance(kept.get("oneOf"), list):
        if not _disjoint(kept["oneOf"]) or "anyOf" in kept:
            notes.append(said("oneOf"))
        kept.setdefault("anyOf", kept["oneOf"])
        del kept["oneOf"]
    return kept


def _is_unheld(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if key in ("minProperties", "maxProperties"):
        return not _all_required(schema)
    looks = key == "pattern" and isinstance(value, str) and LOOKS.search(value)
    return key in UNHELD or bool(looks) or (key == "$ref" and not str(value).startswith("#"))


def _says_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    counted = key in ("minProperties", "maxProperties") and _counts(schema, key)
    return counted or value in TRIVIAL.get(key, ())


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _all_required(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    return isinstance(properties, dict) and isinstance(required, list) and all(name in required for name in properties)


def _counts(schema: Mapping[str, Any], key: str) -> bool:
    """Says whether the number of properties is within the limit `key` whatever the model writes."""
    limit, required, properties = schema[key], schema.get("required"), schema.get("properties")
    if not isinstance(limit, int):
        return False
    if key == "minProperties":
        return limit <= (len(required) if isinstance(required, list) else 0)
    open_ended = schema.get("additionalProperties", False) is not False or "patternProperties" in schema
    return not open_ended and limit >= (len(properties) if isinstance(properties, dict) else 0)


def _disjoint(parts: Sequence[Any]) -> bool:
    """Says whether no value can follow two of `parts`, as far as their types and values tell."""
    return not any(_meet(a, b) for i, a in enumerate(parts) for b in parts[i + 1 :])


def _meet(a: Any, b: Any) -> bool:
    values = [_values(a), _values(b)]
    if values[0] is not None and values[1] is not None:
        return bool(values[0] & values[1])
    return bool(_types(a) & _types(b))


def _values(schema: Any) -> frozenset[str] | None:
    """The values that `schema` names, written as JSON; None: it names none."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(json.dumps(v, sort_keys=True) for v in values) if isinstance(values, list) else None


def _types(schema: Any) -> frozenset[str]:
    """The types that `schema` may have, of which integers are numbers."""
    if not isinstance(schema, dict):
        return EVERY_TYPE
    if (values := _values(schema)) is not None:
        types = [type_of(json.loads(value)) for value in values]
    else:
        named = schema.get("type")
        types = named if isinstance(named, list) else [named] if named else [*EVERY_TYPE]
    return frozenset("number" if t == "integer" else str(t) for t in types)


def closed(schema: Any) -> Any:
    """`schema` without properties that it does not name, where it does not say whether there may be others: a model
    that must call would invent them. With allOf, whose parts have properties of each other's, it stays as it is."""
    return schema if "allOf" in json.dumps(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {
        key: {name: _closed(part) for name, part in value.items()}
        if key in NAMED and isinstance(value, dict)
        else _closed(value)
        if key in NESTED
        else value
        for key, value in schema.items()
    }
    joined = any(key in schema for key in ("anyOf", "oneOf", "$ref", "patternProperties"))
    if has_properties(schema) and not joined:
        parts.setdefault("additionalProperties", False)
        required = schema.get("required")
        for name in required if isinstance(required, list) else ():
            if isinstance(name, str):
                parts["properties"].setdefault(name, {})
    return parts

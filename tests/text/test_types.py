"""The types that a schema names for an argument of a call."""

import pytest

from text.tool_arguments import _types


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null", 5]}, {"string", "null"}),
        ({"enum": [True, 1, 0.5, "a", {}, [], None]},
         {"boolean", "integer", "number", "string", "object", "array", "null"}),
        ({"anyOf": [{"type": "string"}, "strange"], "oneOf": [{"type": "integer"}], "allOf": [{"enum": [None]}]},
         {"string", "integer", "null"}),
        ({"allOf": [{"anyOf": [{"type": "array"}]}]}, {"array"}),
        ({}, set()), (True, set()), ({"type": None, "enum": 5, "anyOf": {}}, set()),
    ],
)  # fmt: skip
def test_types_are_named_in_many_ways(schema: object, types: set[str]) -> None:
    assert _types(schema) == types

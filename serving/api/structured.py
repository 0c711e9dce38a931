"""Grammars that answers follow: those that a request asks for, and those of tool calls that it demands."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from umbra.executor.engine.schedule.request import Grammar
from umbra.serving.api.errors import ApiError, invalid
from umbra.serving.api.fields import Fields, Structured
from umbra.text.formats import CHANNEL, CONSTRAIN, END, JSON_CALLS, MESSAGE, START, THINK, THINK_END, OutputMarks

LARGEST = 1 << 16  # bytes of a schema, regular expression or grammar
DEEPEST = 32  # levels of a schema
MOST_PROPERTIES = 512  # of a schema, in all its levels
MOST_CALLS = 8  # calls of one answer, if calls are demanded
COMPACT = {"whitespace_flexible": False}  # without it, an answer may be endless white space
NAMED = ("properties", "$defs", "definitions", "patternProperties")  # keywords whose values are schemas by names
NESTED = ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties")  # and those whose values are schemas
ANYTHING = r"/(.|\n)*/"


def wanted_grammar(fields: Fields) -> Grammar | None:
    """The grammar that the request asks for in one of several ways. Raises ApiError for several, or a bad one."""
    grammars = _asked(fields)
    if len(grammars) > 1:
        raise invalid(grammars[1][0], f"{grammars[0][0]} is given as well: give one of them")
    return _grammar(*grammars[0]) if grammars else None


def grammar_field(fields: Fields) -> str:
    """The name of the field that has the grammar."""
    return _asked(fields)[0][0]


def _asked(fields: Fields) -> list[tuple[str, str, Any]]:
    """The fields that have a grammar: their names, the grammars' kinds, and their values."""
    asked = fields.structured_outputs or Structured()
    given: list[tuple[str, str, Any]] = [
        ("guided_json", "json", fields.guided_json),
        ("guided_regex", "regex", fields.guided_regex),
        ("guided_choice", "choice", fields.guided_choice),
        ("guided_grammar", "lark", fields.guided_grammar),
        ("regex", "regex", fields.regex),
        ("json_schema", "json", fields.json_schema),
        ("structured_outputs.json", "json", asked.json),
        ("structured_outputs.regex", "regex", asked.regex),
        ("structured_outputs.choice", "choice", asked.choice),
        ("structured_outputs.grammar", "lark", asked.grammar),
        ("structured_outputs.json_object", "json", {"type": "object"} if asked.json_object else None),
        ("response_format", *_of_format(fields.response_format)),
    ]
    return [(param, kind, value) for param, kind, value in given if value is not None]


def _of_format(format: Mapping[str, Any] | None) -> tuple[str, Any]:
    """The kind and the value of the grammar that `response_format` asks for; a value None is none."""
    kind = (format or {"type": "text"}).get("type")
    if format is None or kind == "text":
        return "json", None
    if kind == "json_object":
        return "json", {"type": "object"}
    if kind == "json_schema":
        named = format.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping | bool):
            raise invalid("response_format.json_schema.schema", "must be a JSON schema")
        return "json", schema
    names = {"regex": ("regex", "pattern"), "grammar": ("lark", "grammar")}
    if not isinstance(kind, str) or kind not in names:
        raise invalid("response_format.type", f"{kind!r:.40} is none of text, json_object, json_schema, regex, grammar")
    to, key = names[kind]
    if not isinstance(format.get(key), str):
        raise invalid(f"response_format.{key}", "must be a string")
    return to, format[key]


def _grammar(param: str, kind: str, value: Any) -> Grammar:
    if kind == "choice":
        kind, value = "regex", "|".join(map(re.escape, value))
    elif kind == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise invalid(param, "is no JSON") from None
        check_schema(param, value)
        value = json.dumps({} if value is True else value)
    elif kind == "regex" and (len(value) - len(value.rstrip("\\"))) % 2:
        raise invalid(param, "ends with a backslash that escapes nothing")  # llguidance leaves it out
    if not value or len(value.encode(errors="replace")) > LARGEST:
        raise invalid(param, f"must have 1 to {LARGEST} bytes")
    return Grammar(kind, value)


def check_schema(param: str, schema: Any) -> None:
    """Raises ApiError for a JSON schema that is too deep or too large."""
    if not isinstance(schema, dict | bool):
        raise invalid(param, "must be a JSON schema: an object or a boolean")
    level, properties = [schema], 0
    for _ in range(DEEPEST):
        properties += sum(len(v["properties"]) for v in level if isinstance(v, dict) and _has_properties(v))
        level = [w for v in level if isinstance(v, dict | list) for w in (v.values() if isinstance(v, dict) else v)]
        if properties > MOST_PROPERTIES:
            raise invalid(param, f"has more than {MOST_PROPERTIES} properties")
        if not level:
            return
    raise invalid(param, f"is nested more than {DEEPEST} levels deep")


def _has_properties(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("properties"), dict)


class GrammarMarks:
    """Writes the marks of an output format as parts of a grammar. `ids` are those of the marks that are special tokens
    for llguidance; the others are plain text."""

    def __init__(self, ids: Mapping[str, int]):
        self._ids = ids

    def one(self, mark: str) -> str:
        return f"<[{self._ids[mark]}]>" if mark in self._ids else json.dumps(mark)

    def text(self, text: str) -> str:
        """A text that may have marks in it."""
        parts = re.split(f"({'|'.join(map(re.escape, self._ids))})", text) if self._ids else [text]
        return " ".join(self.one(part) for part in parts if part)

    def until(self, rule: str, mark: str, before: str = "") -> str:
        """A rule for any text up to and including `before` and `mark`."""
        if mark in self._ids:
            return f"{rule}: {rule}_text {self.one(mark)}\n{rule}_text: {ANYTHING}"
        return f"{rule}[suffix={json.dumps(before + mark)}]: {ANYTHING}"

    def reasoned(self, then: str, opened: bool) -> str:
        """Rules for reasoning and the rule `then`. `opened` says that the prompt ends within reasoning; otherwise the
        model may leave it out."""
        thoughts = f"thoughts /\\n{{0,2}}/ {then}"
        start = thoughts if opened else f"(/\\n?/ {self.one(THINK)} thoughts /\\n{{0,2}}/)? {then}"
        return f"start: {start}\n{self.until('thoughts', THINK_END)}"

    def messages(self, then: str) -> str:
        """Rules for messages of harmony that are shown, and one more, of which the rule `then` is all after the mark of
        the channel."""
        text = f'("analysis" | "commentary") {self.one(MESSAGE)} said {self.one(END)} {self.one(START)} "assistant"'
        return f"start: ({self.one(CHANNEL)} {text})* {self.one(CHANNEL)} {then}\nsaid: {ANYTHING}"


def after_reasoning(grammar: Grammar, opened: bool, marks: GrammarMarks) -> Grammar:
    """`grammar` for the content of an answer that first reasons. A Lark grammar describes the whole answer."""
    if grammar.kind == "lark":
        return grammar
    return Grammar("lark", f"{marks.reasoned('answer', opened)}\nanswer: {_rule(grammar)}\n")


def in_final_message(grammar: Grammar, marks: GrammarMarks) -> Grammar:
    """`grammar` for the text of harmony's channel `final`, with other messages before it."""
    rules = f'{marks.messages("last")}\nlast: "final" {marks.one(MESSAGE)} answer'
    return Grammar("lark", f"{rules}\nanswer: {_rule(grammar)}\n")


def _rule(grammar: Grammar) -> str:
    """The right side of a rule for `grammar`."""
    if grammar.kind == "json":
        return f"%json {_compact(json.loads(grammar.text))}"
    if grammar.kind == "lark":
        return f"%lark {{\n{grammar.text}\n}}"
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", grammar.text).replace("\n", "\\n") + "/"


def calls_grammar(
    tools: Sequence[Mapping[str, Any]],
    format: OutputMarks | None,
    several: bool,
    opened: bool | None,
    marks: GrammarMarks,
) -> Grammar:
    """A grammar of calls of `tools`, in the `format` in which the model writes them. `opened` says whether the prompt
    ends within reasoning; None: the model does not reason."""
    format = format or JSON_CALLS
    rules: list[str] = []
    names = [f"call{number}" for number in range(len(tools))]
    for number, tool in enumerate(tools):
        function = tool["function"]
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        check_schema(f"tools[{number}].function.parameters", parameters)
        rules += _call_rules(names[number], function["name"], closed(parameters), format, marks)
    one = f"({' | '.join(names)})"
    block, end = marks.one(format.block), marks.one(format.block_end)
    repeat = f"{{0,{MOST_CALLS - 1}}}"
    if format.call_is_json:
        more = f" (/\\n?/ {one}){repeat}" if several else ""
        calls = f"{block} {one}{more} {end}"
    elif format.call:
        more = f' ("\\n" {one}){repeat}' if several else ""
        calls = f'{block} "\\n" {one}{more} "\\n" {end}'
    else:
        single = f"{block} {one} {end}" if format.block_is_call else f'{block} "\\n" {one} "\\n" {end}'
        calls = f"{single} (/\\n?/ {single}){repeat}" if several else single
    start = "start: calls" if opened is None else marks.reasoned("calls", opened)
    if format.tokens:  # a call ends the answer
        start, calls = marks.messages("calls"), one
    text = "\n".join([start, f"calls: {calls}", *rules]) + "\n"
    if len(text) > LARGEST:
        raise ApiError(400, f"tools: their schemas make a grammar of more than {LARGEST} characters", "tools")
    return Grammar("lark", text)


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
    if _has_properties(schema) and not joined:
        parts.setdefault("additionalProperties", False)
    return parts


def _call_rules(
    rule: str, name: str, parameters: Mapping[str, Any], format: OutputMarks, marks: GrammarMarks
) -> list[str]:
    """The rules of a call of the tool `name`, of which the first is called `rule`."""
    if format.tokens:
        opening = f'{json.dumps(f"commentary to=functions.{name} ")} {marks.one(CONSTRAIN)} "json" {marks.one(MESSAGE)}'
        return [f"{rule}: {opening} {rule}a", f"{rule}a: %json {_compact(parameters)}"]
    if format.call_is_json:
        opening = marks.text(format.call + format.before_name + name) + (" /:[0-9]{1,4}/" if format.numbered else "")
        before, after = format.before_arguments, format.after_arguments + format.call_end
        return [
            f"{rule}: {opening} {marks.text(before)} {rule}a {marks.text(after)}",
            f"{rule}a: %json {_compact(parameters)}",
        ]
    if not format.parameter:
        opening = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        return [f'{rule}: {opening} {rule}a "}}"', f"{rule}a: %json {_compact(parameters)}"]
    quote = '"' if format.call.endswith("name=") else ""
    bare = format.block_is_call  # its line breaks are layout between marks, and not in every version
    line = "/\\n?/" if bare else '"\\n"'
    required, properties = parameters.get("required"), parameters.get("properties")
    parts, rules = [], []
    for number, (key, schema) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
        value = f"{rule}p{number}"
        if bare:
            named = f"{marks.one(format.parameter)} {json.dumps(key)} {marks.one(format.key_end)}"
            part = f"{named} {line} {marks.one(format.value)} {value}"
        else:
            part = json.dumps(f"{format.parameter}{quote}{key}{quote}>\n") + f" {value}"
        if isinstance(schema, dict) and schema.get("type", "string") != "string":
            rules.append(f"{value}: %json {_compact(schema)}")
            part += f" {marks.one(format.parameter_end)}" if bare else f" {line} {marks.one(format.parameter_end)}"
        else:
            rules.append(marks.until(value, format.parameter_end, before="" if bare else "\n"))
        needed = isinstance(required, list) and key in required
        parts.append(f"{part} {line}" if needed else f"({part} {line})?")
    if bare:
        return [f"{rule}: {json.dumps(name)} {line} {' '.join(parts)}", *rules]
    opening = json.dumps(f"{format.call}{quote}{name}{quote}>\n")
    return [f"{rule}: {opening} {' '.join(parts)} {marks.one(format.call_end)}", *rules]


def _compact(schema: Any) -> str:
    return json.dumps({**schema, "x-guidance": COMPACT} if isinstance(schema, dict) else schema)

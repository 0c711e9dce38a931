"""Grammars that answers follow: those that a request asks for, and those of tool calls that it demands."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from umbra.executor.engine.schedule.request import Grammar
from umbra.serving.api.bare_values import bare_rules
from umbra.serving.api.errors import ApiError, invalid
from umbra.serving.api.fields import Fields, Structured
from umbra.serving.api.raw_values import ANYTHING, conjunctions, definitions, properties_of, value_of, without
from umbra.serving.api.schemas import check_schema, closed, held
from umbra.text.formats import CHANNEL, CONSTRAIN, END, JSON_CALLS, MESSAGE, START, THINK, THINK_END, OutputMarks

LARGEST = 1 << 16  # bytes of a schema, regular expression or grammar
MOST_CALLS = 8  # calls of one answer, if calls are demanded
COMPACT = {"whitespace_flexible": False}  # without it, an answer may be endless white space
CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
REGEX_IN_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/')  # or what looks like one
ANY_NAME = r"/[^<>\s\"]+/"  # of a parameter
NO_CALL = r'~/\s*\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"(.|\n)*/'  # does not begin as a call without a mark
MOST_VARIANTS = 8  # ways in which the parameters of one tool may stand together


def wanted_grammar(fields: Fields, note: Callable[[str], object] = print) -> Grammar | None:
    """The grammar that the request asks for in one of several ways. `note` is told of what its schema demands and a
    grammar cannot hold. Raises ApiError for several, a bad one, or a strict one that demands so much."""
    grammars = _asked(fields)
    if len(grammars) > 1:
        raise invalid(grammars[1][0], f"{grammars[0][0]} is given as well: give one of them")
    return _grammar(*grammars[0], _is_strict(fields.response_format), note) if grammars else None


def _is_strict(format: Mapping[str, Any] | None) -> bool:
    named = (format or {}).get("json_schema")
    return isinstance(named, Mapping) and named.get("strict") is True


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


def _grammar(param: str, kind: str, value: Any, strict: bool, note: Callable[[str], object]) -> Grammar:
    if kind == "choice":
        kind, value = "regex", "|".join(map(re.escape, value))
    elif kind == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise invalid(param, "is no JSON") from None
        check_schema(param, value)
        value, left_out = held(value)
        if strict and left_out:
            raise invalid(param, f"strict: {left_out[0]} cannot be enforced: leave one of them out")
        for what in left_out:
            note(f"{param}: {what} is not enforced: a grammar cannot hold it")
        value = json.dumps({} if value is True else value)
    elif kind == "regex" and (len(value) - len(value.rstrip("\\"))) % 2:
        raise invalid(param, "ends with a backslash that escapes nothing")  # llguidance leaves it out
    if kind == "lark":
        value = REGEX_IN_LARK.sub(lambda part: ascii_classes(part[0]) if part[0][0] == "/" else part[0], value)
    elif kind == "regex":
        value = ascii_classes(value)
    if not value or len(value.encode(errors="replace")) > LARGEST:
        raise invalid(param, f"must have 1 to {LARGEST} bytes")
    return Grammar(kind, value)


class GrammarMarks:
    """Writes the marks of an output format as parts of a grammar. `ids` are those of the marks that are special tokens
    for llguidance; the others are plain text."""

    def __init__(self, ids: Mapping[str, int]):
        self._ids = ids

    def is_token(self, mark: str) -> bool:
        return mark in self._ids

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

    def reasoned(self, then: str, opened: bool, format: OutputMarks | None) -> str:
        """Rules for reasoning and the rule `then`. `opened` says that the prompt ends within reasoning; otherwise the
        model may leave it out."""
        thoughts = f"thoughts /\\n{{0,2}}/ {then}"
        think, end = (format.think, format.think_end) if format else (THINK, THINK_END)
        start = thoughts if opened else f"(/\\n?/ {self.text(think)} thoughts /\\n{{0,2}}/)? {then}"
        return f"start: {start}\n{self.until('thoughts', end)}"

    def free(self, rule: str, format: OutputMarks) -> list[str]:
        """Rules for any text that begins no call, which the rule `calls` may follow, after the mark of a block."""
        marks = filter(None, (*format.blocks, format.call))
        text = f"({ANYTHING} & {without(marks)})"
        if format.bare:
            return [f"{rule}: TEXT | calls", f"TEXT: {text} & {NO_CALL}"]
        if not format.block:  # calls begin with a mark of their own
            return [f"{rule}: TEXT calls?", f"TEXT: {text}"]
        if format.block in self._ids:
            return [f"{rule}: TEXT ({self.one(format.block)} calls)?", f"TEXT: {text}"]
        return [f"{rule}: TEXT | OPENING calls", f"TEXT: {text}", f"OPENING: {text} {json.dumps(format.block)}"]

    def messages(self, then: str) -> str:
        """Rules for messages of harmony that are shown, and one more, of which the rule `then` is all after the mark of
        the channel."""
        text = f'("analysis" | "commentary") {self.one(MESSAGE)} said {self.one(END)} {self.one(START)} "assistant"'
        return f"start: ({self.one(CHANNEL)} {text})* {self.one(CHANNEL)} {then}\nsaid: {ANYTHING}"


def after_reasoning(grammar: Grammar, opened: bool, marks: GrammarMarks, format: OutputMarks | None) -> Grammar:
    """`grammar` for the content of an answer that first reasons. A Lark grammar describes the whole answer."""
    if grammar.kind == "lark":
        return grammar
    return Grammar("lark", f"{marks.reasoned('answer', opened, format)}\nanswer: {_rule(grammar)}\n")


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


def ascii_classes(regex: str) -> str:
    r"""`regex` with \d, \w and their opposites written as the ASCII characters that they mean everywhere here."""
    return re.sub(r"\\(.)", lambda escape: CLASSES.get(escape[1], escape[0]), regex, flags=re.DOTALL)


def calls_grammar(
    tools: Sequence[Mapping[str, Any]],
    format: OutputMarks | None,
    several: bool,
    opened: bool | None,
    marks: GrammarMarks,
    demanded: bool = True,
    note: Callable[[str], object] = print,
) -> Grammar:
    """A grammar of calls of `tools`, in the `format` in which the model writes them. `opened` says whether the prompt
    ends within reasoning; None: the model does not reason. Without `demanded`, the answer may be text instead, or text
    before calls, and only the tools that are strict have the arguments of their schemas. `note` is told of what a
    schema demands and a grammar cannot hold. Raises ApiError if a strict tool demands it."""
    format = format or JSON_CALLS
    rules: list[str] = []
    names = [f"call{number}" for number in range(len(tools))]
    for number, tool in enumerate(tools):
        schema = _enforced(tool["function"], f"tools[{number}].function", demanded, note)
        rules += _call_rules(names[number], tool["function"]["name"], schema, format, marks)
    one = f"({' | '.join(names)})"
    block, end = marks.one(format.block), marks.one(format.block_end)
    line = "/\\n?/" if format.value else '"\\n"'  # line breaks between marks with values are layout
    repeat = f"{{0,{MOST_CALLS - 1}}}"
    if format.call_is_json:
        more = f" (/\\n?/ {one}){repeat}" if several else ""
        calls = f"{one}{more} {end}" if format.block else f"{one}{more}"
    elif format.to_the_end:
        more = f' (", " {one}){repeat}' if several and format.listed else ""
        calls = f'" "? "[" {one}{more} "]"' if format.listed else one
    elif format.call:
        more = f" ({line} {one}){repeat}" if several else ""
        calls = f"{line} {one}{more} {line} {end}"
    else:
        single = f"{one} {end}" if format.block_is_call else f'"\\n" {one} "\\n" {end}'
        calls = f"{single} (/\\n?/ {block} {single}){repeat}" if several else single
    if format.tokens:  # a call ends the answer
        text = [marks.messages("answer"), f"calls: {one}"]
        text.append("answer: calls" if demanded else f'answer: calls | "final" {marks.one(MESSAGE)} said')
    else:
        text = ["start: answer" if opened is None else marks.reasoned("answer", opened, format), f"calls: {calls}"]
        whole = f"answer: {block} calls" if format.block and not format.bare else "answer: calls"
        text += [whole] if demanded else marks.free("answer", format)
    grammar = "\n".join([*text, *rules]) + "\n"
    if len(grammar) > LARGEST:
        raise ApiError(400, f"tools: their schemas make a grammar of more than {LARGEST} characters", "tools")
    return Grammar("lark", grammar)


def _enforced(function: Mapping[str, Any], param: str, demanded: bool, note: Callable[[str], object]) -> Any:
    """The schema that a grammar holds the arguments of a tool to; None: they are free."""
    schema, strict = function.get("parameters") or {"type": "object", "properties": {}}, function.get("strict") is True
    check_schema(f"{param}.parameters", schema)
    if not (strict or demanded):
        return None
    schema, left_out = held(schema)
    if strict and left_out:
        raise invalid(f"{param}.strict", f"{function['name']}: {left_out[0]} cannot be enforced: leave one of them out")
    for what in left_out:
        note(f"tool {function['name']}: {what} is not enforced: a grammar cannot hold it")
    return closed(schema)


def _call_rules(
    rule: str, name: str, parameters: Mapping[str, Any] | None, format: OutputMarks, marks: GrammarMarks
) -> list[str]:
    """The rules of a call of the tool `name`, of which the first is called `rule`. `parameters` None: any arguments."""
    arguments = f"{rule}a: %json {_compact({'type': 'object'} if parameters is None else parameters)}"
    if format.tokens:
        opening = f'{json.dumps(f"commentary to=functions.{name} ")} {marks.one(CONSTRAIN)} "json" {marks.one(MESSAGE)}'
        return [f"{rule}: {opening} {rule}a", arguments]
    if format.quote:
        opening = marks.text(format.call + format.before_name + name)
        rules = bare_rules(f"{rule}a", parameters, marks.one(format.quote), format.quote)
        return [f"{rule}: {opening} {rule}a {marks.one(format.call_end)}", *rules]
    if format.call_is_json:
        opening = marks.text(format.call + format.before_name + name) + (" /:[0-9]{1,4}/" if format.numbered else "")
        before, after = format.before_arguments, format.after_arguments + format.call_end
        return [f"{rule}: {opening} {marks.text(before)} {rule}a {marks.text(after)}", arguments]
    if not format.parameter:
        opening = json.dumps(f'{{"name": {json.dumps(name)}, {json.dumps(format.arguments)}: ')
        return [f'{rule}: {opening} {rule}a "}}"', arguments]
    quote = '"' if format.call.endswith("name=") else ""
    bare = bool(format.value)  # its line breaks are layout between marks, and not in every version
    line = "/\\n?/" if bare else '"\\n"'

    def parameter(name: str, value: str) -> str:
        """A parameter whose name and value are these parts of a grammar."""
        if bare:
            named = f"{marks.one(format.parameter)} {name} {marks.one(format.key_end)}"
            return f"{named} {line} {marks.one(format.value)} {value} {line}"
        return f"{json.dumps(format.parameter + quote)} {name} {json.dumps(quote + '>' + chr(10))} {value} {line}"

    if parameters is None:
        rules = _value_rules(f"{rule}v", {}, {}, format, marks)
        one = f"({parameter(ANY_NAME, f'{rule}v')})*"
    else:
        rules, variants = [], []
        for number, (properties, required) in enumerate(_variants(parameters)):
            parts = []
            for count, (key, schema) in enumerate(properties.items()):
                value = f"{rule}v{number}p{count}"
                rules += _value_rules(value, schema, parameters, format, marks)
                part = parameter(json.dumps(key), value)
                parts.append(part if key in required else f"({part})?")
            variants.append(" ".join(parts) or '""')
        one = f"({' | '.join(variants)})" if len(variants) > 1 else variants[0]
    if format.block_is_call:
        return [f"{rule}: {json.dumps(name)} {line} {one}", *rules]
    if bare:
        opening = marks.text(f"{format.call}{name}{format.name_end}")
        return [f"{rule}: {opening} {line} {one} {marks.one(format.call_end)}", *rules]
    opening = json.dumps(f"{format.call}{quote}{name}{quote}>\n")
    return [f"{rule}: {opening} {one} {marks.one(format.call_end)}", *rules]


def _variants(parameters: Mapping[str, Any]) -> list[tuple[dict[str, Any], set[str]]]:
    """The parameters of a tool that stand together, and those that must, in each way that its schema allows."""
    return [properties_of(parts) for parts in conjunctions(parameters, parameters)[:MOST_VARIANTS]]


def _value_rules(
    rule: str, schema: Any, root: Mapping[str, Any], format: OutputMarks, marks: GrammarMarks
) -> list[str]:
    """The rules of a parameter's value and the mark after it."""
    end, before = format.parameter_end, "" if format.value else "\n"
    within = (end, format.value, format.parameter, format.call, format.call_end, format.block, format.block_end)
    value = value_of(schema, root, [mark for mark in within if mark])
    if value and value.free:
        return [marks.until(rule, end, before)]
    structures = value.structures if value else [_with(schema, root)]
    closing = f"{json.dumps(before)} {marks.one(end)}" if before else marks.one(end)
    ways = [f"{rule}j{number} {closing}" for number, _ in enumerate(structures)]
    rules = [f"{rule}j{number}: %json {_compact(structure)}" for number, structure in enumerate(structures)]
    for number, text in enumerate(value.terminals if value else ()):
        terminal = f"{rule.upper()}T{number}"
        ways.append(f"{terminal} {marks.one(end)}" if marks.is_token(end) else terminal)
        rest = before if marks.is_token(end) else before + end
        rules.append(f"{terminal}: {text} {json.dumps(rest) if rest else ''}")
    return [f"{rule}: {' | '.join(ways)}", *rules]


def _with(schema: Any, root: Mapping[str, Any]) -> Any:
    """`schema` with what references in it name."""
    return {**schema, **definitions(root)} if isinstance(schema, dict) else schema


def _compact(schema: Any) -> str:
    return json.dumps({**schema, "x-guidance": COMPACT} if isinstance(schema, dict) else schema)

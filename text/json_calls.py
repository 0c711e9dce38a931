"""Reads calls in JSON: {"name": ..., "arguments": {...}}; or a name, a mark, and an object, the arguments."""

import json
import re
from functools import lru_cache
from typing import NamedTuple

from umbra.text.formats import JSON_CALLS, OutputMarks
from umbra.text.tool_arguments import in_json, read_json_text, to_json

LONGEST_NAME = 256  # characters of a tool's or a parameter's name
BEGINS = '{"name":"', '{"type":"function","name":"'  # a call in JSON, without white space
LONGEST_BEGIN = 128  # characters of that, with it
SEPARATORS = re.compile(r"[\s,;\[\]]*")  # between calls that follow one another, or are in a list
CUT = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"(?:.*?"(?:arguments|parameters)"\s*:\s*)?(.*)',
    re.DOTALL,
)


class Call(NamedTuple):
    name: str
    arguments: str  # an object, or as much of it as there is
    id: str = ""  # as the model has written it


def read_call(text: str, format: OutputMarks) -> Call | None:
    """The call that is `text`; None if it is none. Arguments may be absent, or an object written as a string."""
    if format.call_is_json:
        named = _named(text, format)
        good = named and isinstance(read_json_text(named.arguments or "{}"), dict)
        return named._replace(arguments=named.arguments or "{}") if named and good else None
    call = read_json_text(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))  # which small models write instead
    if isinstance(arguments, str):
        arguments = read_json_text(arguments)
    return Call(call["name"], to_json(arguments)) if isinstance(arguments, dict) else None


def read_calls(text: str) -> tuple[list[Call], str]:
    """Returns the calls in JSON that `text` begins with, and the text behind them and what separates them."""
    calls, decoder, at = list[Call](), json.JSONDecoder(), 0
    while match := SEPARATORS.match(text, at):
        at = match.end()
        try:
            end = decoder.raw_decode(text, at)[1]
        except (ValueError, RecursionError):
            break
        call = read_call(text[at:end], JSON_CALLS)
        if call is None:
            break
        calls.append(call)
        at = end
    return calls, text[at:]


def may_be_call(text: str) -> bool:
    """Returns whether `text`, which begins with a brace, may be the beginning of a call in JSON."""
    return _begins("".join(text[:LONGEST_BEGIN].split()))


def _begins(text: str) -> bool:
    return any(begin.startswith(text) or text.startswith(begin) for begin in BEGINS)


def cut_call(text: str, format: OutputMarks) -> Call | None:
    """The call that begins with `text`, which was cut off; without a name if that is not whole. None: it is no call."""
    if whole := read_call(text, format):
        return whole
    if format.call_is_json:
        call, begun = _named(text, format), len(text) <= 2 * LONGEST_NAME and "{" not in text
    else:
        match, begin = CUT.fullmatch(text), "".join(text.split())
        call = Call(match[1], match[2]) if match else None
        begun = _begins(begin)
    if call:
        call = call._replace(arguments=_first_object(call.arguments))
    return call or (Call("", "") if begun else None)


def _first_object(text: str) -> str:
    """The object that `text` begins with, as far as it goes; empty if it begins with none."""
    if not text.startswith("{"):
        return ""
    try:
        return text[: json.JSONDecoder().raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text


def _named(text: str, format: OutputMarks) -> Call | None:
    match = _head(format).match(text.strip())
    if not match:
        return None
    arguments = match[4].removesuffix(format.after_arguments.strip()).rstrip()
    arguments = in_json(arguments, format.quote) if format.quote else arguments
    return Call(match[2], arguments, match[1] if match[3] else "")


@lru_cache
def _head(format: OutputMarks) -> re.Pattern[str]:
    """The id, the name, the number and what follows the mark of the arguments."""
    before, after = re.escape(format.before_name), re.escape(format.before_arguments.strip())
    number = r"(:\d{1,9})?" if format.numbered else "()"
    id = rf"(?:{re.escape(format.id_mark)}\s*[\w-]{{0,64}}\s*)?" if format.id_mark else ""
    return re.compile(rf"((?:{before}\s*)?([\w.-]{{1,{LONGEST_NAME}}}){number})\s*{id}{after}\s*(.*)", re.DOTALL)

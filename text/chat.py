"""A conversation in OpenAI's shape, checked, and as chat templates want it."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from umbra.base.errors import UserError
from umbra.text.tool_arguments import read_json_text, repaired, to_json

Message = Mapping[str, Any]  # role, content; of an assistant also reasoning_content and tool_calls
SHORT_ID = re.compile("[A-Za-z0-9]{9}")
CALL_ID = re.compile(r"(functions\.)?[\w.-]+:[0-9]+")  # with its number in the conversation


class CallShape(NamedTuple):
    """The form in which a chat template takes a message with tool calls."""

    text: bool = False  # arguments are JSON text, no mappings
    none: bool = False  # content that is empty is none
    apart: bool = False  # other content stands in a message before


class SystemShape(NamedTuple):
    """Says which system messages a chat template renders beside a first one."""

    several: bool = True  # others that follow it at once
    late: bool = True  # others that come after the user's or the model's


@dataclass(frozen=True)
class Chat:
    """A conversation whose next turn is the model's; with `continued`, whose last message the model goes on with."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()  # functions that the model may call, in OpenAI's shape
    settings: Mapping[str, Any] = field(default_factory=dict)  # variables of the template, such as enable_thinking
    continued: bool = False

    @property
    def begun(self) -> str:
        """The text of the answer that is begun; empty: none is."""
        return str(self.messages[-1]["content"]) if self.continued else ""

    def __post_init__(self) -> None:
        for i, message in enumerate(self.messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise UserError(f"messages[{i}]: {message!r:.60} must be a mapping with a role and a content")
        for i, tool in enumerate(self.tools):
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise UserError(f'tools[{i}]: {tool!r:.60} must be {{"type": "function", "function": {{"name": ...}}}}')
        last = self.messages[-1] if self.messages else {}
        if self.continued and (last.get("role") != "assistant" or last.get("tool_calls") or not last.get("content")):
            raise UserError(
                f"messages[{len(self.messages) - 1}]: only a text of the assistant can be continued: end with one"
            )

    def for_template(self, shape: CallShape) -> list[dict[str, Any]]:
        """The messages as templates read them: content is a text but for `shape`, which says what calls are like."""
        templated = [_for_template(message, f"messages[{i}]", shape) for i, message in enumerate(self.messages)]
        return [part for message in templated for part in _parted(message, shape)]


def _for_template(message: Message, where: str, shape: CallShape) -> dict[str, Any]:
    changed = {**message, "content": "" if message.get("content") is None else message["content"]}
    if message["role"] == "developer":  # OpenAI's later name
        changed["role"] = "system"
    calls = message.get("tool_calls")
    if not calls:  # an empty list makes some templates open a block of calls
        changed.pop("tool_calls", None)
        return changed
    if not isinstance(calls, Sequence) or not all(isinstance(c, Mapping) for c in calls):
        raise UserError(f"{where}.tool_calls: {calls!r:.60} must be a list of mappings")
    changed["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]", shape) for i, call in enumerate(calls)]
    return changed


def _parted(message: dict[str, Any], shape: CallShape) -> list[dict[str, Any]]:
    calls, empty = message.get("tool_calls"), None if shape.none else ""
    if calls and not message["content"]:
        return [{**message, "content": empty}]
    if calls and shape.apart:
        said = {key: value for key, value in message.items() if key != "tool_calls"}
        return [said, {"role": message["role"], "content": empty, "tool_calls": calls}]
    return [message]


def _call(call: Mapping[str, Any], where: str, shape: CallShape) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: {call!r:.60} must have a function with a name")
    given = function.get("arguments")
    arguments = read_json_text(given) if isinstance(given, str) else given or {}
    whole = isinstance(arguments, Mapping)
    if isinstance(given, str) and not whole:  # as a model has left them
        arguments = repaired(given)
    elif not whole:
        raise UserError(f"{where}.function.arguments: {given!r:.60} must be a JSON object")
    if shape.text:
        arguments = given if whole and isinstance(given, str) else to_json(arguments)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def with_systems(messages: Sequence[dict[str, Any]], shape: SystemShape) -> list[dict[str, Any]]:
    """Returns `messages` without system messages that a template with this `shape` drops or refuses: those at the
    beginning are one, and a later one is the user's, in one message with what the user says before or after it."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    kept = list(messages[:first])
    if not shape.several and first > 1:
        kept = [{**kept[0], "content": "\n\n".join(str(message["content"]) for message in kept)}]
    joins = False  # the last message was a system message, and one of the user is joined to it
    for message in messages[first:]:
        moved = message["role"] == "system" and not shape.late
        user = {**message, "role": "user"} if moved else message
        if user["role"] == "user" and kept and kept[-1]["role"] == "user" and (moved or joins):
            kept[-1] = {**kept[-1], "content": f"{kept[-1]['content']}\n\n{user['content']}"}
        else:
            kept.append(user)
        joins = moved
    return kept


def numbered(messages: Sequence[dict[str, Any]], short: bool) -> list[dict[str, Any]]:
    """Returns `messages` in which calls have ids with numbers that count the calls of the conversation; and results
    those of their calls, or of the next call that has none. `short` ids are nine letters and digits."""
    renumbered: list[dict[str, Any]] = []
    ids: dict[str, str] = {}
    count, waiting = 0, list[str]()
    for message in messages:
        if given := message.get("tool_calls"):
            calls = [{**call, "id": _numbered_id(call, number, short)} for number, call in enumerate(given, count)]
            waiting = [call["id"] for call in calls]
            ids |= {str(old["id"]): new for old, new in zip(given, waiting, strict=True) if old.get("id")}
            count += len(calls)
            renumbered.append({**message, "tool_calls": calls})
        elif message["role"] == "tool" and (id := ids.get(str(message.get("tool_call_id")), *waiting[:1])):
            waiting = [other for other in waiting if other != id]
            renumbered.append({**message, "tool_call_id": id})
        else:
            renumbered.append(message)
    return renumbered


def _numbered_id(call: dict[str, Any], number: int, short: bool) -> str:
    given = str(call.get("id"))
    if short:
        return given if SHORT_ID.fullmatch(given) else f"{number:09}"
    return given if CALL_ID.fullmatch(given) else f"functions.{call['function']['name']}:{number}"


def one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns `messages` in which none has several calls: each of these has a message of its own, with its result."""
    plain: list[dict[str, Any]] = []
    turn: list[dict[str, Any]] = []  # a message with calls, and the results after it
    for message in messages:
        if turn and message["role"] == "tool":
            turn.append(message)
            continue
        plain += _single_calls(turn)
        turn = [message] if message.get("tool_calls") else []
        plain += [] if turn else [message]
    return plain + _single_calls(turn)


def for_harmony(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the variables `messages` and `tools` of a template for harmony. It renders one call of a message,
    refuses reasoning and content together before a call, and needs descriptions of tools."""
    for i, message in enumerate(messages):
        for name in ("content", "reasoning_content"):
            if not isinstance(message.get(name, ""), str):
                raise UserError(f"messages[{i}].{name}: {message[name]!r:.60} must be a text for this chat template")
    functions = [{**tool["function"], "description": tool["function"].get("description") or ""} for tool in tools]
    return {
        "messages": one_call_each(messages),
        "tools": [{"type": "function", "function": function} for function in functions] or None,
    }


def _single_calls(turn: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A message for each call of the first one, with its result after it; what was said before belongs to the reasoning
    of the first. Results without the id of a call are in the calls' order."""
    if not turn:
        return []
    message, calls = turn[0], turn[0]["tool_calls"]
    results: dict[str, list[dict[str, Any]]] = {str(call["id"]): [] for call in calls if "id" in call}
    others: deque[dict[str, Any]] = deque()
    for result in turn[1:]:
        results.get(str(result.get("tool_call_id")), others).append(result)
    said = "\n\n".join(filter(None, (message.get("reasoning_content"), message["content"])))
    separate = []
    for number, call in enumerate(calls):
        thoughts = {"reasoning_content": said, "thinking": said} if said and not number else {}
        separate.append({"role": "assistant", "content": "", **thoughts, "tool_calls": [call]})
        own = results.pop(str(call.get("id")), [])
        separate += own or ([others.popleft()] if others else [])
    return [*separate, *others]

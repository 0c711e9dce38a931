"""A conversation in OpenAI's shape, checked, and as chat templates want it."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from text.tool_arguments import read_json_text
from umbra.errors import UserError

Message = Mapping[str, Any]  # role, content; of an assistant also reasoning_content and tool_calls


@dataclass(frozen=True)
class Chat:
    """A conversation whose next turn is the model's."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()  # functions that the model may call, in OpenAI's shape
    settings: Mapping[str, Any] = field(default_factory=dict)  # variables of the template, such as enable_thinking

    def __post_init__(self) -> None:
        for i, message in enumerate(self.messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise UserError(f"messages[{i}]: {message!r:.60} must be a mapping with a role and a content")
        for i, tool in enumerate(self.tools):
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise UserError(f'tools[{i}]: {tool!r:.60} must be {{"type": "function", "function": {{"name": ...}}}}')

    def for_template(self) -> list[dict[str, Any]]:
        """The messages as templates read them: content is never None, arguments of tool calls are mappings."""
        return [_for_template(message, f"messages[{i}]") for i, message in enumerate(self.messages)]


def _for_template(message: Message, where: str) -> dict[str, Any]:
    changed = {**message, "content": "" if message.get("content") is None else message["content"]}
    calls = message.get("tool_calls")
    if not calls:  # an empty list makes some templates open a block of calls
        changed.pop("tool_calls", None)
        return changed
    if not isinstance(calls, Sequence) or not all(isinstance(c, Mapping) for c in calls):
        raise UserError(f"{where}.tool_calls: {calls!r:.60} must be a list of mappings")
    changed["tool_calls"] = [_with_mapping(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return changed


def _with_mapping(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: {call!r:.60} must have a function with a name")
    given = function.get("arguments")
    arguments = read_json_text(given or "{}") if given is None or isinstance(given, str) else given
    if not isinstance(arguments, Mapping):
        raise UserError(f"{where}.function.arguments: {given!r:.60} must be a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def for_harmony(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The variables `messages` and `tools` of a template for gpt-oss. It renders one call of a message and no system
    messages but the first, refuses reasoning and content together before a call, and needs descriptions of tools."""
    for i, message in enumerate(messages):
        for name in ("content", "reasoning_content"):
            if not isinstance(message.get(name, ""), str):
                raise UserError(f"messages[{i}].{name}: {message[name]!r:.60} must be a text for this chat template")
    first = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    made: list[dict[str, Any]] = []
    if first:
        made.append({"role": "system", "content": "\n\n".join(message["content"] for message in messages[:first])})
    turn: list[dict[str, Any]] = []  # a message with calls, and the results after it
    for message in messages[first:]:
        if turn and message["role"] == "tool":
            turn.append(message)
            continue
        made += _single_calls(turn)
        turn = [message] if message.get("tool_calls") else []
        made += [] if turn else [message]
    made += _single_calls(turn)
    functions = [{**tool["function"], "description": tool["function"].get("description") or ""} for tool in tools]
    return {"messages": made, "tools": [{"type": "function", "function": function} for function in functions] or None}


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
    made = []
    for number, call in enumerate(calls):
        thoughts = {"reasoning_content": said, "thinking": said} if said and not number else {}
        made.append({"role": "assistant", "content": "", **thoughts, "tool_calls": [call]})
        own = results.pop(str(call.get("id")), [])
        made += own or ([others.popleft()] if others else [])
    return [*made, *others]

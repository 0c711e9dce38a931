"""A conversation in OpenAI's shape, checked, and as chat templates want it."""

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

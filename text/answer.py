"""The parts of a model's answer (reasoning, content, calls), the whole of it, and the interface of their readers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Part(NamedTuple):
    """A certain part of an answer. A tool call is one `call`, its name; then `arguments`, pieces of one JSON object,
    of which the first may come long after the name; then `end`, without text."""

    kind: Literal["reasoning", "content", "call", "arguments", "end"]
    text: str = ""
    id: str = ""  # of a call, if the model has given it one


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object; in harmony, whatever the model wrote
    id: str = ""

    def message(self) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return {"id": self.id, **call} if self.id else call


@dataclass(frozen=True)
class Answer:
    """All that one output said."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Part]) -> "Answer":
        said: dict[str, list[str]] = {"reasoning": [], "content": []}
        calls: list[tuple[Part, list[str]]] = []
        for part in parts:
            if part.kind == "call":
                calls.append((part, []))
            elif part.kind == "arguments":
                calls[-1][1].append(part.text)
            elif part.kind != "end":
                said[part.kind].append(part.text)
        tool_calls = tuple(ToolCall(call.text, "".join(pieces), call.id) for call, pieces in calls)
        return cls("".join(said["reasoning"]), "".join(said["content"]), tool_calls)

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation that goes on with it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message() for call in self.tool_calls]
        return message


class Reader(ABC):
    """Reads one output. `push` its text piece by piece, then `finish`; or `whole` of it at once."""

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """Returns what is certain after `text`, beyond what was given before."""

    @abstractmethod
    def finish(self, cut: bool = False) -> list[Part]:
        """Returns what is left when the output has ended; `cut`: by the limit of tokens."""

    def whole(self, *texts: str, cut: bool = False) -> Answer:
        return Answer.of([*(part for text in texts for part in self.push(text)), *self.finish(cut)])

"""What models say: certain parts of an answer as it comes, and the whole of it; and what reads one."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Part(NamedTuple):
    """A certain part of an answer. A tool call is one `call`, its name; then `arguments`, pieces of one JSON object,
    of which the first may come long after the name; then `end`, without text."""

    kind: Literal["reasoning", "content", "call", "arguments", "end"]
    text: str = ""


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object; in harmony, whatever the model wrote


@dataclass(frozen=True)
class Answer:
    """All that one output said."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Part]) -> "Answer":
        said: dict[str, list[str]] = {"reasoning": [], "content": []}
        calls: list[tuple[str, list[str]]] = []
        for kind, text in parts:
            if kind == "call":
                calls.append((text, []))
            elif kind == "arguments":
                calls[-1][1].append(text)
            elif kind != "end":
                said[kind].append(text)
        tool_calls = tuple(ToolCall(name, "".join(pieces)) for name, pieces in calls)
        return cls("".join(said["reasoning"]), "".join(said["content"]), tool_calls)

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation that goes on with it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in self.tool_calls]
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
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

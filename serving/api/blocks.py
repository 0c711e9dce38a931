"""An answer as a row of blocks, one after the other: reasoning, text, and calls of tools; and what happens to them."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from umbra.serving.api.openai_chat import ChatDelta, ReadChat
from umbra.serving.api.streams import Token


@dataclass
class ContentBlock:
    """`kind` is reasoning, content, or call; a call has the `name` of a tool, an `id`, and its arguments as text."""

    kind: str
    number: int  # in its answer
    name: str = ""
    id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Change(NamedTuple):
    """A block is opened, gets more text, or is closed; after all of them comes the end, without a block."""

    what: Literal["open", "text", "close", "end"]
    block: ContentBlock
    text: str = ""  # that is new; of the end, and of a block that it closes: stop, length or tool_calls
    tokens: Sequence[Token] = ()
    stop: str = ""  # of the end: the stop string that ended the answer


@dataclass
class ContentBlocks:
    """The blocks of a chat with one answer."""

    chat: ReadChat
    opened: list[ContentBlock] = field(default_factory=list)
    reasoning_tokens: int = 0

    async def changes(self) -> AsyncGenerator[Change, None]:
        """Raises ApiError if the request must wait too long, or if it fails."""
        current: ContentBlock | None = None
        async with aclosing(self.chat.deltas()) as deltas:
            async for delta in deltas:
                if delta.kind == "reasoning":
                    self.reasoning_tokens = self.chat.usage.completion
                if delta.kind == "end":  # a call is closed by what follows, which says whether it was cut off
                    continue
                if current and not _goes_on(current, delta):
                    yield Change("close", current, delta.text if delta.kind == "finish" else "")
                    current = None
                if delta.kind == "finish":
                    yield Change("end", ContentBlock("", len(self.opened)), delta.text, delta.tokens, delta.stop)
                    return
                if not current:
                    kind = "call" if delta.kind in ("call", "arguments") else delta.kind
                    name = delta.text if kind == "call" else ""
                    current = ContentBlock(kind, len(self.opened), name, delta.call_id)
                    self.opened.append(current)
                    yield Change("open", current)
                if delta.kind != "call":
                    current.pieces.append(delta.text)
                    yield Change("text", current, delta.text, delta.tokens)


def _goes_on(block: ContentBlock, delta: ChatDelta) -> bool:
    return delta.kind == ("arguments" if block.kind == "call" else block.kind)

"""A record of each request: it makes a line of the log when the request has ended, and a header of its answer about
what it asked for in vain."""

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from umbra.base.errors import one_line

MOST_NOTES, LONGEST_NOTE = 8, 400  # of one answer, and characters of each
LONGEST_REASON = 300


@dataclass
class Usage:
    """Tokens of one request so far."""

    prompt: int = 0
    cached_tokens: int = 0  # of the prompts, in the prefix cache
    completion: int = 0
    drafted: int = 0  # tokens that were guessed
    accepted: int = 0  # those of them that were right

    def body(self) -> dict[str, object]:
        guesses = {
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": self.drafted - self.accepted,
        }
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        } | ({"completion_tokens_details": guesses} if self.drafted else {})


@dataclass
class HttpRecord:
    """One HTTP request. `clock` has seconds."""

    asked: str  # its method and path
    clock: Callable[[], float] = time.monotonic
    usage: Usage | None = None  # when a sequence of it has been taken
    first: float = 0.0  # when its first token came; 0: none has
    last: float = 0.0
    reasons: list[str] = field(default_factory=list)  # why its sequences have ended
    status: int = 0
    refused: str = ""  # the error that it was answered with
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arrived = self.clock()

    def token(self) -> None:
        """To be called when tokens of a sequence have come."""
        self.last = self.clock()
        self.first = self.first or self.last

    def note(self, text: str) -> None:
        """Adds to what the answer's header says that the request does not get."""
        if text not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(text)

    def warning(self) -> str:
        """The value of the answer's header Warning; empty: there is nothing to say."""
        texts = [one_line(note)[:LONGEST_NOTE].encode("ascii", "replace").decode() for note in self.notes]
        return ", ".join('299 umbra "' + text.replace("\\", "/").replace('"', "'") + '"' for text in texts)

    def line(self, model: str) -> str:
        """The request in one line, without any of its text."""
        if self.usage is None:
            why = f" {self.refused[:LONGEST_REASON]}" if self.refused else ""
            return one_line(f"{self.asked[:100]}: {self.status or 'no answer'}{why}")
        usage, span = self.usage, self.last - self.first
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        parts = [model, f"{usage.prompt} prompt tokens{cached}", f"{usage.completion} generated"]
        if self.first:
            parts.append(f"first after {self.first - self.arrived:.2f} s")
        if span > 0:
            parts.append(f"{(usage.completion - 1) / span:.1f}/s")
        return one_line(f"{', '.join([*parts, *dict.fromkeys(self.reasons)])}")


CURRENT: ContextVar[HttpRecord | None] = ContextVar("request", default=None)

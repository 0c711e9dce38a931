"""Seconds of each step: everything from packing the batch to knowing its tokens."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from umbra.executor.engine.schedule.sequence import Sequence


@dataclass
class Timings:
    """A step in which some sequences prefill and others decode counts as both."""

    first_token: list[float] = field(default_factory=list)  # one entry for each sequence, counted from its admission
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    per_token: list[float] = field(default_factory=list)  # of each decode step, for each token that a sequence got
    pure_decode_steps: list[float] = field(default_factory=list)  # decode steps that had no prompt tokens
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of the drafted ones

    def add(self, prompt_tokens: int, decoding: int, decode_tokens: int, drafted: int, seconds: float) -> None:
        """A step in which `decoding` sequences got `decode_tokens` tokens, and in which `drafted` tokens were tried."""
        if prompt_tokens:
            self.prompt_tokens += prompt_tokens
            self.prefill_seconds += seconds
        if decoding:
            self.decode_tokens += decode_tokens
            self.decode_seconds += seconds
            self.per_token.append(seconds * decoding / max(decode_tokens, 1))
            if not prompt_tokens:
                self.pure_decode_steps.append(seconds)
        if drafted:
            self.drafted_tokens += drafted
            self.accepted_tokens += decode_tokens - decoding


class FirstTokens:
    """The sequences that have been admitted and have no token yet."""

    def __init__(self) -> None:
        self._admitted: dict[int, float] = {}  # id -> time of admission in seconds

    def await_those_of(self, prompts: Iterable[Sequence], now: float) -> None:
        """Records that `prompts` are in a step, those of which nothing is computed for the first time."""
        self._admitted |= {s.id: now for s in prompts if not s.num_computed}

    def forget(self, id: int) -> None:
        self._admitted.pop(id, None)

    def seconds_of(self, sequences: Iterable[Sequence], now: float) -> list[float]:
        """Returns the seconds since their admission of those of `sequences` whose first token this is."""
        if not self._admitted:
            return []
        return [now - self._admitted.pop(s.id) for s in sequences if s.id in self._admitted]


@dataclass
class PrefillRate:
    """The recent rate at which prompts are computed, from steps with at least `least` prompt tokens."""

    least: int
    value: float = 0.0  # prompt tokens a second; 0: no such step yet

    def learn(self, tokens: int, seconds: float) -> None:
        if tokens >= self.least:
            rate = tokens / seconds
            self.value = 0.8 * (self.value or rate) + 0.2 * rate

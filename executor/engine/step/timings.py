"""Seconds of each step: everything from packing the batch to knowing its tokens."""

from dataclasses import dataclass, field


@dataclass
class Timings:
    """A step in which some sequences prefill and others decode counts as both."""

    first_token: list[float] = field(default_factory=list)  # one entry for each sequence, counted from its admission
    prefill_tokens: int = 0
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
            self.prefill_tokens += prompt_tokens
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


@dataclass
class PrefillRate:
    """The recent rate at which prompts are computed, from steps with at least `least` prompt tokens."""

    least: int
    value: float = 0.0  # prompt tokens a second; 0: no such step yet

    def learn(self, tokens: int, seconds: float) -> None:
        if tokens >= self.least:
            rate = tokens / seconds
            self.value = 0.8 * (self.value or rate) + 0.2 * rate

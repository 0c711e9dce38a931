"""Seconds of each step: everything from packing the batch to knowing its tokens."""

from dataclasses import dataclass, field


@dataclass
class Timings:
    """A step in which some sequences prefill and others decode counts as both."""

    first_token: list[float] = field(default_factory=list)  # one entry for each sequence, counted from its admission
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: list[float] = field(default_factory=list)
    pure_decode_steps: list[float] = field(default_factory=list)  # the `decode_steps` that had no prompt tokens

    def add(self, prompt_tokens: int, decode_tokens: int, seconds: float) -> None:
        if prompt_tokens:
            self.prefill_tokens += prompt_tokens
            self.prefill_seconds += seconds
        if decode_tokens:
            self.decode_tokens += decode_tokens
            self.decode_steps.append(seconds)
            if not prompt_tokens:
                self.pure_decode_steps.append(seconds)

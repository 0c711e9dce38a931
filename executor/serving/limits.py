"""How many requests the server takes: those that would wait too long are told when to come back."""

import math
from dataclasses import dataclass

from executor.config.case import ServeSettings
from executor.serving.errors import ApiError
from executor.serving.messages import Ready

LONGEST_RETRY_S = 60  # clients obey no longer one


class Limits:
    """Of the requests that are open together."""

    def __init__(self, settings: ServeSettings):
        self.settings = settings
        self.open = 0  # sequences of open requests that run or wait
        self.waiting_tokens = 0  # of prompts whose first token has not come
        self.refused = {"queue_full": 0, "too_slow": 0, "timeout": 0}  # requests, by reason

    def admit(self, tokens: int, sequences: int, ready: Ready, rate: float) -> "Ticket":
        """Takes a request of `sequences` sequences with `tokens` prompt tokens in all. `rate` is the prompt tokens that
        are computed in a second. Raises ApiError with status 429 if it would wait too long."""
        places = min(sequences, ready.batch_size)
        most = ready.batch_size + (self.settings.max_queue or 4 * ready.batch_size)
        wait_s = self.waiting_tokens / rate if rate else 0.0
        if self.open + places > most:
            raise self._refusal("queue_full", f"{self.open} requests run or wait, which is the most", wait_s)
        if wait_s > self.settings.target_ttft_s:
            text = f"{self.waiting_tokens} tokens wait, which take about {wait_s:.0f} s"
            raise self._refusal("too_slow", text, wait_s - self.settings.target_ttft_s)
        ticket = Ticket(self, places, tokens)
        self.open += places
        self.waiting_tokens += tokens
        return ticket

    def _refusal(self, reason: str, text: str, retry_s: float) -> ApiError:
        self.refused[reason] += 1
        retry = min(max(1, math.ceil(retry_s)), LONGEST_RETRY_S)
        return ApiError(429, f"the server is busy: {text}; try again in {retry} s", None, reason, retry)


@dataclass
class Ticket:
    """What an open request has of the limits; it is given back at the end of the `with` block."""

    limits: Limits
    places: int
    waiting_tokens: int

    def started(self, tokens: int) -> None:
        """The first token after a prompt of `tokens` tokens has come."""
        tokens = min(tokens, self.waiting_tokens)
        self.waiting_tokens -= tokens
        self.limits.waiting_tokens -= tokens

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *_: object) -> None:
        self.started(self.waiting_tokens)
        self.limits.open -= self.places
        self.places = 0

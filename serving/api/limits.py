"""Admission control: the server refuses requests that would wait too long, with the time to try again."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from umbra.executor.config.case import ServeSettings
from umbra.serving.api.errors import ApiError
from umbra.serving.ranks.messages import Ready

LONGEST_RETRY_S = 60  # clients obey no longer one
SHORTEST_S, LONGEST_S = 1.0, 10.0  # how long the engine is watched before its speed is known, and how far back


class Admission:
    """Admission control. While more requests are open than the batch has rows, new prompts wait for a free row and not
    for prefill alone, so their rate is measured as prompt tokens started per second."""

    def __init__(self, settings: ServeSettings, clock: Callable[[], float] = time.monotonic):
        self.settings, self.clock = settings, clock
        self.open = 0  # sequences of open requests that run or wait
        self.waiting_tokens = 0  # of prompts whose first token has not come
        self.refused = {"queue_full": 0, "too_slow": 0, "timeout": 0}  # requests, by reason
        self._rows = 0
        self._full_since = 0.0  # time since when more requests are open than rows; meaningless if they are not
        self._starts: deque[tuple[float, int]] = deque()  # times and tokens of prompts that have started since then

    def admit(self, tokens: int, sequences: int, ready: Ready, rate: float) -> "Ticket":
        """Takes a request of `sequences` sequences with `tokens` prompt tokens in all. `rate` is the prompt tokens that
        are computed in a second. Raises ApiError with status 429 if it would wait too long."""
        rows = min(sequences, ready.batch_size)
        most = ready.batch_size + (self.settings.max_queue or 4 * ready.batch_size)
        rate = self.measured(rate)
        wait_s = self.waiting_tokens / rate if rate else 0.0
        if self.open + rows > most:
            raise self._refusal("queue_full", f"{self.open} requests run or wait, which is the most", wait_s)
        if wait_s > self.settings.target_ttft_s:
            text = f"{self.waiting_tokens} tokens wait, which take about {wait_s:.0f} s"
            raise self._refusal("too_slow", text, wait_s - self.settings.target_ttft_s)
        ticket = Ticket(self, rows, tokens)
        if self.open <= ready.batch_size < self.open + rows:
            self._full_since = self.clock()
            self._starts.clear()
        self._rows = ready.batch_size
        self.open += rows
        self.waiting_tokens += tokens
        return ticket

    def measured(self, rate: float) -> float:
        """`rate`, or the prompt tokens that start in a second if they are fewer and have been watched for long
        enough."""
        now = self.clock()
        since = max(self._full_since, now - LONGEST_S)
        while self._starts and self._starts[0][0] < since:
            self._starts.popleft()
        if self.open <= self._rows or now - since < SHORTEST_S or not self._starts:
            return rate
        return min(rate, sum(tokens for _, tokens in self._starts) / (now - since))

    def started(self, tokens: int) -> None:
        """The first token after `tokens` tokens of a prompt has come."""
        self.waiting_tokens -= tokens
        if self.open > self._rows:
            self._starts.append((self.clock(), tokens))

    def _refusal(self, reason: str, text: str, retry_s: float) -> ApiError:
        self.refused[reason] += 1
        retry = min(max(1, math.ceil(retry_s)), LONGEST_RETRY_S)
        return ApiError(429, f"the server is busy: {text}; try again in {retry} s", None, reason, retry)


@dataclass
class Ticket:
    """The share of the limits that an open request has; it is given back at the end of the `with` block."""

    limits: Admission
    rows: int
    waiting_tokens: int

    def started(self, tokens: int) -> None:
        """The first token after a prompt of `tokens` tokens has come."""
        tokens = min(tokens, self.waiting_tokens)
        self.waiting_tokens -= tokens
        self.limits.started(tokens)

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *_: object) -> None:
        self.limits.waiting_tokens -= self.waiting_tokens
        self.limits.open -= self.rows
        self.waiting_tokens = self.rows = 0

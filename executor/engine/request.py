"""A request to the engine, its sampling settings, and the events that answer it step by step."""

import math
from dataclasses import dataclass

from errors import UserError

LARGEST_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends.

    The token at position p of a request is drawn from (seed, p) alone: neither the other requests of a batch nor
    preemption nor the number of ranks changes it.
    """

    max_tokens: int = 32
    temperature: float = 0.0  # 0: greedy
    top_k: int | None = None  # sample among the k most probable tokens; None: among all
    top_p: float = 1.0  # sample among the fewest tokens whose probabilities add up to p
    seed: int | None = None  # None: the request's id is used as its seed
    stop_token_ids: tuple[int, ...] = ()  # besides the model's end-of-sequence tokens
    ignore_eos: bool = False  # the model's end-of-sequence tokens do not end the request

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise UserError(f"max_tokens: {self.max_tokens!r:.40} must be an integer of at least 1")
        if not (_number(self.temperature) and math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature: {self.temperature!r:.40} must be a number of at least 0")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise UserError(f"top_k: {self.top_k!r:.40} must be an integer of at least 1, or None for all tokens")
        if not (_number(self.top_p) and 0 <= self.top_p <= 1):
            raise UserError(f"top_p: {self.top_p!r:.40} must be a number from 0 to 1")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed <= LARGEST_SEED):
            raise UserError(f"seed: {self.seed!r:.40} must be an integer from 0 to {LARGEST_SEED}, or None")
        if not all(type(token) is int for token in self.stop_token_ids):
            raise UserError(f"stop_token_ids: {self.stop_token_ids!r:.80} must be integers")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how to continue it."""

    ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    priority: int = 0  # requests with a lower number run first and are preempted last
    salt: bytes = b""  # only requests with the same salt find each other's prefixes


@dataclass(frozen=True)
class Event:
    """What one step did for one request."""

    id: int
    tokens: tuple[int, ...]  # the new tokens, including one that ends the request
    finish_reason: str  # "stop", "length" or "abort"; empty while the request runs
    found: int = 0  # prompt tokens that were in the prefix cache

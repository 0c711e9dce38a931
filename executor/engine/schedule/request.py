"""A request to the engine, its sampling settings, and the events that answer it step by step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec

from umbra.base.errors import UserError

LARGEST_SEED = (1 << 63) - 1
MOST_LOGPROBS = 20  # alternatives to a token


class Grammar(msgspec.Struct, frozen=True):
    """A pattern that the text of an answer must match: a JSON schema ("json"), a regular expression ("regex"), or a
    grammar in llguidance's dialect of Lark ("lark")."""

    kind: str
    text: str


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """The settings by which one request's tokens are chosen, and when it ends. The API server builds them, and they
    travel to the ranks as they are.

    The token at position p of a request is drawn from (seed, p) alone: neither the other requests of a batch nor
    preemption nor the number of ranks changes it.
    """

    max_tokens: int = 32
    temperature: float = 0.0  # 0: greedy
    top_k: int | None = None  # sample among the k most probable tokens; None: among all
    top_p: float = 1.0  # sample among the fewest tokens whose probabilities add up to p
    min_p: float = 0.0  # sample among tokens that are at least this share as probable as the most probable one
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that the answer has already
    frequency_penalty: float = 0.0  # subtracted once per occurrence in the answer
    repetition_penalty: float = 1.0  # divides positive logits of tokens of the prompt or the answer, multiplies others
    logit_bias: Mapping[int, float] = {}  # added to the logits of these tokens
    seed: int | None = None  # None: the request's id is used as its seed
    stop_token_ids: tuple[int, ...] = ()  # besides the model's end-of-sequence tokens
    ignore_eos: bool = False  # the model's end-of-sequence tokens do not end the request
    min_tokens: int = 0  # so many tokens come before one that ends it
    logprobs: int | None = None  # alternatives that each token's log-probability comes with; None: none is wanted
    prompt_logprobs: int | None = None  # alternatives of each token of the prompt, from the second one on
    grammar: Grammar | None = None

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
        if not (_number(self.min_p) and 0 <= self.min_p <= 1):
            raise UserError(f"min_p: {self.min_p!r:.40} must be a number from 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not (_number(value) and -2 <= value <= 2):
                raise UserError(f"{name}: {value!r:.40} must be a number from -2 to 2")
        if not (_number(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100):
            raise UserError(f"repetition_penalty: {self.repetition_penalty!r:.40} must be a number from 0.01 to 100")
        for token, bias in self.logit_bias.items():
            if type(token) is not int or token < 0 or not (_number(bias) and -100 <= bias <= 100):
                raise UserError(f"logit_bias: {token!r:.40}: {bias!r:.40} must be a token id and a number up to 100")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value <= MOST_LOGPROBS):
                raise UserError(f"{name}: {value!r:.40} must be an integer from 0 to {MOST_LOGPROBS}, or None")
        if type(self.min_tokens) is not int or not 0 <= self.min_tokens <= self.max_tokens:
            raise UserError(
                f"min_tokens: {self.min_tokens!r:.40} must be an integer up to {self.max_tokens}, max_tokens"
            )
        if self.grammar and self.min_tokens:
            raise UserError("min_tokens: an answer that follows a grammar ends with it: leave one of the two out")
        if self.grammar and self.ignore_eos:
            raise UserError("ignore_eos: an answer that follows a grammar ends with it: leave one of the two out")
        if not all(type(token) is int for token in self.stop_token_ids):
            raise UserError(f"stop_token_ids: {self.stop_token_ids!r:.80} must be integers")

    @cached_property
    def takes_the_largest(self) -> bool:
        """Says whether each token is the one with the largest logit, whatever was generated before."""
        plain = self.presence_penalty == self.frequency_penalty == 0 and self.repetition_penalty == 1
        return self.temperature == 0 and plain and not (self.logit_bias or self.grammar or self.min_tokens)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how to continue it."""

    ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # requests with a lower number run first and are preempted last
    salt: bytes = b""  # only requests with the same salt find each other's prefixes
    # Numbers of first tokens of the prompt that others probably begin with as well, before they go on differently.
    branches: tuple[int, ...] = ()


class TokenLogprob(NamedTuple):
    """A token's log-probability in the model's own distribution, before temperature and penalties."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, log-probability) of the most probable tokens, the first one first


class Event(NamedTuple):
    """The result of one step for one request."""

    id: int
    tokens: tuple[int, ...]  # the new tokens, including one that ends the request
    finish_reason: str  # "stop", "length", "abort" or "error"; empty while the request runs
    cached_tokens: int = 0  # prompt tokens that were in the prefix cache, or on disk
    logprobs: tuple[TokenLogprob, ...] = ()  # of `tokens`, if they are wanted
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # with the first token, if they are wanted
    drafted: int = 0  # tokens that were guessed, of which all of `tokens` but the first were right
    restored_tokens: int = 0  # of `cached_tokens`, those that were on disk

"""Sampling: the choice of each sequence's next token from its logits, and the meaning of `Ops.sample` in plain
PyTorch."""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

MASK = (1 << 64) - 1


class ChoiceSettings(Protocol):
    """A request's sampling settings."""

    @property
    def temperature(self) -> float: ...  # 0: the largest logit
    @property
    def top_k(self) -> int | None: ...  # among the k most probable tokens; None: among all
    @property
    def top_p(self) -> float: ...  # among the fewest tokens whose probabilities add up to p
    @property
    def min_p(self) -> float: ...  # among tokens that are at least this share as probable as the most probable one
    @property
    def presence_penalty(self) -> float: ...  # taken from the logits of tokens that were generated before
    @property
    def frequency_penalty(self) -> float: ...  # the same for each time that they were
    @property
    def repetition_penalty(self) -> float: ...  # divides positive logits of tokens seen before, multiplies others
    @property
    def logit_bias(self) -> Mapping[int, float]: ...  # added to the logits of these tokens


class Choice(NamedTuple):
    """All that the choice of one token of a sequence depends on."""

    settings: ChoiceSettings
    seed: int  # from 0 to 2^63 - 1
    ids: "array[int]"  # the sequence's tokens, int64; those from `position` on do not matter
    prompt: int  # number of `ids` that are the prompt's
    position: int  # of the token
    allowed: bytes | None = None  # the tokens that may be chosen, from the lowest bit of each byte on; None: all


def sample(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    rows = logits.float().clone()
    for row, choice in zip(rows, choices, strict=True):
        adjust(row, choice)
    tokens = rows.argmax(-1)
    if drawn := [row for row, choice in enumerate(choices) if choice.settings.temperature > 0]:
        asked = [choices[row] for row in drawn]
        draws = [uniform(choice.seed, choice.position) for choice in asked]
        tokens[drawn] = draw(filtered_probabilities(rows[drawn], [choice.settings for choice in asked]), draws)
    return tokens


def adjust(logits: Tensor, choice: Choice) -> None:
    """Applies a choice's bias, penalties and grammar, in this order, to its `logits` (V), in place."""
    settings, ids = choice.settings, choice.ids[: choice.position]
    if settings.logit_bias:
        tokens = torch.tensor(list(settings.logit_bias))
        logits[tokens] += torch.tensor(list(settings.logit_bias.values()), dtype=logits.dtype)
    if settings.repetition_penalty != 1:
        seen = torch.tensor(ids).unique()
        values, penalty = logits[seen], settings.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    generated = ids[choice.prompt :]
    if (settings.presence_penalty or settings.frequency_penalty) and generated:
        tokens, counts = torch.tensor(generated).unique(return_counts=True)
        logits[tokens] -= counts * settings.frequency_penalty + settings.presence_penalty
    if choice.allowed is not None:
        bits = np.unpackbits(np.frombuffer(choice.allowed, dtype=np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits).bool()[: len(logits)]
        logits[: len(allowed)].masked_fill_(~allowed, -math.inf)
        logits[len(allowed) :] = -math.inf


def uniform(seed: int, position: int) -> float:
    """A number from [0, 1) for each (seed, position), the same on every machine: SplitMix64's mixer, applied twice."""
    bits = _mixed((_mixed(seed) + position) & MASK)
    return (bits >> 11) / (1 << 53)


def _mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def draw(probabilities: Tensor, draws: Sequence[float]) -> Tensor:
    """probabilities (S, V) with rows that sum to one, and a number from [0, 1) for each row. -> token ids (S)

    The token drawn is the first at which the cumulative sum of the row exceeds the number, so a token of probability 0
    is never drawn.
    """
    cumulated = probabilities.double().cumsum(-1)  # (S, V)
    total = cumulated[:, -1:]
    wanted = torch.tensor(draws, dtype=torch.float64)[:, None] * total
    # The product can round up to the total itself, which no cumulative sum exceeds.
    wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, wanted, right=True).squeeze(-1)


def filtered_probabilities(logits: Tensor, settings: Sequence[ChoiceSettings]) -> Tensor:
    """Applies each row's temperature, then its top-k, then its top-p to the tokens that top-k left, then its min-p. ->
    probabilities (S, V) with rows that sum to one"""
    vocabulary = logits.shape[-1]
    temperatures = torch.tensor([s.temperature for s in settings], dtype=torch.float64)[:, None]
    # The largest logit becomes 0 first, so that the smallest temperature does not overflow.
    logits = ((logits - logits.amax(-1, keepdim=True)) / temperatures).float()
    most = [min(s.top_k or vocabulary, vocabulary) for s in settings]
    if min(most) < vocabulary:
        largest = max(k for k in most if k < vocabulary)
        top = logits.topk(largest, dim=-1).values
        floor = top.gather(-1, torch.tensor([[min(k, largest) - 1] for k in most]))
        floor = floor.masked_fill(torch.tensor([[k == vocabulary] for k in most]), -math.inf)
        logits = logits.masked_fill(logits < floor, -math.inf)
    probabilities = logits.softmax(-1)
    if any(s.top_p < 1 for s in settings):
        bounds = torch.tensor([[s.top_p if s.top_p < 1 else math.inf] for s in settings])
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token stays if those before it have not reached p yet; the most probable one always stays.
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill((before >= bounds) & (before > 0), 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    if any(s.min_p > 0 for s in settings):
        least = torch.tensor([[s.min_p] for s in settings]) * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities

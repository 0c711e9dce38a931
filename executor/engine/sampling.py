"""Chooses the next token of each sequence from its logits."""

import math
from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from executor.engine.request import SamplingParams, TokenLogprob
from executor.engine.sequence import FAILED, Sequence
from ops.interface import Ops

MASK = (1 << 64) - 1
LOGPROB_ROWS = 64  # rows whose log-probabilities are computed at a time


def choose(ops: Ops, logits: Tensor, sequences: ListOf[Sequence]) -> Tensor:
    """logits (S, V) with a row for each of `sequences`. -> token ids (S); FAILED where a grammar failed"""
    chosen = ops.argmax(logits)
    special = [row for row, s in enumerate(sequences) if not s.request.sampling.takes_the_largest]
    if special:
        places = torch.tensor(special, device=logits.device)
        tokens = _special(logits[places].float().cpu(), [sequences[row] for row in special])
        chosen = chosen.index_copy(0, places, tokens.to(logits.device))
    return chosen


def _special(logits: Tensor, sequences: ListOf[Sequence]) -> Tensor:
    """Like `choose`, for sequences that do not just take the largest logit. Overwrites `logits` (S, V), float32."""
    for row, sequence in zip(logits, sequences, strict=True):
        adjust(row, sequence)
    tokens = logits.argmax(-1)
    drawn = [row for row, s in enumerate(sequences) if s.request.sampling.temperature > 0]
    if drawn:
        params = [sequences[row].request.sampling for row in drawn]
        draws = [uniform(seed_of(sequences[row]), len(sequences[row].ids)) for row in drawn]
        tokens[drawn] = draw(filtered_probabilities(logits[drawn], params), draws)
    for row, sequence in enumerate(sequences):
        if sequence.matcher and not sequence.matcher.accept(int(tokens[row])):
            tokens[row] = FAILED
    return tokens


def adjust(logits: Tensor, sequence: Sequence) -> None:
    """Applies a sequence's bias, penalties and grammar, in this order, to its `logits` (V), in place."""
    params = sequence.request.sampling
    if params.logit_bias:
        tokens = torch.tensor(list(params.logit_bias))
        logits[tokens] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype)
    if params.repetition_penalty != 1:
        seen = torch.tensor(sequence.ids).unique()
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and sequence.generated:
        tokens, counts = torch.tensor(sequence.generated).unique(return_counts=True)
        logits[tokens] -= counts * params.frequency_penalty + params.presence_penalty
    if sequence.matcher:
        sequence.matcher.mask(logits)


def seed_of(sequence: Sequence) -> int:
    seed = sequence.request.sampling.seed
    return sequence.id if seed is None else seed


def uniform(seed: int, position: int) -> float:
    """A number from [0, 1) for each (seed, position), the same on every machine: SplitMix64's mixer, applied twice."""
    bits = _mixed((_mixed(seed) + position) & MASK)
    return (bits >> 11) / (1 << 53)


def _mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def draw(probabilities: Tensor, draws: ListOf[float]) -> Tensor:
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


def filtered_probabilities(logits: Tensor, params: ListOf[SamplingParams]) -> Tensor:
    """Applies each row's temperature, then its top-k, then its top-p to the tokens that top-k left, then its min-p. ->
    probabilities (S, V) with rows that sum to one"""
    vocabulary = logits.shape[-1]
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float64)[:, None]
    # The largest logit becomes 0 first, so that the smallest temperature does not overflow.
    logits = ((logits - logits.amax(-1, keepdim=True)) / temperatures).float()
    most = [min(p.top_k or vocabulary, vocabulary) for p in params]
    if min(most) < vocabulary:
        largest = max(k for k in most if k < vocabulary)
        top = logits.topk(largest, dim=-1).values
        floor = top.gather(-1, torch.tensor([[min(k, largest) - 1] for k in most]))
        floor = floor.masked_fill(torch.tensor([[k == vocabulary] for k in most]), -math.inf)
        logits = logits.masked_fill(logits < floor, -math.inf)
    probabilities = logits.softmax(-1)
    if any(p.top_p < 1 for p in params):
        bounds = torch.tensor([[p.top_p if p.top_p < 1 else math.inf] for p in params])
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token stays if those before it have not reached p yet; the most probable one always stays.
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill((before >= bounds) & (before > 0), 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    if any(p.min_p > 0 for p in params):
        least = torch.tensor([[p.min_p] for p in params]) * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def logprobs_of(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """logits (S, V), tokens (S). -> (S, 1 + 2 most) float32: the log-probability of each token, then the ids of the
    `most` most probable tokens, then their log-probabilities"""
    known = tokens.clamp(min=0)[:, None]
    parts = []
    for rows, places in zip(logits.split(LOGPROB_ROWS), known.split(LOGPROB_ROWS), strict=True):
        logprobs = rows.float().log_softmax(-1)
        top = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
        parts.append(torch.cat((logprobs.gather(-1, places), top.indices.float(), top.values), dim=-1))
    return torch.cat(parts) if parts else logits.new_empty(0, 1 + 2 * most, dtype=torch.float32)


def token_logprob(row: list[float], most: int) -> TokenLogprob:
    """A row of `logprobs_of` with the first `most` of its alternatives."""
    wide = (len(row) - 1) // 2
    ids, values = row[1 : 1 + wide], row[1 + wide :]
    return TokenLogprob(row[0], tuple((int(id), value) for id, value in zip(ids[:most], values[:most], strict=True)))

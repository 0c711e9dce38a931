"""Chooses the next token of each sequence from its logits."""

from collections.abc import Sequence as ListOf
from functools import lru_cache

import torch
from torch import Tensor

from umbra.executor.engine.schedule.request import TokenLogprob
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.ops.interface import Ops
from umbra.ops.sampling import Choice

LOGPROB_ROWS = 64  # rows whose log-probabilities are computed at a time


def choose(ops: Ops, logits: Tensor, sequences: ListOf[Sequence]) -> Tensor:
    """logits (rows, V) with a row for the newest token and for each drafted one of each of `sequences`. -> token
    ids (rows)"""
    if all(s.request.sampling.takes_the_largest for s in sequences):
        return ops.argmax(logits)
    return ops.sample(logits, [choice for s in sequences for choice in choices_of(s, logits.shape[-1])])


def choices_of(sequence: Sequence, vocabulary: int) -> list[Choice]:
    """The choices of the tokens after the newest token of `sequence` and after each drafted one."""
    sampling, ids, prompt = sequence.request.sampling, sequence.ids, sequence.prompt_len
    seed = sequence.id if sampling.seed is None else sampling.seed
    positions = range(len(ids) - sequence.drafted, len(ids) + 1)
    if sampling.min_tokens > positions[0] - prompt:
        going_on = _all_but(sequence.ends, vocabulary)
        masks = [going_on if position - prompt < sampling.min_tokens else None for position in positions]
    else:
        masks = [None] * len(positions)
        if sequence.matcher:  # a draft that leaves the grammar ends before that
            masks = [*sequence.matcher.allowed_after(ids[positions[0] :])]
    return [Choice(sampling, seed, ids, prompt, at, mask) for at, mask in zip(positions, masks, strict=True)]


@lru_cache(16)
def _all_but(tokens: frozenset[int], vocabulary: int) -> bytes:
    """The mask of a choice that allows all but these tokens."""
    bits = bytearray(b"\xff" * -(-vocabulary // 8))
    for token in tokens:
        if 0 <= token < vocabulary:
            bits[token // 8] &= ~(1 << token % 8)
    return bytes(bits)


def logprobs_of(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """logits (S, V), tokens (S). -> (S, 1 + 2 most) float32: the log-probability of each token, then the ids of the
    `most` most probable tokens, then their log-probabilities"""
    known = tokens.clamp(min=0)[:, None]
    parts = []
    for rows, tokens in zip(logits.split(LOGPROB_ROWS), known.split(LOGPROB_ROWS), strict=True):
        logprobs = rows.float().log_softmax(-1)
        top = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
        parts.append(torch.cat((logprobs.gather(-1, tokens), top.indices.float(), top.values), dim=-1))
    return torch.cat(parts) if parts else logits.new_empty(0, 1 + 2 * most, dtype=torch.float32)


def token_logprob(row: list[float], most: int) -> TokenLogprob:
    """A row of `logprobs_of` with the first `most` of its alternatives."""
    wide = (len(row) - 1) // 2
    ids, values = row[1 : 1 + wide], row[1 + wide :]
    return TokenLogprob(row[0], tuple((int(id), value) for id, value in zip(ids[:most], values[:most], strict=True)))

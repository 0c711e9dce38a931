"""Chooses the next token of each sequence from its logits."""

from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from executor.config.case import SamplingSettings
from ops.interface import Ops


def choose(ops: Ops, logits: Tensor, settings: SamplingSettings, generators: ListOf[torch.Generator]) -> Tensor:
    """logits (S, V), one generator a sequence. -> token ids (S)"""
    if settings.temperature == 0:
        return ops.argmax(logits)
    probabilities = filtered_probabilities(logits.float().cpu(), settings)
    rows = zip(probabilities, generators, strict=True)
    chosen = [torch.multinomial(row, 1, generator=generator) for row, generator in rows]
    ids = torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64)
    return ids.to(logits.device)


def filtered_probabilities(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Temperature, then top-k, then top-p on what top-k left; rows sum to one. (S, V)"""
    logits = logits / settings.temperature
    if settings.top_k and settings.top_k < logits.shape[-1]:
        floor = logits.topk(settings.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    probabilities = logits.softmax(-1)
    if settings.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token stays if those before it have not reached p yet; the likeliest always stays.
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill((before >= settings.top_p) & (before > 0), 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities

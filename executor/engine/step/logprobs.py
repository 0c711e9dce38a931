"""Log-probabilities of a step's tokens, for the sequences that want them."""

import itertools
from collections.abc import Sequence as ListOf
from typing import NamedTuple

from torch import Tensor

from umbra.executor.engine.schedule.request import Event, TokenLogprob
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.engine import Engine
from umbra.executor.engine.step.sampling import token_logprob


class WantedLogprobs(NamedTuple):
    """Log-probabilities that a sequence wants: of `tokens` in its rows of logits from `first` on, with `most`
    alternatives each."""

    sequence: Sequence
    first: int
    tokens: ListOf[int]
    most: int


class Logprobs:
    """Logits are always those of this rank's data-parallel group; every rank learns the values of all groups."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._group, self._groups = engine.parallel.attn_dp.rank, engine.parallel.attn_dp.size

    def score(self, logits: Tensor, sequences: ListOf[Sequence]) -> None:
        """Keeps the log-probabilities of prompt tokens that are computed in this step, for those who want them.
        `logits` has `logit_rows` rows for each of this rank's `sequences`."""
        wanted = [
            WantedLogprobs(
                s,
                first,
                s.ids[s.num_computed + 1 : s.num_computed + 1 + _scores(s)],
                s.request.sampling.prompt_logprobs or 0,
            )
            for s, first in zip(sequences, self._first_rows(sequences, [s.logit_rows for s in sequences]), strict=True)
            if s.scored
        ]
        for one, logprobs in zip(wanted, self._values(logits, wanted), strict=True):
            one.sequence.prompt_logprobs += logprobs

    def added(self, events: list[Event], logits: Tensor, sequences: ListOf[Sequence], rows: ListOf[int]) -> list[Event]:
        """Returns `events`, one for each of `sequences`, with the log-probabilities that these want. sequences[i] has
        rows[i] of the rows of `logits`."""
        if any(s.request.sampling.logprobs is not None for s in sequences):
            wanted = [
                WantedLogprobs(s, first, event.tokens, s.request.sampling.logprobs)
                for s, first, event in zip(sequences, self._first_rows(sequences, rows), events, strict=True)
                if s.request.sampling.logprobs is not None
            ]
            values = zip(wanted, self._values(logits, wanted), strict=True)
            by_id = {one.sequence.id: tuple(logprobs) for one, logprobs in values}
            events = [event._replace(logprobs=by_id.get(event.id, ())) for event in events]
        for index, sequence in enumerate(sequences):
            if sequence.prompt_logprobs and events[index].tokens and len(sequence.generated) == 1:
                events[index] = events[index]._replace(prompt_logprobs=tuple(sequence.prompt_logprobs))
        return events

    def _first_rows(self, sequences: ListOf[Sequence], rows: ListOf[int]) -> list[int]:
        """Returns the first row of each sequence in the logits, in which sequences[i] has rows[i]; for one of another
        group, that of the next one."""
        own = (count if s.group == self._group else 0 for s, count in zip(sequences, rows, strict=True))
        return list(itertools.accumulate(own, initial=0))[:-1]

    def _values(self, logits: Tensor, wanted: ListOf[WantedLogprobs]) -> list[list[TokenLogprob]]:
        if not wanted:
            return []
        mine = [one for one in wanted if one.sequence.group == self._group]
        rows = [row for one in mine for row in range(one.first, one.first + len(one.tokens))]
        tokens = [token for one in mine for token in one.tokens]
        counts = tuple(sum(len(one.tokens) for one in wanted if one.sequence.group == g) for g in range(self._groups))
        values = iter(self.engine.logprobs(logits[rows], tokens, counts, max(one.most for one in wanted)))
        return [[token_logprob(next(values), one.most) for _ in one.tokens] for one in wanted]


def last_rows(logits: Tensor, sequences: ListOf[Sequence]) -> Tensor:
    """Returns the logits after the last token of each of `sequences` that has all its tokens computed. `logits` has
    `logit_rows` rows for each of `sequences`."""
    if all(s.complete and s.logit_rows == 1 for s in sequences):
        return logits  # after the last sequence there may be padding
    ends = itertools.accumulate(s.logit_rows for s in sequences)
    return logits[[end - 1 for end, s in zip(ends, sequences, strict=True) if s.complete]]


def _scores(sequence: Sequence) -> int:
    """Number of prompt tokens whose log-probabilities the next step gives: those after each token that it takes."""
    return min(sequence.end, sequence.prompt_len - 1) - sequence.num_computed

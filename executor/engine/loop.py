"""The loop that every driver uses: submit requests, step, abort. All ranks make the same calls in the same order."""

import itertools
import time
from collections.abc import Sequence as ListOf

from torch import Tensor

from errors import UserError
from executor.engine.engine import Engine
from executor.engine.request import Event, Request, TokenLogprob
from executor.engine.sampling import token_logprob
from executor.engine.scheduler import Scheduler, Step, limits_of
from executor.engine.sequence import Sequence, new_sequence
from executor.engine.timings import Timings


class Loop:
    """`stop_ids` are the model's end-of-sequence tokens; `serving` says whether the case's `serve_config` applies."""

    def __init__(self, engine: Engine, stop_ids: frozenset[int], serving: bool = False):
        self.engine, self.stop_ids = engine, stop_ids
        limits = limits_of(engine.case, serving)
        self.scheduler = Scheduler(limits, stop_ids, engine.pages, engine.parallel.attn_dp.rank)
        self.timings = Timings()
        self._group = engine.parallel.attn_dp.rank
        self._ids = itertools.count()
        self._aborted: list[Event] = []
        self._admitted: dict[int, float] = {}  # id -> time of admission in seconds, of sequences without a first token

    @property
    def idle(self) -> bool:
        """Whether no request is left and no event is still to be returned."""
        return self.scheduler.idle and not self._aborted

    def submit(self, request: Request) -> int:
        """Queue `request` and return its id, which its events carry. A request that can never run is refused with an
        error of one line; other requests are not affected."""
        id = next(self._ids)
        self.add(new_sequence(id, request))
        return id

    def add(self, sequence: Sequence) -> None:
        """Like `submit`, for a caller that numbers its sequences itself and reads them afterwards. Whatever a step could
        fail for is refused here, because a step that fails ends all requests."""
        vocabulary = self.engine.config.vocab_size
        if wrong := [token for token in sequence.ids if not 0 <= token < vocabulary]:
            raise UserError(f"prompt {sequence.id}: token {wrong[0]} is outside the vocabulary of {vocabulary}")
        if wrong := [token for token in sequence.request.sampling.logit_bias if token >= vocabulary]:
            raise UserError(f"logit_bias: token {wrong[0]} is outside the vocabulary of {vocabulary}")
        if grammar := sequence.request.sampling.grammar:
            sequence.matcher = self.engine.grammars.matcher(grammar)
        self.scheduler.add(sequence)

    def abort(self, id: int) -> None:
        """End a request; the next `step` returns its last event. A request that has already ended is left alone."""
        if event := self.scheduler.abort(id):
            self._aborted.append(event)
            self._admitted.pop(id, None)

    def step(self) -> list[Event]:
        """Admit waiting requests and run one step. Returns the events of all requests that got a token or ended."""
        return self.run(self.scheduler.schedule())

    def run(self, step: Step | None) -> list[Event]:
        """Like `step`, for a caller that has called the scheduler itself."""
        aborted, self._aborted = self._aborted, []
        if step is None:
            return aborted
        start, decode, finished = time.perf_counter(), step.decode, step.finished_prompts
        prompts = [] if decode else [s for s in step.sequences if not s.decoding]
        prompt_tokens = sum(s.new_tokens for s in prompts)
        for sequence in prompts:
            if not sequence.cached:
                self._admitted[sequence.id] = start
        with self.engine.step(decode):
            batch = self.engine.pack(self.scheduler, step.sequences, decode)
            logits = self.engine.forward(batch, decode)
            if prompts:
                self._score(logits, step.sequences)
                logits = _last_rows(logits, [s for s in step.sequences if s.group == self._group])
            tokens = self.engine.choose(logits, self.scheduler.by_group(finished)) if finished else []
            logprobs = self._logprobs(logits, finished, tokens)
        events = self.scheduler.commit(step, tokens)
        if logprobs:
            events = [event._replace(logprobs=logprobs.get(event.id, ())) for event in events]
        now = time.perf_counter()
        self.timings.add(prompt_tokens, len(step.sequences) - len(prompts), now - start)
        if self._admitted:
            self._first_tokens(events, finished, now)
        return aborted + events

    def _first_tokens(self, events: list[Event], sequences: ListOf[Sequence], now: float) -> None:
        """Completes those of `events`, one for each of `sequences`, that have the first token of a request."""
        for index, sequence in enumerate(sequences):
            if (admitted := self._admitted.pop(sequence.id, None)) is not None:
                self.timings.first_token.append(now - admitted)
            if sequence.prompt_logprobs and len(sequence.generated) == 1:
                events[index] = events[index]._replace(prompt_logprobs=tuple(sequence.prompt_logprobs))

    def _logprobs(
        self, logits: Tensor, sequences: ListOf[Sequence], tokens: ListOf[int]
    ) -> dict[int, tuple[TokenLogprob, ...]]:
        """The log-probabilities of the chosen `tokens` of all `sequences` that want them, by id. `logits` has the rows
        of this rank's group."""
        params = [s.request.sampling for s in sequences]
        wanted = {s.id: p.logprobs for s, p in zip(sequences, params, strict=True) if p.logprobs is not None}
        if not wanted:
            return {}
        mine = [(s, token) for s, token in zip(sequences, tokens, strict=True) if s.group == self._group]
        rows = [row for row, (s, _) in enumerate(mine) if s.id in wanted]
        chosen = [token for s, token in mine if s.id in wanted]
        asking = [s for s in sequences if s.id in wanted]
        found = self.engine.logprobs(logits[rows], chosen, self._counts(asking), max(wanted.values()))
        return {s.id: (token_logprob(row, wanted[s.id]),) for s, row in zip(asking, found, strict=True)}

    def _score(self, logits: Tensor, sequences: ListOf[Sequence]) -> None:
        """Keeps the log-probabilities of prompt tokens that are computed in this step, for those who want them.
        `logits` has `logit_rows` rows for each of this rank's `sequences`."""
        asking = [s for s in sequences if s.scored]
        if not asking:
            return
        rows: list[int] = []
        targets: list[int] = []
        first = 0
        for s in (s for s in sequences if s.group == self._group):
            if s.scored:
                rows += range(first, first + _scores(s))
                targets += s.ids[s.cached + 1 : s.cached + 1 + _scores(s)]
            first += s.logit_rows
        most = max(s.request.sampling.prompt_logprobs or 0 for s in asking)
        counts = tuple(sum(_scores(s) for s in asking if s.group == g) for g in range(len(self.scheduler.pools)))
        found = iter(self.engine.logprobs(logits[rows], targets, counts, most))
        for s in asking:
            own = s.request.sampling.prompt_logprobs or 0
            s.prompt_logprobs += [token_logprob(next(found), own) for _ in range(_scores(s))]

    def _counts(self, sequences: ListOf[Sequence]) -> tuple[int, ...]:
        """Number of `sequences` in each data-parallel group."""
        return tuple(sum(s.group == g for s in sequences) for g in range(len(self.scheduler.pools)))


def _scores(sequence: Sequence) -> int:
    """Number of prompt tokens whose log-probabilities the next step gives: those after each token that it takes."""
    return min(sequence.end, sequence.prompt_len - 1) - sequence.cached


def _last_rows(logits: Tensor, sequences: ListOf[Sequence]) -> Tensor:
    """The logits after the last token of each of `sequences` that has all its tokens computed. `logits` has
    `logit_rows` rows for each of `sequences`."""
    if all(s.complete and s.logit_rows == 1 for s in sequences):
        return logits  # behind the last sequence there may be padding
    ends = itertools.accumulate(s.logit_rows for s in sequences)
    return logits[[end - 1 for end, s in zip(ends, sequences, strict=True) if s.complete]]

"""The loop that every driver uses: submit requests, step, abort. All ranks make the same calls in the same order."""

import itertools
import time
from array import array
from collections.abc import Sequence as ListOf
from typing import NamedTuple

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.executor.engine.drafts.drafts import Drafts
from umbra.executor.engine.memory.batch_limits import limits_of
from umbra.executor.engine.schedule.request import Event, Request, TokenLogprob
from umbra.executor.engine.schedule.scheduler import Scheduler, Step
from umbra.executor.engine.schedule.sequence import Sequence, new_sequence
from umbra.executor.engine.step.engine import Engine
from umbra.executor.engine.step.model_drafts import Computed, ModelDrafter
from umbra.executor.engine.step.sampling import token_logprob
from umbra.executor.engine.step.timings import Timings
from umbra.models.batch import Batch

SHARED_STEPS = 16  # decode steps whose times rank 0 shares at once


class Loop:
    """`stop_ids` are the model's end-of-sequence tokens; `serving` says whether the case's `serve_config` applies."""

    def __init__(self, engine: Engine, stop_ids: frozenset[int], serving: bool = False):
        self.engine, self.stop_ids = engine, stop_ids
        limits = limits_of(engine.case, engine.config, serving, engine.pages.set_pages)
        self.scheduler = Scheduler(limits, stop_ids, engine.pages, engine.parallel.attn_dp.rank)
        self.drafter = ModelDrafter(engine) if engine.model.guesses else None
        self.timings = Timings()
        self._group = engine.parallel.attn_dp.rank
        self._ids = itertools.count()
        self._aborted: list[Event] = []
        self._steps: list[tuple[int, float, int, int, float]] = []  # decode steps that drafts have not learned from
        self._admitted: dict[int, float] = {}  # id -> time of admission in seconds, of sequences without a first token

    @property
    def idle(self) -> bool:
        """Says whether no request is left and no event is still to be returned."""
        return self.scheduler.idle and not self._aborted

    def submit(self, request: Request, id: int | None = None) -> Sequence:
        """Queue `request` and return its sequence, whose id its events carry: `id`, for a caller that numbers all its
        requests itself. A request that can never run is refused with an error of one line; other requests are not
        affected, so whatever a step could fail for is refused here: a step that fails ends all requests."""
        sequence = new_sequence(next(self._ids) if id is None else id, request)
        vocabulary = self.engine.config.vocab_size
        if wrong := [token for token in sequence.ids if not 0 <= token < vocabulary]:
            raise UserError(f"prompt {sequence.id}: token {wrong[0]} is outside the vocabulary of {vocabulary}")
        if wrong := [token for token in sequence.request.sampling.logit_bias if token >= vocabulary]:
            raise UserError(f"logit_bias: token {wrong[0]} is outside the vocabulary of {vocabulary}")
        if grammar := sequence.request.sampling.grammar:
            sequence.matcher = self.engine.grammars.matcher(grammar)
        self.scheduler.add(sequence)
        return sequence

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
            if not sequence.num_computed:
                self._admitted[sequence.id] = start
        guessing, drafts = (0, 0, 0.0), self.scheduler.drafts
        if drafts and self.drafter and any(s.taken == s.num_computed for s in prompts):
            drafts.begin(len(step.sequences))
        drafter = self.drafter if drafts and drafts.guesses else None
        with self.engine.step(decode):
            self.scheduler.reserve(step.sequences)
            of_groups = self.scheduler.by_group(step.sequences)
            computed = [[(s, s.num_computed, s.end) for s in of] for of in of_groups]
            batch = self.engine.pack(of_groups, decode, hidden=bool(drafter))
            logits = self.engine.forward(batch, decode)
            if prompts:
                self._score(logits, step.sequences)
                logits = _last_rows(logits, [s for s in step.sequences if s.group == self._group])
            tokens = self.engine.choose(logits, self.scheduler.by_group(finished)) if finished else []
            rows = [1 + s.drafted for s in finished]
            events = self.scheduler.commit(step, tokens)
            if drafter and drafts:
                guessing = self._guess(drafter, drafts, step, batch, computed)
        if any(s.request.sampling.logprobs is not None for s in finished):
            events = self._with_logprobs(logits, finished, rows, events)
        now = time.perf_counter()
        decoded = sum(len(e.tokens) for e, s in zip(events, finished, strict=True) if s not in prompts)
        self.timings.add(prompt_tokens, len(step.sequences) - len(prompts), decoded, sum(rows) - len(rows), now - start)
        if decode and drafts and (drafter or len(tokens) > len(finished) or drafts.measures):
            self._took(drafts, (sum(rows), now - start - guessing[2], *guessing))
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

    def _guess(
        self, drafter: ModelDrafter, drafts: Drafts[Sequence], step: Step, batch: Batch, computed: list[list[Computed]]
    ) -> tuple[int, int, float]:
        """Guesses the next tokens of the sequences of `step`, which has just run. -> how many sequences got how many
        guesses, and the seconds that this took"""
        start, finished = time.perf_counter(), step.finished_prompts
        lacking = {s.id for of in computed for s, begin, _ in of if s.taken != begin}
        asking = [s for s in finished if not s.finish_reason and s.id not in lacking]
        depth = drafts.depth(asking, len(finished)) if asking or step.decode else 0
        if step.decode and not depth:
            return 0, 0, time.perf_counter() - start
        room = {s.id: self.scheduler.room_for_guesses(s, depth) for s in asking if depth}
        with torch.inference_mode():
            found = drafter.guess(batch, computed, self.scheduler.by_group(asking), room, step.decode)
        for sequence, guesses in zip(asking, found, strict=True):
            sequence.guesses = array("q", guesses[: room.get(sequence.id, 0)])
        return len(asking), max(room.values(), default=0), time.perf_counter() - start

    def _took(self, drafts: Drafts[Sequence], step: tuple[int, float, int, int, float]) -> None:
        """Lets `drafts` learn what a decode step costs: (rows, seconds, then as of `_guess`). All ranks learn the times
        of rank 0, a few steps later where there are several ranks."""
        world = self.engine.parallel.world
        if world.size == 1:
            return drafts.took(*step)
        self._steps.append(step)
        if len(self._steps) == SHARED_STEPS:
            mine = [[seconds, guessing] for _, seconds, _, _, guessing in self._steps]
            times = torch.tensor(mine, device=self.engine.platform.device)
            shared = world.gather_rows(times, None)[:SHARED_STEPS].tolist()
            for (rows, _, sequences, depth, _), (seconds, guessing) in zip(self._steps, shared, strict=True):
                drafts.took(rows, seconds, sequences, depth, guessing)
            self._steps.clear()

    def _with_logprobs(
        self, logits: Tensor, sequences: ListOf[Sequence], rows: ListOf[int], events: ListOf[Event]
    ) -> list[Event]:
        """`events`, one for each of `sequences`, with the log-probabilities of the tokens of those that want them.
        `logits` has the rows of this rank's group, of which sequences[i] has rows[i]."""
        asked = [
            Asked(s, first, event.tokens, s.request.sampling.logprobs)
            for s, first, event in zip(sequences, self._first_rows(sequences, rows), events, strict=True)
            if s.request.sampling.logprobs is not None
        ]
        found = {one.sequence.id: tuple(given) for one, given in zip(asked, self._logprobs(logits, asked), strict=True)}
        return [event._replace(logprobs=found.get(event.id, ())) for event in events]

    def _score(self, logits: Tensor, sequences: ListOf[Sequence]) -> None:
        """Keeps the log-probabilities of prompt tokens that are computed in this step, for those who want them.
        `logits` has `logit_rows` rows for each of this rank's `sequences`."""
        asked = [
            Asked(
                s,
                first,
                s.ids[s.num_computed + 1 : s.num_computed + 1 + _scores(s)],
                s.request.sampling.prompt_logprobs or 0,
            )
            for s, first in zip(sequences, self._first_rows(sequences, [s.logit_rows for s in sequences]), strict=True)
            if s.scored
        ]
        for one, given in zip(asked, self._logprobs(logits, asked), strict=True):
            one.sequence.prompt_logprobs += given

    def _first_rows(self, sequences: ListOf[Sequence], rows: ListOf[int]) -> list[int]:
        """The first row of each sequence in the logits of this rank's group, in which sequences[i] has rows[i]; for one
        of another group, that of the next one."""
        own = (count if s.group == self._group else 0 for s, count in zip(sequences, rows, strict=True))
        return list(itertools.accumulate(own, initial=0))[:-1]

    def _logprobs(self, logits: Tensor, asked: ListOf["Asked"]) -> list[list[TokenLogprob]]:
        """Returns the log-probabilities that are `asked`, of all groups. `logits` has the rows of this rank's group."""
        if not asked:
            return []
        mine = [one for one in asked if one.sequence.group == self._group]
        rows = [row for one in mine for row in range(one.first, one.first + len(one.tokens))]
        tokens = [token for one in mine for token in one.tokens]
        groups = range(len(self.scheduler.pools))
        counts = tuple(sum(len(one.tokens) for one in asked if one.sequence.group == g) for g in groups)
        found = iter(self.engine.logprobs(logits[rows], tokens, counts, max(one.most for one in asked)))
        return [[token_logprob(next(found), one.most) for _ in one.tokens] for one in asked]


class Asked(NamedTuple):
    """Log-probabilities that a sequence wants: of `tokens` in its rows of logits from `first` on, with `most`
    alternatives each."""

    sequence: Sequence
    first: int
    tokens: ListOf[int]
    most: int


def _scores(sequence: Sequence) -> int:
    """Number of prompt tokens whose log-probabilities the next step gives: those after each token that it takes."""
    return min(sequence.end, sequence.prompt_len - 1) - sequence.num_computed


def _last_rows(logits: Tensor, sequences: ListOf[Sequence]) -> Tensor:
    """The logits after the last token of each of `sequences` that has all its tokens computed. `logits` has
    `logit_rows` rows for each of `sequences`."""
    if all(s.complete and s.logit_rows == 1 for s in sequences):
        return logits  # after the last sequence there may be padding
    ends = itertools.accumulate(s.logit_rows for s in sequences)
    return logits[[end - 1 for end, s in zip(ends, sequences, strict=True) if s.complete]]

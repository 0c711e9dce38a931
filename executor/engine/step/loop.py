"""The loop that every driver uses: submit requests, step, abort. All ranks make the same calls in the same order."""

import itertools
import time
from typing import TYPE_CHECKING

from umbra.base.errors import UserError
from umbra.executor.engine.drafts.drafts import DecodeCost, Guessed
from umbra.executor.engine.schedule.request import Event, Request
from umbra.executor.engine.schedule.scheduler import Scheduler, Step
from umbra.executor.engine.schedule.sequence import Sequence, new_sequence
from umbra.executor.engine.step.engine import Engine
from umbra.executor.engine.step.logprobs import Logprobs, last_rows
from umbra.executor.engine.step.speculation import Speculation
from umbra.executor.engine.step.timings import FirstTokens, Timings
from umbra.executor.plan.batch_limits import limits_of

if TYPE_CHECKING:
    from umbra.executor.engine.schedule.grammar import Matcher


class Loop:
    """`stop_ids` are the model's end-of-sequence tokens; `serving` says whether the case's `serve_config` applies."""

    def __init__(self, engine: Engine, stop_ids: frozenset[int], serving: bool = False):
        self.engine, self.stop_ids = engine, stop_ids
        limits = limits_of(engine.case, engine.config, serving, engine.pages.set_pages)
        self.scheduler = Scheduler(limits, stop_ids, engine.pages, engine.parallel.attn_dp.rank)
        self.speculation, self.logprobs = Speculation(engine, self.scheduler), Logprobs(engine)
        self.timings, self._first_tokens = Timings(), FirstTokens()
        self._group = engine.parallel.attn_dp.rank
        self._ids = itertools.count()
        self._aborted: list[Event] = []

    @property
    def idle(self) -> bool:
        """Says whether no request is left and no event is still to be returned."""
        return self.scheduler.idle and not self._aborted

    def submit(self, request: Request, id: int | None = None, matcher: "Matcher | None" = None) -> Sequence:
        """Queue `request` and return its sequence, whose id its events carry: `id`, for a caller that numbers all its
        requests itself. `matcher` is that of its grammar, for a caller that has compiled it. A request that can never
        run is refused with an error of one line; other requests are not affected, so whatever a step could fail for is
        refused here: a step that fails ends all requests."""
        sequence = new_sequence(next(self._ids) if id is None else id, request)
        vocabulary = self.engine.config.vocab_size
        if wrong := [token for token in sequence.ids if not 0 <= token < vocabulary]:
            raise UserError(f"prompt {sequence.id}: token {wrong[0]} is outside the vocabulary of {vocabulary}")
        if wrong := [token for token in sequence.request.sampling.logit_bias if token >= vocabulary]:
            raise UserError(f"logit_bias: token {wrong[0]} is outside the vocabulary of {vocabulary}")
        if grammar := sequence.request.sampling.grammar:
            sequence.matcher = matcher or self.engine.grammars.matcher(grammar)
        self.scheduler.add(sequence)
        return sequence

    def abort(self, id: int) -> None:
        """End a request; the next `step` returns its last event. A request that has already ended is left alone."""
        if event := self.scheduler.abort(id):
            self._aborted.append(event)
            self._first_tokens.forget(id)

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
        self._first_tokens.await_those_of(prompts, start)
        drafter = self.speculation.begin(prompts, len(step.sequences))
        with self.engine.step(decode):
            self.scheduler.reserve(step.sequences)
            groups = self.scheduler.by_group(step.sequences)
            computed = [[(s, s.num_computed, s.end) for s in group] for group in groups] if drafter else []
            batch = self.engine.pack(groups, decode, hidden=drafter is not None)
            logits = self.engine.forward(batch, decode)
            if prompts:
                self.logprobs.score(logits, step.sequences)
                logits = last_rows(logits, groups[self._group])
            tokens = self.engine.choose(logits, self.scheduler.by_group(finished)) if finished else []
            rows = [1 + s.drafted for s in finished]
            events = self.scheduler.commit(step, tokens)
            guessed = self.speculation.guess(drafter, step, batch, computed) if drafter else Guessed()
        events = self.logprobs.added(events, logits, finished, rows)
        seconds = time.perf_counter() - start
        decoded = sum(len(e.tokens) for e, s in zip(events, finished, strict=True) if s not in prompts)
        drafted = sum(rows) - len(rows)
        self.timings.add(prompt_tokens, len(step.sequences) - len(prompts), decoded, drafted, seconds)
        if decode and (drafts := self.scheduler.drafts) and (drafter or drafted or drafts.measures):
            self.speculation.learn(DecodeCost(sum(rows), seconds - guessed.seconds, guessed))
        self.timings.first_token += self._first_tokens.seconds_of(finished, start + seconds)
        return aborted + events

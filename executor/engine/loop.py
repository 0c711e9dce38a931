"""The loop that every driver uses: submit requests, step, abort. All ranks make the same calls in the same order."""

import itertools
import time

from errors import UserError
from executor.engine.engine import Engine
from executor.engine.request import Event, Request
from executor.engine.scheduler import Scheduler, limits_of
from executor.engine.sequence import Sequence, new_sequence
from executor.engine.timings import Timings


class Loop:
    """`stop_ids` are the model's end-of-sequence tokens."""

    def __init__(self, engine: Engine, stop_ids: frozenset[int]):
        self.engine, self.stop_ids = engine, stop_ids
        self.scheduler = Scheduler(limits_of(engine.case), stop_ids, engine.pages, engine.parallel.attn_dp.rank)
        self.timings = Timings()
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
        """Like `submit`, for a caller that numbers its sequences itself and reads them afterwards."""
        vocabulary = self.engine.config.vocab_size
        if wrong := [token for token in sequence.ids if not 0 <= token < vocabulary]:
            raise UserError(f"prompt {sequence.id}: token {wrong[0]} is outside the vocabulary of {vocabulary}")
        self.scheduler.add(sequence)

    def abort(self, id: int) -> None:
        """End a request; the next `step` returns its last event. A request that has already ended is left alone."""
        if event := self.scheduler.abort(id):
            self._aborted.append(event)
            self._admitted.pop(id, None)

    def step(self) -> list[Event]:
        """Admit waiting requests and run one step. Returns the events of all requests that got a token or ended."""
        aborted, self._aborted = self._aborted, []
        step = self.scheduler.schedule()
        if step is None:
            return aborted
        start, decode = time.perf_counter(), step.decode
        for sequence in step.sequences:
            if not sequence.cached:
                self._admitted[sequence.id] = start
        prompt_tokens = sum(s.new_tokens for s in step.sequences if not s.decoding)
        decoding = sum(s.decoding for s in step.sequences)
        with self.engine.step(decode):
            batch = self.engine.pack(self.scheduler, step.sequences, decode)
            logits = self.engine.forward(batch, decode)
            finished = step.finished_prompts
            mine = self.engine.parallel.attn_dp.rank
            rows = [s.complete for s in step.sequences if s.group == mine]
            if not all(rows):
                logits = logits[[row for row, wanted in enumerate(rows) if wanted]]
            tokens = self.engine.choose(logits, finished) if finished else []
        events = self.scheduler.commit(step, tokens)
        now = time.perf_counter()
        self.timings.add(prompt_tokens, decoding, now - start)
        self.timings.first_token += [now - self._admitted.pop(e.id) for e in events if e.id in self._admitted]
        return aborted + events

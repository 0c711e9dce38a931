"""Speculative decoding in the loop: a draft model's guesses after a step, and what drafts learn from its time."""

import time
from array import array
from collections.abc import Sequence as ListOf

import torch

from umbra.executor.engine.drafts.drafts import DecodeCost, Guessed
from umbra.executor.engine.schedule.scheduler import Scheduler, Step
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.engine import Engine
from umbra.executor.engine.step.model_drafts import Computed, ModelDrafter
from umbra.models.batch import Batch

SHARED_STEPS = 16  # decode steps whose times rank 0 shares at once


class Speculation:
    """`drafter` guesses tokens by the draft model, if there is one."""

    def __init__(self, engine: Engine, scheduler: Scheduler):
        self.engine, self.scheduler = engine, scheduler
        self.drafter = ModelDrafter(engine) if engine.model.guesses else None
        self._costs: list[DecodeCost] = []  # of decode steps that drafts have not learned from

    def begin(self, prompts: ListOf[Sequence], count: int) -> ModelDrafter | None:
        """Returns what guesses tokens after the next step, which has `count` sequences, if tokens are guessed then;
        `prompts` are those of them that do not decode."""
        drafts = self.scheduler.drafts
        if drafts and self.drafter and any(s.taken == s.num_computed for s in prompts):
            drafts.begin(count)
        return self.drafter if drafts and drafts.guesses else None

    def guess(self, drafter: ModelDrafter, step: Step, batch: Batch, computed: list[list[Computed]]) -> Guessed:
        """Guesses the next tokens of the sequences of `step`, which has just run on `batch` and `computed` tokens of
        each group."""
        start, finished, drafts = time.perf_counter(), step.finished_prompts, self.scheduler.drafts
        if drafts is None:
            return Guessed()
        lacking = {s.id for group in computed for s, begin, _ in group if s.taken != begin}
        asking = [s for s in finished if not s.finish_reason and s.id not in lacking]
        depth = drafts.depth(asking, len(finished)) if asking or step.decode else 0
        if step.decode and not depth:
            return Guessed(seconds=time.perf_counter() - start)
        room = {s.id: self.scheduler.room_for_guesses(s, depth) for s in asking if depth}
        with torch.inference_mode():
            drafted = drafter.guess(batch, computed, self.scheduler.by_group(asking), room, step.decode)
        for sequence, guesses in zip(asking, drafted, strict=True):
            sequence.guesses = array("q", guesses[: room.get(sequence.id, 0)])
        return Guessed(len(asking), max(room.values(), default=0), time.perf_counter() - start)

    def learn(self, cost: DecodeCost) -> None:
        """Lets drafts learn what a decode step costs. All ranks learn the times of rank 0, a few steps later where
        there are several ranks."""
        world, drafts = self.engine.parallel.world, self.scheduler.drafts
        if drafts is None:
            return
        if world.size == 1:
            drafts.took(cost)
            return
        self._costs.append(cost)
        if len(self._costs) == SHARED_STEPS:
            own = [[cost.seconds, cost.guessed.seconds] for cost in self._costs]
            times = torch.tensor(own, device=self.engine.platform.device)
            shared = world.gather_rows(times, None)[:SHARED_STEPS].tolist()
            for cost, (seconds, guessing) in zip(self._costs, shared, strict=True):
                drafts.took(DecodeCost(cost.rows, seconds, cost.guessed._replace(seconds=guessing)))
            self._costs.clear()

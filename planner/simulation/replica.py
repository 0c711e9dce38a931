"""One copy of the model: the real scheduler, its pages and kept prefixes. Only its steps take modelled time.

Decode steps in which every sequence gets one more token follow each other by the hundred. The scheduler takes such a
run as it takes a decode step with drafts that all come true: one step of several tokens for each sequence. A run ends
before anything else can happen: with the last token of a sequence, when memory might not suffice for all, when experts
are to be moved, or with the step in which a request comes.
"""

import bisect
import functools
import itertools
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from umbra.executor.engine.drafts.drafts import Drafts
from umbra.executor.engine.memory.expert_totals import ExpertTotals
from umbra.executor.engine.memory.memory_split import MemorySplit
from umbra.executor.engine.memory.pages import PagePool
from umbra.executor.engine.schedule.prompt_costs import PromptCosts, amounts, amounts_of, first_prompt, next_prompt
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.engine.schedule.scheduler import Scheduler, Step
from umbra.executor.engine.schedule.sequence import Sequence, new_sequence
from umbra.executor.engine.step.timings import PrefillRate
from umbra.executor.plan.batch_limits import Limits
from umbra.planner.simulation.experts import SimulatedExperts
from umbra.planner.simulation.steps import StepTimes
from umbra.planner.simulation.traffic import Arrival

SAMPLE_S = 60.0  # seconds between two looks at the memory
COLLECT_S = 0.25  # seconds between two sums of what experts did, as in a server


@functools.cache
def sampling_of(output: int) -> SamplingParams:
    return SamplingParams(max_tokens=output, ignore_eos=True)


class Certain(Drafts[Sequence]):
    """Drafts that always come true: tokens that nobody looks at. They stay where they are, and only the token after
    them is new."""

    def accept(self, sequence: Sequence, chosen: ListOf[int]) -> ListOf[int]:
        sequence.drafted = 0
        return chosen[-1:]


@dataclass
class StepRun:
    """Equal steps, one after another; several only if all sequences decode."""

    step: Step
    start: float
    ends: list[float]  # the time at which each step ends
    exposed: float  # seconds of all steps in which the devices wait for shadow experts


@dataclass(frozen=True)
class MemorySample:
    """The division of a replica's memory for keys, values and experts, in pages of its first rank."""

    at: float
    held: int  # by sequences
    kept: int  # prefixes of sequences that have ended
    experts: int
    free: int


class Replica:
    def __init__(
        self,
        number: int,
        limits: Limits,
        pages: int,
        times: StepTimes,
        shadowed: Callable[[], SimulatedExperts] | None = None,
        pause_s: float = 0.0,
    ):
        """`pages` is the number of KV pages of each data-parallel group; with experts that have shadows, which
        `shadowed` makes for each life of the replica, these say how many there are. With `pause_s`, steps have as many
        prompt tokens in steps in which others decode as a server would give them to keep those waiting about so
        long."""
        self.number, self.limits, self.pages, self.times, self.shadowed = number, limits, pages, times, shadowed
        self.pause_s = pause_s
        self.samples: list[MemorySample] = []
        self.preemptions = self.steps = self.cached_tokens = 0
        self.busy = 0.0  # seconds of steps so far
        self.now = self._sampled = self._collected = 0.0
        self._certain = Certain(0)
        self.start()

    def start(self) -> None:
        """An empty scheduler, as after a restart of the ranks."""
        self.experts = self.shadowed() if self.shadowed else None
        pages = (
            self.experts.pages if self.experts else PagePool(self.pages, self.limits.page_size, self.limits.set_pages)
        )
        self.scheduler = Scheduler(self.limits, (), pages)
        self.totals = ExpertTotals(self.experts.shadows) if self.experts else None
        self.memory_split = None
        if self.experts and self.totals and self.experts.elastic and self.limits.prefixes:
            self.memory_split = MemorySplit(
                self.scheduler.caches, self.totals, self.times.prompt_step_s, lambda: self.now
            )
        self.prefill_rate = PrefillRate(self.limits.page_size)
        self.sequences: dict[int, Sequence] = {}
        self.run: StepRun | None = None  # the one that is under way
        self.prompt_costs = self._warm_up() if self.pause_s else None

    def _warm_up(self) -> PromptCosts:
        """Returns the costs that a server has learned from the prompts of its warm-up."""
        prompt_costs, limits = PromptCosts(), self.limits
        page, longest = limits.page_size, limits.max_sequence_length
        length = first_prompt(page, longest)
        while length:
            took = 0.0
            for cached in range(0, length, most := limits.prefill_tokens or length):
                tokens = min(most, length - cached)
                seconds = self.times.prefill(tokens, cached, self.times.layout.sizes.resident)
                prompt_costs.learn(amounts([(tokens, cached)]), seconds)
                took += seconds
            length = next_prompt(length, took, page, self.pages, longest)
        return prompt_costs

    def add(self, id: int, arrival: Arrival) -> None:
        sequence = new_sequence(id, Request(arrival.prompt, sampling_of(arrival.output)))  # type: ignore[arg-type]
        self.scheduler.add(sequence)
        self.sequences[id] = sequence

    def begin(self, now: float) -> float | None:
        """Begins the next steps. -> when they end; None if nothing is left to do"""
        self.now = now
        if self.experts:
            self.experts.begin(now)
        if self.memory_split:
            if self.prefill_rate.value:
                self.memory_split.decide(self.limits.page_size / self.prefill_rate.value)
            self.scheduler.expert_pages = self.memory_split.expert_pages
        if self.prompt_costs:
            running, limits = self.scheduler.running, self.limits
            self.scheduler.mixed_tokens = self.prompt_costs.mixed_tokens(
                running, limits.page_size, self.pause_s, limits.prefill_tokens
            )
        step = self.scheduler.schedule()
        self.preemptions += len(self.scheduler.preempted)
        if step is None:
            return None
        self.scheduler.reserve(step.sequences)
        share, exposed = self.times.layout.sizes.resident, 0.0
        if self.experts:
            share = self.experts.share(sum(s.new_tokens for s in step.sequences))
        if step.decode:
            seconds, exposed = self.times.decode_steps(step, self.limits.groups, share, self._alike(step))
        else:
            seconds = [self.times.seconds(step, self.limits.groups, share)]
            if self.prompt_costs:
                self.prompt_costs.learn(amounts_of(step.sequences), seconds[0])
        ends = list(itertools.accumulate(seconds, initial=now))[1:]
        self.run = StepRun(step, now, ends, exposed)
        return ends[-1]

    def _alike(self, step: Step) -> int:
        """Returns how many steps like this one follow each other, with it, unless a request comes."""
        scheduler, size = self.scheduler, self.limits.page_size
        left = min(s.longest - len(s.ids) for s in step.sequences)
        if left == 1 or self.limits.set_pages:  # each step has its states
            return 1
        sets = len(self.limits.windows)
        # Besides the next token, in promised pages. Those of windows suffice for one step's tokens only.
        least = 0 if sets > 1 else min(s.covered - len(s.ids) for s in step.sequences)
        for group, sequences in enumerate(scheduler.by_group(step.sequences)):
            if sequences and left > 1 + least:
                spare = scheduler.pools[group].pages - scheduler.committed(group)
                left = min(left, 1 + max(least, spare // (len(sequences) * sets) * size))
        if self.experts and left > 1:
            left = min(left, self.experts.alike())
            taken = sum(max(0, -(-(s.num_computed + left) // size) - len(s.blocks)) for s in step.sequences)
            if taken >= self.experts.shadows.arena.free_frames:
                return 1  # a step in between may evict experts
        return left

    def cut(self, now: float) -> float | None:
        """Lets the steps that are under way end with the one that runs at `now`. -> when it ends; None: nothing
        changes"""
        if self.run is None or len(self.run.ends) == 1:
            return None
        count = bisect.bisect_left(self.run.ends, now) + 1
        if count >= len(self.run.ends):
            return None
        self.run.exposed *= count / len(self.run.ends)
        del self.run.ends[count:]
        return self.run.ends[-1]

    def end(self) -> Iterable[tuple[int, bool]]:
        """Ends the steps that are under way. -> (id, whether it was the last) of each request that got a token"""
        run, self.run = self.run, None
        if run is None:
            return []
        step, count, seconds = run.step, len(run.ends), run.ends[-1] - run.start
        self.now = run.ends[-1]
        self.busy += seconds
        self.steps += count
        prompt_tokens = 0 if step.decode else sum(s.new_tokens for s in step.sequences if not s.decoding)
        self.prefill_rate.learn(prompt_tokens, seconds)
        if count > 1:
            self._draft(step, count - 1)
        if self.experts and self.totals:
            self.experts.end(count, len(step.sequences) if step.decode else 0, run.exposed)
            self.totals.steps += count - 1  # its record has them as one
            self.totals.prefilled(prompt_tokens)
        self.scheduler.drafts = self._certain if count > 1 else None
        events = self.scheduler.commit(step, array("q", bytes(8 * count * len(step.finished_prompts))))
        self.scheduler.drafts = None
        if self.now - self._collected >= COLLECT_S:
            self._collect()
        if self.now >= self._sampled:
            self._sampled = (self.now // SAMPLE_S + 1) * SAMPLE_S
            self._sample()
        for event in events:
            if event.finish_reason:
                self.cached_tokens += event.cached_tokens
                del self.sequences[event.id]
        return [(event.id, bool(event.finish_reason)) for event in events]

    def _draft(self, step: Step, more: int) -> None:
        """Gives each sequence `more` tokens to the one that it takes in the step, with the pages for them."""
        tokens = array("q", bytes(8 * more))
        for sequence in step.sequences:
            sequence.ids.extend(tokens)
            sequence.drafted = more
        self.scheduler.grow(step.sequences)
        self.scheduler.reserve(step.sequences)

    def _collect(self) -> None:
        self._collected = self.now
        if self.totals:
            self.totals.collect()

    def _sample(self) -> None:
        cache, pool = self.scheduler.caches[0], self.scheduler.pools[0]
        held, kept, pages, experts = cache.held, cache.kept, pool.pages, 0
        if self.experts:
            arena = self.experts.shadows.arena
            pages, experts = arena.frames, arena.slot_frames
        self.samples.append(MemorySample(self.now, held, kept, experts, pages - held - kept - experts))

    def lose(self, now: float) -> list[int]:
        """The replica fails: its requests are lost. -> their ids"""
        if self.run:
            self.steps += bisect.bisect_right(self.run.ends, now)
            self.busy += now - self.run.start
        lost = list(self.sequences)
        self.start()
        return lost

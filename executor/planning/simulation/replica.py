"""One copy of the model: the real scheduler, its pages and kept prefixes. Only its steps take modelled time."""

from collections.abc import Callable, Iterable

from executor.engine.pace import WARM_UP_PART, WARM_UP_S, WARM_UP_TOKENS, Pace, amounts, amounts_of
from executor.engine.pages import PagePool
from executor.engine.request import Request, SamplingParams
from executor.engine.scheduler import Limits, Scheduler, Step
from executor.engine.sequence import Sequence, new_sequence
from executor.planning.simulation.experts import SimulatedExperts
from executor.planning.simulation.steps import StepTimes
from executor.planning.simulation.traffic import Arrival

SAMPLED = 64


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
        prompt tokens beside others that decode as a server would give them to keep those waiting about so long."""
        self.number, self.limits, self.pages, self.times, self.shadowed = number, limits, pages, times, shadowed
        self.pause_s = pause_s
        self.resident: list[float] = []  # shares of experts at the ends of steps, one of SAMPLED steps
        self.preemptions = self.steps = self.found = 0
        self.busy = 0.0  # seconds of steps so far
        self.start()

    def start(self) -> None:
        """An empty scheduler, as after a restart of the ranks."""
        self.experts = self.shadowed() if self.shadowed else None
        pages = self.experts.pages if self.experts else PagePool(self.pages, self.limits.page_size)
        self.scheduler = Scheduler(self.limits, (), pages)
        if self.experts:  # where a server's judgement of the shares begins; it is not simulated
            self.scheduler.expert_pages = pages.pages // 2
        self.sequences: dict[int, Sequence] = {}
        self.step: Step | None = None  # the one that is running
        self.pace = self._warm_up() if self.pause_s else None

    def _warm_up(self) -> Pace:
        """What a server's warm-up learns of the times of prompts."""
        pace, limits = Pace(), self.limits
        page, longest = limits.page_size, limits.max_sequence_length
        length, most = min(max(WARM_UP_TOKENS, page), longest - 1), page * self.pages // WARM_UP_PART
        while length:
            took = 0.0
            for cached in range(0, length, chunk := limits.prefill_tokens or length):
                tokens = min(chunk, length - cached)
                seconds = self.times.prefill(tokens, cached, self.times.layout.sizes.resident)
                pace.learn(amounts([(tokens, cached)]), seconds)
                took += seconds
            length = 2 * length if took < WARM_UP_S and 2 * length <= min(longest - 1, most) else 0
        return pace

    @property
    def load(self) -> int:
        return len(self.sequences)

    def add(self, id: int, arrival: Arrival) -> None:
        sampling = SamplingParams(max_tokens=arrival.output, ignore_eos=True)
        sequence = new_sequence(id, Request(arrival.prompt, sampling))  # type: ignore[arg-type]
        self.scheduler.add(sequence)
        self.sequences[id] = sequence

    def begin(self, now: float) -> float | None:
        """Begins the next step. -> its seconds; None if nothing is left to do"""
        if self.experts:
            self.experts.begin(now)
        if self.pace:
            running, limits = self.scheduler.running, self.limits
            self.scheduler.mixed_tokens = self.pace.chunk(
                running, limits.page_size, self.pause_s, limits.prefill_tokens
            )
        self.step = self.scheduler.schedule()
        self.preemptions += len(self.scheduler.preempted)
        if self.step is None:
            return None
        self.scheduler.reserve(self.step.sequences)
        share = self.times.layout.sizes.resident
        if self.experts:
            share = self.experts.route(sum(s.new_tokens for s in self.step.sequences))
        seconds = self.times.seconds(self.step, self.limits.groups, share)
        if self.pace and not self.step.decode:
            self.pace.learn(amounts_of(self.step.sequences), seconds)
        self.busy += seconds
        self.steps += 1
        return seconds

    def end(self) -> Iterable[tuple[int, bool]]:
        """Ends the running step. -> (id, whether it was the last) of each request that got a token"""
        step, self.step = self.step, None
        if step is None:
            return []
        if self.experts:
            self.experts.end(step.decode)
            if self.steps % SAMPLED == 0:
                self.resident.append(self.experts.resident)
        events = self.scheduler.commit(step, [0] * len(step.finished_prompts))
        for event in events:
            if event.finish_reason:
                self.found += event.found
                del self.sequences[event.id]
        return [(event.id, bool(event.finish_reason)) for event in events]

    def lose(self) -> list[int]:
        """The replica fails: its requests are lost. -> their ids"""
        lost = list(self.sequences)
        self.start()
        return lost

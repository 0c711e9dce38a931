"""Splits memory between cached prefixes and experts: rank 0 decides how many pages prefixes leave to experts, from what
one more page is worth to each.

Both worths are seconds that are saved in a second. A page of prefixes saves its prefill each time that a prompt finds
it. A page of experts saves the wait for the shadow pool each time that a decode step uses one of them, and what steps
with prompts, which use nearly all experts, take longer without it. Each is measured at the margin: for the pages
(experts) that would come next, and for those that would go next. The share moves by one margin at a time, and only if
what comes is worth clearly more than what goes, so that it rests where both are worth alike.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as ListOf

import numpy as np

from umbra.executor.engine.memory.expert_totals import ExpertTotals
from umbra.executor.engine.memory.prefixes import MARGIN, PageCache

DECIDE_S = 1.0  # seconds between two decisions
MEMORY = 0.95  # what a measurement keeps of the one before it: half of it is gone after about 14 decisions
CLEARLY = 1.5  # the share moves if what comes is worth this many times what goes


class MemorySplit:
    def __init__(
        self,
        caches: ListOf[PageCache],
        experts: ExpertTotals,
        prompt_step_s: Callable[[float, float], float],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`prompt_step_s` returns the seconds that a step with so many prompt tokens is expected to take if a given
        share of the experts is resident, or the part of them that depends on it. `clock` returns seconds; a simulation
        has its own."""
        self.caches, self.experts, self.prompt_step_s, self.clock = caches, experts, prompt_step_s, clock
        self.pages = caches[0].pool.pages
        self.margin = max(1, self.pages // MARGIN)
        self.expert_pages = self.pages // 2
        self._at, self._before = clock(), self._counts()
        # Per second: prefix hits in the marginal pages, misses that a larger cache would have hit, decode steps, steps
        # with prompts, prompt tokens.
        self._rates = np.zeros(5)

    def decide(self, prefill_s: float) -> None:
        """To be called between steps. `prefill_s` is the seconds that the prefill of a page takes."""
        now = self.clock()
        if now - self._at < DECIDE_S:
            return
        counts = self._counts()
        rates = (counts - self._before) / (now - self._at)
        self._rates = MEMORY * self._rates + (1 - MEMORY) * rates
        self._at, self._before = now, counts
        hits, missed, steps, prompts, tokens = self._rates.tolist()
        waits = (uses * steps * self.experts.miss_s for uses in self.experts_at_margin())
        longer = self.prompts_at_margin(tokens / prompts) if prompts else (0.0, 0.0)
        come, go = (wait + prompts * more for wait, more in zip(waits, longer, strict=True))
        missed *= self.margin / self.caches[0].most_dropped
        self.move(hits * prefill_s, missed * prefill_s, come, go)

    def move(self, prefixes_go: float, prefixes_come: float, experts_come: float, experts_go: float) -> None:
        """Moves the share, given what a margin of pages is worth to those that would come and to those that would
        go."""
        more, fewer = experts_come - CLEARLY * prefixes_go, prefixes_come - CLEARLY * experts_go
        if more > max(fewer, 0):
            self.expert_pages = min(self.pages, self.expert_pages + self.margin)
        elif fewer > 0:
            self.expert_pages = max(0, self.expert_pages - self.margin)

    def experts_at_margin(self) -> tuple[float, float]:
        """Uses in a decode step of the experts that would become resident, and of those that would leave, if experts
        had a margin of pages more or less."""
        shadows, count = self.experts.shadows, self.margin_experts
        here = shadows.in_slot.reshape(-1)
        uses = shadows.residency.forecast.lasting / shadows.settings.interval
        come, go = np.sort(uses[~here])[-count:], np.sort(uses[here])[:count]
        return float(come.clip(0).sum()), float(go.clip(0).sum())

    @property
    def margin_experts(self) -> int:
        """Number of experts that a margin of pages has room for."""
        arena = self.experts.shadows.arena
        return max(1, self.margin * arena.extent_slots // arena.extent_frames)

    def prompts_at_margin(self, tokens: float) -> tuple[float, float]:
        """Seconds that a step with so many prompt tokens would save with a margin of pages more for experts, and those
        that it would take longer with a margin less."""
        here = self.experts.shadows.in_slot
        share, margin = float(here.mean()), self.margin_experts / here.size
        fewer, now, more = (self.prompt_step_s(tokens, min(max(share + m, 0.0), 1.0)) for m in (-margin, 0.0, margin))
        return max(0.0, now - more), max(0.0, fewer - now)

    def _counts(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        hits = sum(cache.last_hits for cache in self.caches)
        missed = sum(cache.missed_hits for cache in self.caches)
        experts = self.experts
        return np.array([hits, missed, experts.steps, experts.prompt_steps, experts.prompt_tokens], dtype=np.float64)

"""Totals of this rank's shadow experts since the server began, without the record of every step, which would
grow for as long as the server runs."""

from umbra.cpu_offload.history import busy_ns, exposed_ns
from umbra.cpu_offload.manager import ShadowExperts


class ExpertTotals:
    def __init__(self, shadows: ShadowExperts):
        self.shadows = shadows
        self.restart()

    def restart(self) -> None:
        """Counts from now on."""
        self.steps = 0  # decode steps
        self.hits = self.misses = 0  # pairs of a token and its expert in decode steps
        self.exposed_s = 0.0  # for which decode steps waited for shadow experts
        self.prompt_steps = self.prompt_tokens = 0  # steps with prompts, and their tokens

    def prefilled(self, tokens: int) -> None:
        """A step had so many prompt tokens."""
        if tokens:
            self.prompt_steps += 1
            self.prompt_tokens += tokens

    def collect(self) -> None:
        """Adds up the steps that are recorded, and forgets them."""
        for step in self.shadows.history.steps:
            self.hits += int(step.hits.sum())
            self.misses += int(step.misses.sum())
            waited = exposed_ns(step) if step.times[:, 2].any() else busy_ns(step)
            self.exposed_s += float(waited.clip(0).sum()) / 1e9
            self.steps += 1
        self.shadows.forget()

    @property
    def miss_s(self) -> float:
        """Seconds for which a decode step waits for one miss."""
        return self.exposed_s / max(self.misses, 1)

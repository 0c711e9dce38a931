"""What the shadow experts of this rank have done since the server began, without the record of every step, which would
grow for as long as the server runs."""

import numpy as np

from cpu_offload.history import busy_ns, exposed_ns
from cpu_offload.manager import Offload
from executor.serving.messages import Residency

FADE = 0.8  # weight of the heat of the last snapshot in the next one


class ExpertTotals:
    def __init__(self, offload: Offload):
        self.offload = offload
        self.restart()
        self._heat = np.zeros(offload.counts.shape, np.float64)
        self._seen = offload.counts.copy()
        self._sent: Residency | None = None

    def restart(self) -> None:
        """Counts from now on."""
        self.steps = 0  # decode steps
        self.hits = self.misses = 0  # pairs of a token and its expert in decode steps
        self.exposed_s = 0.0  # for which decode steps waited for shadow experts

    def collect(self) -> None:
        """Adds up the steps that are recorded, and forgets them."""
        for step in self.offload.history.steps:
            self.hits += int(step.hits.sum())
            self.misses += int(step.misses.sum())
            waited = exposed_ns(step) if step.times[:, 2].any() else busy_ns(step)
            self.exposed_s += float(waited.clip(0).sum()) / 1e9
            self.steps += 1
        self.offload.forget()

    @property
    def miss_s(self) -> float:
        """Seconds for which a decode step waits for one miss."""
        return self.exposed_s / max(self.misses, 1)

    def fields(self) -> dict[str, int | float]:
        """The fields of State about experts and the arena that they share with the KV cache."""
        arena = self.offload.arena
        return {
            "experts_resident": int(self.offload.published.sum()),
            "experts": self.offload.published.size,
            "expert_hits": self.hits,
            "expert_misses": self.misses,
            "shadow_exposed_s": self.exposed_s,
            "arena_frames": arena.frames,
            "expert_frames": arena.slot_frames,
            "free_frames": arena.free_frames,
        }

    def changed(self) -> Residency | None:
        """A snapshot of which experts are resident and used; None if it is equal to the last one."""
        counts = self.offload.counts
        new = counts - self._seen
        if new.any():
            self._seen += new
            self._heat = FADE * self._heat + (1 - FADE) * new / new.sum()
        published, most = self.offload.published, self._heat.max() or 1.0
        found = Residency(
            layers=published.shape[0],
            experts=published.shape[1],
            resident=np.packbits(published.reshape(-1), bitorder="little").tobytes(),
            heat=np.round(255 * self._heat / most).astype(np.uint8).tobytes(),
        )
        if found == self._sent:
            return None
        self._sent = found
        return found

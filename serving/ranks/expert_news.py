"""The reports of rank 0 about shadow experts to the API server: totals, where experts are and how much they are
used."""

import numpy as np

from umbra.executor.engine.memory.expert_totals import ExpertTotals
from umbra.serving.ranks.messages import Residency

FADE = 0.8  # weight of the heat of the last snapshot in the next one


class ExpertNews:
    def __init__(self, totals: ExpertTotals):
        self.totals, self.shadows = totals, totals.shadows
        self._heat = np.zeros(self.shadows.counts.shape, np.float64)
        self._seen = self.shadows.counts.copy()
        self._sent: Residency | None = None

    def fields(self) -> dict[str, int | float]:
        """The fields of State about experts and the arena that they share with the KV cache."""
        arena, totals = self.shadows.arena, self.totals
        return {
            "experts_resident": int(self.shadows.published.sum()),
            "experts": self.shadows.published.size,
            "expert_hits": totals.hits,
            "expert_misses": totals.misses,
            "shadow_exposed_s": totals.exposed_s,
            "arena_frames": arena.frames,
            "expert_frames": arena.slot_frames,
            "free_frames": arena.free_frames,
        }

    def changed(self) -> Residency | None:
        """A snapshot of which experts are resident and used; None if it is equal to the last one."""
        counts = self.shadows.counts
        new = counts - self._seen
        if new.any():
            self._seen += new
            self._heat = FADE * self._heat + (1 - FADE) * new / new.sum()
        published, most = self.shadows.published, self._heat.max() or 1.0
        residency = Residency(
            layers=published.shape[0],
            experts=published.shape[1],
            resident=np.packbits(published.reshape(-1), bitorder="little").tobytes(),
            heat=np.round(255 * self._heat / most).astype(np.uint8).tobytes(),
        )
        if residency == self._sent:
            return None
        self._sent = residency
        return residency

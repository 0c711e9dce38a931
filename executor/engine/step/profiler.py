"""Traces of the first steps of each phase, one file a step, for Perfetto or chrome://tracing."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

STEPS = 4  # traced steps of each phase: enough to see a steady step, and the files stay small enough to open


class Profiler:
    """Writes a trace of each of the first STEPS steps of a phase. If not `enabled`, a step costs one comparison."""

    def __init__(self, enabled: bool, folder: Path, rank: int):
        self.enabled, self.folder, self.rank = enabled, folder, rank
        self.seen: Counter[str] = Counter()

    @contextmanager
    def step(self, phase: str) -> Iterator[None]:
        if not self.enabled or self.seen[phase] >= STEPS:
            yield
            return
        with torch.profiler.profile(record_shapes=True) as profile:
            yield
        path = self.folder / f"trace_{phase}{self.seen[phase]}_rank{self.rank}.json"
        self.seen[phase] += 1
        profile.export_chrome_trace(str(path))

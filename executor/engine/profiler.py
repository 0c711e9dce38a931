"""Traces of the first steps of each phase, one file a step, for Perfetto or chrome://tracing."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

STEPS = 4  # of each phase: enough to see a steady step, small enough to open


class Profiler:
    """`enabled: false` costs one comparison a step."""

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

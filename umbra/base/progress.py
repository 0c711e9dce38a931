"""Shows how far something is: a bar on a terminal, lines elsewhere, or messages to a process that shows them."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_S = 5.0  # seconds between two lines, and before the first one
TOLD_S = 0.2  # seconds between two messages

# Those that show the progress of this process in its place: each gets what is done, and the share that is.
listeners: list[Callable[[str, float], None]] = []


class ProgressBar:
    """The progress of one task. `total` is the number of its `unit`s."""

    def __init__(self, what: str, total: float, unit: str, shown: bool = True):
        self.what, self.total, self.unit, self.shown = what, total, unit, shown
        self.done = 0.0
        self._at = time.monotonic()  # of the last line or message
        self._bar = None
        if shown and not listeners and sys.stderr.isatty():
            from tqdm import tqdm  # imported only where somebody sees it

            self._bar = tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B", leave=False)

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.total) if self.total else 1.0

    def reach(self, done: float) -> None:
        """So much is done in all."""
        if self._bar:
            self._bar.update(done - self.done)
        self.done = done
        if not self.shown or self._bar or time.monotonic() - self._at < (TOLD_S if listeners else LINE_S):
            return
        self._at = time.monotonic()
        for tell in listeners:
            tell(self.what, self.share)
        if not listeners:
            print(f"{self.what}: {self.share:.0%}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar:
            self._bar.close()


@contextmanager
def progress(what: str, total: float, unit: str, shown: bool = True) -> Iterator[ProgressBar]:
    """The progress of a task that ends with the `with` block."""
    task = ProgressBar(what, total, unit, shown)
    try:
        yield task
    finally:
        task.close()

"""A fuzz target, and the outcomes that it may have: an answer or one line of error, within bounds of time, memory and
files."""

import gc
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from umbra.base.errors import LONGEST, UserError

CPU_S = 2.0  # of this process's threads, for one input
MEMORY = 256 << 20  # bytes beyond twice the input's
PEAK = re.compile(rb"VmHWM:\s+(\d+) kB")
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # files on a disk take a hundred times as long
LARGE = 1 << 16  # bytes of an input whose memory is measured from where it begins


@dataclass(frozen=True)
class Target:
    """`run` reads one input, and raises nothing but UserError. Inputs of most targets are JSON, for which there are
    mutations of their own."""

    run: Callable[[bytes], None]
    seeds: list[bytes]
    json: bool = True
    longest: int = 4096  # bytes of an input


class Violation(AssertionError):
    """An outcome that no input may have."""


class Bounds:
    """Runs a target's inputs, one by one, in `folder`, where it keeps its files. If temporary files are made there as
    well, they count where they are left."""

    def __init__(self, make: Callable[[Path], Target], folder: Path):
        self.folder = str(folder)
        self.target = make(folder)
        for seed in self.target.seeds:  # what is imported and kept, once
            with _one_line():
                self.target.run(seed)
        self.files = _files(self.folder)

    def __call__(self, data: bytes) -> None:
        """Raises Violation, or whatever the target raised."""
        if len(data) > LARGE:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # the most that was held counts from here on
        memory, start = _memory(), time.process_time()
        with _halted_after(4 * CPU_S), _one_line():
            self.target.run(data)
        if (took := time.process_time() - start) > CPU_S:
            raise Violation(f"{took:.1f} s of CPU")
        if (more := _memory() - memory) > 2 * len(data) + MEMORY:
            raise Violation(f"{more >> 20} MB of memory")
        if left := _files(self.folder) - self.files:
            raise Violation(f"left behind: {sorted(left)}")


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        text = str(error)
        if not text.isprintable() or len(text) > LONGEST:
            raise Violation(f"an error of {len(text)} characters: {text[:200]!r}") from error


@contextmanager
def _halted_after(seconds: float) -> Iterator[None]:
    """Endless loops end with a Violation after so much CPU time."""

    def halt(number: int, frame: FrameType | None) -> None:
        raise Violation(f"still runs after {seconds} s of CPU")

    before = signal.signal(signal.SIGPROF, halt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _memory() -> int:
    """The most bytes that this process has held."""
    with open("/proc/self/status", "rb", buffering=0) as file:
        peak = PEAK.search(file.read(4096))
    assert peak
    return 1024 * int(peak[1])


def _files(folder: str) -> set[str]:
    paths = set()
    with os.scandir(folder) as entries:  # a third of what os.walk takes
        for entry in entries:
            paths |= _files(entry.path) if entry.is_dir(follow_symlinks=False) else {entry.path}
    return paths

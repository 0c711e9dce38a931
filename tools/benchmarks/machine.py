"""The limits of this machine, measured in turn with the code that is compared with them.

A shared machine's memory can deliver 30 GB/s in one minute and 50 in the next, so a limit measured once at the start is
of little use: every round measures the limits and the subject one right after the other, and ratios are those of
the medians.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from umbra.ops.cpu.engine import native

MOST_OTHERS, PATIENCE = 0.05, 20
TICKS = 0.02  # seconds; the kernel counts in hundredths


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def others_seconds() -> float:
    """CPU seconds that other processes have used so far, on any core, plus a constant."""
    used = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4]  # user, nice and system time of all cores
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK") - time.process_time()


def take_turns(
    runs: Mapping[str, Callable[[], object]], seconds: float, least: int, pause: float = 0.0, pids: Sequence[int] = ()
) -> dict[str, list[float]]:
    """Seconds of each of `runs` in every round: in `least` rounds and for `seconds`, after a round that is not counted.

    A pause of `pause` seconds before each run lets the threads of the previous run go to sleep. Rounds in which other
    processes use more than MOST_OTHERS of a core do not count either, until they have taken PATIENCE times `seconds`;
    those of `pids` belong to the runs.
    """

    def others() -> float:
        return others_seconds() - sum(map(cpu_seconds, pids))

    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    counted, disturbed = 0.0, 0.0  # seconds
    while counted < seconds or len(next(iter(times.values()))) < least:
        start, before, round = time.perf_counter(), others(), {}
        for name, run in runs.items():
            time.sleep(pause)
            round[name] = seconds_of(run)
        took = time.perf_counter() - start
        if others() - before > MOST_OTHERS * took + TICKS and disturbed < PATIENCE * seconds:
            disturbed += took
            continue
        counted += took
        for name, took_s in round.items():
            times[name].append(took_s)
    return times


def alternate(runs: Mapping[str, Callable[[], object]], seconds: float, least: int = 7) -> dict[str, float]:
    """Median seconds of each of `runs`, measured in turn."""
    return {name: statistics.median(times) for name, times in take_turns(runs, seconds, least).items()}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Statistics of theirs / ours in each pair of neighbouring turns: above 1, ours took less time."""
    quotients = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(quotients), "min": min(quotients), "max": max(quotients)}


ECHO = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while byte := os.read(0, 1):
    os.write(1, byte)
"""


def wake_seconds(cpu: int, other: int, rounds: int = 1000) -> float:
    """Median seconds until a process that waits on the core `other` has got a byte from one on the core `cpu`: half of
    the way through a pipe and back. Virtual machines differ by two orders of magnitude."""
    usual, times = os.sched_getaffinity(0), []
    there, back = os.pipe(), os.pipe()
    with subprocess.Popen([sys.executable, "-c", ECHO, str(other)], stdin=there[0], stdout=back[1]):
        for end in (there[0], back[1]):  # or nobody would notice that the other process has ended
            os.close(end)
        os.sched_setaffinity(0, {cpu})
        try:
            for _ in range(rounds):
                start = time.perf_counter()
                os.write(there[1], b".")
                os.read(back[0], 1)
                times.append((time.perf_counter() - start) / 2)
        finally:
            os.sched_setaffinity(0, usual)
            for end in (there[1], back[0]):
                os.close(end)
    return statistics.median(times)


class MachineLimits:
    """Plain reads of memory that no cache holds, and int8 multiply-adds on registers, on all threads of the pool."""

    READ_BYTES = 256 << 20
    MAC_ROUNDS = 2000

    def __init__(self) -> None:
        self._probe = native.ReadProbe(bytes=self.READ_BYTES)
        self._macs: int = native.mac_probe(rounds=self.MAC_ROUNDS)

    def read(self) -> None:
        self._probe.run()

    def multiply(self) -> None:
        native.mac_probe(rounds=self.MAC_ROUNDS)

    def read_gbps(self, seconds: float) -> float:
        return self.READ_BYTES / seconds / 1e9

    def int8_gmacs(self, seconds: float) -> float:
        return self._macs / seconds / 1e9


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process and its threads have used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # user and system time


class Others:
    """Measures the share of the cores that other processes use from now on. This process, its threads and its children
    do not count, the children once they have ended."""

    def __init__(self) -> None:
        self._start = self._totals()

    def _totals(self) -> tuple[float, float]:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return others_seconds() - children.ru_utime - children.ru_stime, time.perf_counter()

    def cores(self) -> float:
        used, clock = self._totals()
        return (used - self._start[0]) / max(clock - self._start[1], 1e-9)

"""Whether something grows: slopes with their errors, over hours."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = 12  # of samples that follow each other: what a process needs for a while alone is not in the least of a block
ERRORS = 2.23  # of a slope: 95 % of the estimates of 12 points lie within so many standard errors (Student's t, 10)
WARM = 0.25  # part of the time in which a process may still grow: until it has met everything that there is
JUDGED_S = 1800.0  # only what was seen for so long has a slope


@dataclass(frozen=True)
class Slope:
    """A line through the least values of blocks of samples."""

    seconds: float  # that it was fitted over
    level: float  # mean of the least values
    hourly: float  # growth in an hour
    error: float  # half of the 95 % interval of that

    @property
    def most(self) -> float:
        """The growth in an hour that the samples do not rule out."""
        return self.hourly + self.error


def slope(samples: Sequence[tuple[float, float]], warm: float = WARM) -> Slope | None:
    """Of (time in seconds, value), without the first part of the time. None: there are too few samples."""
    if not samples:
        return None
    begin = samples[0][0] + warm * (samples[-1][0] - samples[0][0])
    kept = [sample for sample in samples if sample[0] >= begin]
    if len(kept) < BLOCKS:
        return None
    bounds = [len(kept) * i // BLOCKS for i in range(BLOCKS + 1)]
    blocks = [kept[a:b] for a, b in itertools.pairwise(bounds)]
    times = [statistics.fmean(t for t, _ in block) / 3600 for block in blocks]
    values = [min(value for _, value in block) for block in blocks]
    mean_t, mean_v = statistics.fmean(times), statistics.fmean(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    if not spread:
        return None
    hourly = sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread
    rest = sum((v - mean_v - hourly * (t - mean_t)) ** 2 for t, v in zip(times, values, strict=True))
    error = ERRORS * (rest / (BLOCKS - 2) / spread) ** 0.5
    return Slope(kept[-1][0] - kept[0][0], mean_v, hourly, error)


def change(old: Sequence[float], new: Sequence[float], share: float) -> tuple[float, float]:
    """By what part of itself the value below which `share` lies has grown, and half of the 95 % interval of that: the
    values whose ranks lie 1.96 standard deviations of a binomial count beside it bound it."""
    found = []
    for values in (old, new):
        spread = 1.96 * (share * (1 - share) / len(values)) ** 0.5
        low, middle, high = (part(values, min(max(at, 0.0), 1.0)) for at in (share - spread, share, share + spread))
        found.append((middle, (high - low) / 2 / middle))
    (before, error), (after, more) = found
    return after / before - 1, (error**2 + more**2) ** 0.5 * after / before


def part(values: Sequence[float], share: float) -> float:
    """The value below which `share` of `values` lies; 0 without values."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0

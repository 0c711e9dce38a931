"""Which experts the next interval will use, learned from the routing counts of the past ones.

The forecast of an expert, in uses an interval, is a sum of three parts:

    lasting  = slow + a * (fast - slow)    two decayed frequencies; they follow traffic that shifts
    forecast = lasting + b * hint          the hint: what usually follows the experts used just now

`hint` is a linear model, one row of weights for each use of an expert of a few layers, updated where it erred by the
delta rule (normalised LMS): what sequences decoded together will use adds up, each by what it used. A frequency alone
cannot come near the optimum on real text: which token comes next, and so which experts, follows from the present one.

Each correction is believed as much as it has explained: `a` and `b` are the running least-squares slopes of the
error against the correction, cut to 0..1. On traffic without structure both fall to 0 and leave the slow frequency,
whose noise is small; so there is nothing for a policy to chase. Forecasts of all layers are comparable.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.integer]

FAST, SLOW = 32, 512  # half-lives of the frequencies, in intervals
PRIOR = 16  # intervals that the first guess, every expert alike, counts for
STEP = 0.03  # of an error is corrected at the next like occasion
SOURCES = 5  # layers that give hints: the last, and others evenly spread
WEIGHTS = 1 << 17  # most that are added up to a hint, those of the most used experts; bounds the time


class Forecast:
    def __init__(self, layers: int, experts: int):
        size = layers * experts
        self.intervals = 0
        self._slow, self._fast = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self._sources = np.unique(np.linspace(layers - 1, 0, min(layers, SOURCES)).round().astype(np.int64))
        self._weights = np.zeros((len(self._sources) * experts, size), np.float32)
        self._most_rows = max(1, WEIGHTS // size)
        self._rows = np.zeros(0, np.int64)  # experts of the sources used in the last interval
        self._uses = np.zeros(0, np.float32)  # how often each
        self._hint = np.zeros(size, np.float32)
        self._trend_slope, self._hint_slope = Slope(), Slope()
        self.lasting = self._slow.copy()  # (layers * experts)

    @property
    def next(self) -> Floats:
        """Uses in the next interval. (layers * experts)"""
        return self.lasting + self._hint_slope.value * self._hint

    def learn(self, counts: Counts) -> None:
        """The routing of one interval. (layers, experts)"""
        seen = counts.reshape(-1).astype(np.float32)
        if not self.intervals:
            self._slow[:] = self._fast[:] = self.lasting = np.full_like(seen, seen.mean())
        self._trend_slope.learn(seen - self._slow, self._fast - self._slow)
        error = seen - self.lasting
        if len(self._rows):
            self._hint_slope.learn(error, self._hint)
            step = STEP / float(self._uses.dot(self._uses)) * (error - self._hint)
            for uses in set(self._uses.tolist()):  # one or two, of few sequences
                self._weights[self._rows[self._uses == uses]] += uses * step
        self.intervals += 1
        for frequency, half_life in ((self._slow, SLOW), (self._fast, FAST)):
            frequency += max(1 - 0.5 ** (1 / half_life), 1 / (self.intervals + PRIOR)) * (seen - frequency)
        self.lasting = self._slow + self._trend_slope.value * (self._fast - self._slow)
        context = counts[self._sources].reshape(-1)
        self._rows = np.flatnonzero(context)
        if len(self._rows) > self._most_rows:
            self._rows = self._rows[np.argsort(-context[self._rows], kind="stable")[: self._most_rows]]
        self._uses = context[self._rows].astype(np.float32)
        self._hint = np.zeros_like(seen)
        for uses in set(self._uses.tolist()):
            self._hint += uses * self._weights.take(self._rows[self._uses == uses], axis=0).sum(axis=0)


class Slope:
    """How much of a correction is to be believed: least squares through 0, the past decayed."""

    def __init__(self) -> None:
        self.value = 0.0  # 0..1
        self._product, self._square = 0.0, 0.0

    def learn(self, error: Floats, correction: Floats) -> None:
        """`error` is what the correction should have been."""
        decay = 0.5 ** (1 / SLOW)
        self._product = decay * self._product + float(error.dot(correction))
        self._square = decay * self._square + float(correction.dot(correction))
        if self._square:
            self.value = min(max(self._product / self._square, 0.0), 1.0)

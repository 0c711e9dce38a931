"""Forecasts how often each expert will be used in the next interval, from the routing counts of past intervals.

The forecast, in uses per interval, has three parts:

    lasting  = slow + a * (fast - slow)    two exponentially decayed frequencies, to follow traffic that shifts
    forecast = lasting + b * hint          hint: what usually follows the experts that were used in the last interval

The hint is a linear model. Each expert of a few layers has a row of weights, one for every expert; the rows of the
experts used in the last interval are added up, so that several sequences decoded together each contribute. Weights are
updated by the delta rule (normalised LMS). A frequency alone is far from optimal on real text, where the next token,
and so its experts, depends on the present one.

`a` and `b`, in 0..1, scale each correction by how much of the error it has explained so far: they are running
least-squares slopes of error against correction. On traffic without structure both fall to 0, which leaves the slow
frequency with its small noise, so that a policy does not follow noise. Forecasts of different layers are comparable.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.integer]

FAST, SLOW = 32, 512  # half-lives of the frequencies, in intervals
PRIOR = 16  # weight, in intervals, of the initial guess that all experts are used equally often
STEP = 0.03  # the part of an error that one update corrects
SOURCES = 5  # layers whose experts have rows of weights: the last, and others evenly spread
WEIGHTS = 1 << 17  # most weights that a hint adds up, most used experts first: bounds the time of a forecast


class Forecast:
    def __init__(self, layers: int, experts: int):
        size = layers * experts
        self.intervals = 0
        self._slow, self._fast = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self._sources = np.unique(np.linspace(layers - 1, 0, min(layers, SOURCES)).round().astype(np.int64))
        self._weights = np.zeros((len(self._sources) * experts, size), np.float32)
        self._most_rows = max(1, WEIGHTS // size)
        self._rows = np.zeros(0, np.int64)  # rows of the experts that were used in the last interval
        self._uses = np.zeros(0, np.float32)  # how often each of these experts was used
        self._hint = np.zeros(size, np.float32)
        self._trend_slope, self._hint_slope = Slope(), Slope()
        self.lasting = self._slow.copy()  # (layers * experts)

    @property
    def next(self) -> Floats:
        """The forecast number of uses in the next interval. (layers * experts)"""
        return self.lasting + self._hint_slope.value * self._hint

    def learn(self, counts: Counts) -> None:
        """Updates the forecast with one interval's routing counts. (layers, experts)"""
        seen = counts.reshape(-1).astype(np.float32)
        if not self.intervals:
            self._slow[:] = self._fast[:] = self.lasting = np.full_like(seen, seen.mean())
        self._trend_slope.learn(seen - self._slow, self._fast - self._slow)
        error = seen - self.lasting
        if len(self._rows):
            self._hint_slope.learn(error, self._hint)
            step = STEP / float(self._uses.dot(self._uses)) * (error - self._hint)
            for uses in set(self._uses.tolist()):  # with few sequences there are few different values
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
    """The part of a correction to apply: a least-squares slope through 0, in which the past decays."""

    def __init__(self) -> None:
        self.value = 0.0  # 0..1
        self._product, self._square = 0.0, 0.0

    def learn(self, error: Floats, correction: Floats) -> None:
        """Updates the slope with one interval; `error` is what the correction should have been."""
        decay = 0.5 ** (1 / SLOW)
        self._product = decay * self._product + float(error.dot(correction))
        self._square = decay * self._square + float(correction.dot(correction))
        if self._square:
            self.value = min(max(self._product / self._square, 0.0), 1.0)

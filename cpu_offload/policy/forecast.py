"""Forecasts how often each expert will be used in one of the next intervals, from the routing of steps so far.

The forecast, in uses per interval, combines exponentially decayed frequencies f1 .. f5 of growing half-lives:

    forecast = f5 + a1 (f1 - f5) + ... + a4 (f4 - f5) + a5 hint

A prompt's tokens count as so many decode steps of one of the sequences that run, and replace what was kept of the one
that had its place before, except in the slowest frequency. They replace no more however long the prompt is: the other
sequences keep their shares.

The hint is a linear model of what usually follows a token: each of the tokens that sequences take next has a row of
weights, one for every expert. Rows are updated by the delta rule (normalised LMS); the tokens used last have rows.

a1 .. a5 are running least-squares coefficients, weighted by how much uses vary, and drawn towards `BELIEVED` until
there is evidence. On traffic without structure they fall to 0, which leaves the slow frequency with its small noise, so
that a policy does not follow noise. Forecasts of different layers are comparable.

The forecast is for the next interval.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.integer]
Indices = npt.NDArray[np.int64]

HALF_LIVES = 0.2, 4, 32, 512, 1024  # of the frequencies, in intervals; the first is the last interval's use
BELIEVED = 0.0, 0.0, 0.3, 0.7, 0.0  # the coefficients before any evidence
PRIOR = 16  # weight, in intervals, of these and of the initial guess that all experts are used equally often
MEMORY = 512  # half-life of what the coefficients are computed from, in intervals
LEAST = 1e-6  # uses
STEP = 0.1  # the part of an error that one update of the hint corrects
HINTS = 1 << 26  # most bytes of weights


@dataclass(frozen=True)
class PastForecast:
    """A forecast, to be compared with what happens."""

    slow: Floats
    corrections: Floats  # (5, layers * experts): what a1 .. a5 multiply
    rows: list[int]  # of the tokens that gave the hint
    result: Floats

    @property
    def scale(self) -> Floats:
        """The reciprocal of each error's standard deviation: uses vary as counts do."""
        return (self.slow.clip(0) + self.slow.mean() / 10 + LEAST) ** -0.5


class Forecast:
    def __init__(self, layers: int, experts: int):
        self.experts, size = experts, layers * experts
        self.intervals = self.decoded = 0  # of all steps, and of decode steps
        self._frequencies = np.zeros((len(HALF_LIVES), size), np.float32)
        self._rows: OrderedDict[int, int] = OrderedDict()  # token: its row of weights, in order of last use
        self._weights = np.zeros((max(1, HINTS // (4 * size)), size), np.float32)
        self._fit = Fit(BELIEVED)
        slow = self._frequencies[-1]
        self._made = PastForecast(slow, np.zeros((len(BELIEVED), size), np.float32), [], slow)

    @property
    def coming(self) -> Floats:
        """The forecast number of uses in the next interval. (layers * experts)"""
        return self._made.result

    @property
    def lasting(self) -> Floats:
        """The forecast number of uses in any later interval, regardless of the hint and the last few steps."""
        past = self._made
        return past.slow + self._fit.values[1:-1] @ past.corrections[1:-1]

    def learn(self, counts: Counts, tokens: Sequence[int] = ()) -> None:
        """Learns an interval of decode steps with these routing counts (layers, experts). `tokens` are those that the
        sequences take next."""
        seen, past = counts.reshape(-1).astype(np.float32), self._made
        if not self.intervals:
            self._frequencies[:] = seen.mean()
        error = seen - past.slow
        self._fit.learn(past.corrections * past.scale, error * past.scale)
        if past.rows:
            self._weights[past.rows] += STEP / len(past.rows) * (error - past.corrections[-1])
        self._frequencies += self._rates(1)[:, None] * (seen - self._frequencies)
        self.intervals, self.decoded = self.intervals + 1, self.decoded + 1
        self._made = self._make(tokens)

    def learn_long(
        self, routed: Sequence[Indices | None], lengths: Sequence[int], interval: int, tokens: Sequence[int] = ()
    ) -> None:
        """Learns a step with prompts. `routed` has each layer's ids (rows, k), of which those that are no experts do
        not count, of sequences with `lengths` tokens each; None: not known. `interval` steps are an interval; `tokens`
        as of `learn`."""
        most, bins = max(lengths) / interval, self.experts + 1  # the last one for what does not count
        left = (1 - self._rates(most)) ** (1 / interval)  # what a token leaves of each frequency of its sequence
        # Tokens are counted in blocks by their distance from the last one of their sequence: 0, 1-2, 3-6, ...
        blocks, weights, kept, count = [], [], np.zeros(len(HALF_LIVES)), 0
        for length in lengths:
            block = np.frexp(np.arange(length, 0, -1))[1].astype(np.int64) - 1
            ends = np.append(2 ** np.arange(block[0] + 1) - 1, length)
            old = left**length * np.append(np.full(len(left) - 1, PRIOR / (PRIOR + length - 1)), 1)
            shares = np.diff(-(left[:, None] ** ends), axis=1) * ((1 - old) / (1 - left**length))[:, None]
            weights.append(shares / np.diff(ends))
            blocks.append(bins * (count + block[:, None]))
            kept, count = kept + old / len(lengths), count + int(block[0]) + 1
        block, weight = np.concatenate(blocks), interval * np.concatenate(weights, axis=1)
        frequencies = self._frequencies.reshape(len(HALF_LIVES), -1, self.experts)
        for layer, ids in enumerate(routed):
            if ids is not None:
                bins_of_ids = block + np.where((ids >= 0) & (ids < self.experts), ids, self.experts)
                counts = np.bincount(bins_of_ids.ravel(), minlength=bins * count).reshape(-1, bins)[:, :-1]
                if not self.intervals:
                    frequencies[:, layer] = interval * len(lengths) * counts.sum() / len(block) / self.experts
                frequencies[:, layer] *= kept[:, None]
                frequencies[:, layer] += weight @ counts
        self.intervals += round(most)
        self._made = self._make(tokens)

    def _rates(self, intervals: float) -> Floats:
        """The part of each frequency that one of so many new intervals replaces."""
        rates = np.array([1 - 0.5 ** (1 / life) for life in HALF_LIVES], np.float32)
        rates[-1] = max(rates[-1], 1 / (self.intervals + intervals + PRIOR))
        return rates

    def _make(self, tokens: Sequence[int]) -> PastForecast:
        slow, rows = self._frequencies[-1].copy(), [self._row(token) for token in dict.fromkeys(tokens)]
        corrections = np.vstack([self._frequencies[:-1] - slow, self._weights[rows].sum(axis=0)])
        return PastForecast(slow, corrections, rows, slow + self._fit.values @ corrections)

    def _row(self, token: int) -> int:
        """The row of weights of a token, one of zeros if it has none yet."""
        if token not in self._rows:
            if len(self._rows) == len(self._weights):
                self._rows[token] = self._rows.popitem(last=False)[1]
                self._weights[self._rows[token]] = 0
            else:
                self._rows[token] = len(self._rows)
        self._rows.move_to_end(token)
        return self._rows[token]


class Fit:
    """Running least squares: the coefficients of corrections, with which they explain most of an error. They are drawn
    towards those believed as by `PRIOR` intervals in which those were right; the past decays."""

    def __init__(self, believed: tuple[float, ...]):
        self.values = self._believed = np.array(believed, np.float32)
        self._products, self._squares, self._weight = np.zeros(len(believed)), np.zeros((len(believed),) * 2), 0.0

    def learn(self, corrections: Floats, error: Floats) -> None:
        decay = 0.5 ** (1 / MEMORY)
        self._products = decay * self._products + corrections @ error
        self._squares = decay * self._squares + corrections @ corrections.T
        self._weight = decay * self._weight + 1
        prior = PRIOR / self._weight * self._squares.diagonal() + 1e-6
        solution = np.linalg.solve(self._squares + np.diag(prior), self._products + prior * self._believed)
        self.values = solution.astype(np.float32)

"""The forecast against its formulas, written out expert by expert, and what it learns of traffic with structure."""

import numpy as np
import pytest

from cpu_offload.policy import forecast
from cpu_offload.policy.forecast import FAST, PRIOR, SLOW, STEP, Forecast

LAYERS, EXPERTS = 7, 6
SIZE = LAYERS * EXPERTS
SOURCES = (0, 2, 3, 4, 6)  # the last layer, the first one, and others evenly between; 1.5 and 4.5 round to even


class Plain:
    """The forecast in float64, with every weight of every source used in each interval."""

    def __init__(self) -> None:
        self.intervals = 0
        self.slow, self.fast, self.lasting = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
        self.weights = np.zeros((len(SOURCES), EXPERTS, SIZE))
        self.context, self.hint = np.zeros((len(SOURCES), EXPERTS)), np.zeros(SIZE)
        self.slopes = {"trend": [0.0, 0.0], "hint": [0.0, 0.0]}

    def slope(self, name: str) -> float:
        product, square = self.slopes[name]
        return min(max(product / square, 0), 1) if square else 0

    def judge(self, name: str, error: np.ndarray, correction: np.ndarray) -> None:
        product, square = self.slopes[name]
        decay = 0.5 ** (1 / SLOW)
        self.slopes[name] = [decay * product + error @ correction, decay * square + correction @ correction]

    def learn(self, counts: np.ndarray, most_rows: int) -> np.ndarray:
        seen = counts.reshape(-1).astype(float)
        if not self.intervals:
            self.slow, self.fast, self.lasting = (np.full(SIZE, seen.mean()) for _ in range(3))
        self.judge("trend", seen - self.slow, self.fast - self.slow)
        error = seen - self.lasting
        if self.context.any():
            self.judge("hint", error, self.hint)
            power = (self.context**2).sum()
            self.weights += STEP / power * self.context[..., None] * (error - self.hint)
        self.intervals += 1
        for frequency, half_life in ((self.slow, SLOW), (self.fast, FAST)):
            frequency += max(1 - 0.5 ** (1 / half_life), 1 / (self.intervals + PRIOR)) * (seen - frequency)
        self.lasting = self.slow + self.slope("trend") * (self.fast - self.slow)
        self.context = counts[list(SOURCES)].astype(float)
        most_used = np.argsort(-self.context.reshape(-1), kind="stable")[most_rows:]
        self.context.reshape(-1)[most_used] = 0
        self.hint = np.einsum("se,sek->k", self.context, self.weights)
        return self.lasting + self.slope("hint") * self.hint


def traffic(seed: int) -> np.ndarray:
    """Routing of intervals: two modes that take turns, with noise. (intervals, layers, experts)"""
    draw = np.random.default_rng(seed)
    modes = draw.integers(0, 3, (2, LAYERS, EXPERTS))
    return np.stack([modes[step % 2] + (draw.random((LAYERS, EXPERTS)) < 0.2) for step in range(60)])


@pytest.mark.parametrize("most_rows", [SIZE, 4])
def test_the_forecast_is_its_formulas(monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
    monkeypatch.setattr(forecast, "WEIGHTS", most_rows * SIZE)
    found, plain = Forecast(LAYERS, EXPERTS), Plain()
    for counts in traffic(1):
        found.learn(counts)
        expected = plain.learn(counts, most_rows)
        np.testing.assert_allclose(found.next, expected, atol=2e-4, rtol=2e-4)
        np.testing.assert_allclose(found.lasting, plain.lasting, atol=1e-4, rtol=1e-4)


def test_turns_are_foreseen_by_what_was_used_last() -> None:
    found, hinted, lasting = Forecast(LAYERS, EXPERTS), [], []
    for counts in np.concatenate([traffic(2)] * 6):
        hinted.append(np.abs(found.next - counts.reshape(-1)).mean())
        lasting.append(np.abs(found.lasting - counts.reshape(-1)).mean())
        found.learn(counts)
    assert np.mean(hinted[-60:]) < 0.6 * np.mean(lasting[-60:])

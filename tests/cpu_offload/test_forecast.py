"""The forecast against its formulas, written out step by step, and what it learns of traffic with structure."""

from collections.abc import Sequence

import numpy as np
import pytest

from umbra.cpu_offload.policy import forecast
from umbra.cpu_offload.policy.forecast import BELIEVED, HALF_LIVES, LEAST, MEMORY, PRIOR, STEP, Forecast

LAYERS, EXPERTS, K = 3, 6, 2
SIZE = LAYERS * EXPERTS


class Plain:
    """The forecast in float64, with a row of weights for every token."""

    def __init__(self) -> None:
        self.frequencies, self.weights = np.zeros((len(HALF_LIVES), SIZE)), np.zeros((9, SIZE))
        self.values, self.steps, self.errors = np.array(BELIEVED), 0, list[tuple[np.ndarray, np.ndarray]]()
        self.past = np.zeros(SIZE), np.zeros((len(BELIEVED), SIZE)), list[int]()

    def learn(self, counts: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        seen = counts.reshape(-1).astype(float)
        if not self.steps:
            self.frequencies[:] = seen.mean()
        slow, corrections, rows = self.past
        scale = (np.maximum(slow, 0) + slow.mean() / 10 + LEAST) ** -0.5
        self.errors.append((corrections * scale, (seen - slow) * scale))
        age = 0.5 ** (np.arange(len(self.errors))[::-1] / MEMORY)
        squares = sum(a * c @ c.T for a, (c, _) in zip(age, self.errors, strict=True))
        products = sum(a * c @ e for a, (c, e) in zip(age, self.errors, strict=True))
        prior = PRIOR / age.sum() * np.diag(squares) + 1e-6
        self.values = np.linalg.solve(squares + np.diag(prior), products + prior * BELIEVED)
        for token in set(rows):
            self.weights[token] += STEP / len(set(rows)) * (seen - slow - corrections[-1])
        self.steps += 1
        for frequency, life in zip(self.frequencies, HALF_LIVES, strict=True):
            least = 1 / (self.steps + PRIOR) if life == max(HALF_LIVES) else 0
            frequency += max(1 - 0.5 ** (1 / life), least) * (seen - frequency)
        slow = self.frequencies[-1].copy()
        corrections = np.vstack([self.frequencies[:-1] - slow, self.weights[sorted(set(tokens))].sum(axis=0)])
        self.past = slow, corrections, list(tokens)
        return slow + self.values @ corrections


def traffic(seed: int, steps: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Routing (steps, layers, experts), by the token of the step with some noise, and those tokens."""
    draw = np.random.default_rng(seed)
    modes, tokens = draw.integers(0, 3, (9, LAYERS, EXPERTS)), draw.integers(0, 9, steps)
    return modes[tokens] + (draw.random((steps, LAYERS, EXPERTS)) < 0.2), tokens


def test_the_forecast_is_its_formulas() -> None:
    ours, plain = Forecast(LAYERS, EXPERTS), Plain()
    counts, tokens = traffic(1)
    for step in range(len(counts) - 1):
        coming = [int(tokens[step + 1]), int(tokens[step])][: 1 + step % 2]
        ours.learn(counts[step], coming)
        np.testing.assert_allclose(ours.coming, plain.learn(counts[step], coming), atol=2e-3, rtol=2e-3)


def error(of: Forecast, hinted: bool) -> float:
    counts, tokens = traffic(2, 400)
    errors = []
    for step, seen in enumerate(counts[:-1]):
        errors.append(np.abs(of.coming - seen.reshape(-1)).mean())
        of.learn(seen, [int(tokens[step + 1])] if hinted else [])
    return float(np.mean(errors[-100:]))


def test_the_next_token_foretells_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = error(Forecast(LAYERS, EXPERTS), hinted=False)
    assert error(Forecast(LAYERS, EXPERTS), hinted=True) < 0.5 * plain
    monkeypatch.setattr(forecast, "HINTS", 4 * SIZE * 4)  # four of the nine tokens have rows
    assert error(Forecast(LAYERS, EXPERTS), hinted=True) < 1.05 * plain


def test_a_prompt_counts_as_decode_steps_of_one_sequence() -> None:
    ids = np.random.default_rng(3).integers(-1, EXPERTS + 1, (LAYERS, 200, K))  # some are experts of other ranks
    prompt, pasts = list(ids), (np.zeros((LAYERS, 200, K), np.int64), np.full((LAYERS, 200, K), 5))
    stepwise, at_once, first, other = (Forecast(LAYERS, EXPERTS) for _ in range(4))
    for one in (stepwise, at_once):
        one.learn(np.ones((LAYERS, EXPERTS), np.int64))
    rows = [of[(of >= 0) & (of < EXPERTS)] for of in ids[:, 0]]
    stepwise.learn(np.array([np.bincount(of, minlength=EXPERTS) for of in rows]))
    at_once.learn_long(list(ids[:, :1]), [1], 1)
    np.testing.assert_allclose(at_once.lasting, stepwise.lasting, rtol=1e-3)
    for one, past in zip((first, other), pasts, strict=True):
        one.learn_long(list(past), [200], 1)
        one.learn_long(prompt, [200], 1)
    np.testing.assert_allclose(first.lasting, other.lasting, atol=0.25 * K / EXPERTS)  # the past has given way
    last = np.bincount(ids[0, -32:].ravel().clip(0, EXPERTS), minlength=EXPERTS + 1)[:EXPERTS]
    assert np.corrcoef(first.lasting[:EXPERTS], last)[0, 1] > 0.5
    before, idle = first.lasting.copy(), np.full((LAYERS, 3, K), -1)
    first.learn_long(list(np.concatenate([pasts[0], idle], axis=1)), [200, 1, 1, 1], 1)
    kept = first.lasting.reshape(LAYERS, EXPERTS)[:, 1:] / before.reshape(LAYERS, EXPERTS)[:, 1:]
    assert (kept > 0.7).all()  # three of four sequences remain

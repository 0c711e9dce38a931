"""Predicts a decode step's time from a few measured costs, and what follows from it: what a copy is worth.
`cpu_offload/cost/choices.py` chooses by it.

A layer with T tokens, of whose experts a share `hit` is resident:

    layer  = base + max(device, shadow) + slip * min(device, shadow)
    device = fixed * P(a resident is used) + expert * residents used + pair * their (token, expert) pairs
    shadow = the same of the others, with costs of its own; its `fixed` is hand-over and join
    step   = rest + layers * layer

A layer of a long step may stream instead: every pair is the device's, missing experts come in copies beside that:

    layer  = base + max(device of all, copies) + slip * min(device of all, copies)

`base`: the layer's node where no expert is used. `fixed`: waking threads, handing over. `slip`: how much of the shorter
side is not hidden behind the longer: 0 on two real devices, more where both are threads that share cores and memory.
Routing is taken as even: of E experts, T tokens that take k each use E (1 - (1 - k / E)^T). Milliseconds throughout.

Where the device is much faster, fewer misses are; two sides that are equally fast are fastest when both have work.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpu_offload.history import LongLayer
from cpu_offload.streaming import CHUNK

RATES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
LEAST_COST, MOST_COST = 0.02, 16.0  # of a copy, in misses: what the policy's horizon is made for


@dataclass(frozen=True)
class Sample:
    """A layer that used so many experts, all on one side, for so many pairs of a token and an expert."""

    experts: int
    pairs: int
    ms: float


@dataclass(frozen=True)
class Line:
    """One side of a layer: fixed + expert * experts + pair * pairs."""

    fixed: float
    expert: float
    pair: float

    def ms(self, experts: float, pairs: float, any_used: float = 1.0) -> float:
        """`any_used`: how probable it is that the side has work at all."""
        return self.fixed * any_used + self.expert * experts + self.pair * pairs


def fit(samples: Sequence[Sample]) -> Line:
    """Least squares of the relative error; a coefficient that would be negative is 0."""
    rows = np.array([(1.0, sample.experts, sample.pairs) for sample in samples])
    ms = np.array([sample.ms for sample in samples])
    kept, found = [0, 1, 2], np.zeros(3)
    while kept:
        best = np.linalg.lstsq(rows[:, kept] / ms[:, None], np.ones(len(ms)), rcond=None)[0]
        if best.min() >= 0:
            found[kept] = best
            break
        del kept[int(best.argmin())]
    return Line(*found.tolist())


@dataclass(frozen=True)
class Shape:
    layers: int  # with shadows
    experts: int  # of a layer
    top_k: int

    def used(self, tokens: float) -> float:
        """Experts of a layer that so many tokens use."""
        return self.experts * float(1 - (1 - self.top_k / self.experts) ** tokens)


@dataclass(frozen=True)
class Costs:
    """What was measured, milliseconds."""

    base: float
    device: Line  # beside the base
    shadow: Line
    slip: float  # 0..1
    copy: float  # of one expert's block
    block_bytes: int
    threads: tuple[int, int]  # of device and shadow pool
    seconds: float  # that measuring took


def slip_of(device: float, shadow: float, both: float) -> float:
    """How much of the shorter side was not hidden, where one after the other took `device` and `shadow`."""
    return min(max((both - max(device, shadow)) / max(min(device, shadow), 1e-9), 0.0), 1.0)


@dataclass(frozen=True)
class Planner:
    shape: Shape
    costs: Costs
    rest: float = 0.0  # of a step, beside the layers' experts
    rest_from: str = "not counted"

    @property
    def miss(self) -> float:
        """What one of a token's experts costs on the CPU where all are, with its share of the hand-over."""
        return self.costs.shadow.ms(1, 1, 1 / self.shape.top_k)

    @property
    def swap_cost(self) -> float:
        """Of a copy, in misses: as much of its time as does not hide beside the steps. `max_swaps` sees to it that the
        rest does; what fraction hides is taken to be as with the shadow pool's work."""
        return min(max(self.costs.slip * self.costs.copy / max(self.miss, 1e-9), LEAST_COST), MOST_COST)

    def layer_ms(self, tokens: float, hit: float) -> float:
        costs, used, pairs = self.costs, self.shape.used(tokens), tokens * self.shape.top_k
        device = costs.device.ms(used * hit, pairs * hit, 1 - (1 - hit) ** used)
        shadow = costs.shadow.ms(used * (1 - hit), pairs * (1 - hit), 1 - hit**used)
        return costs.base + max(device, shadow) + costs.slip * min(device, shadow)

    def stream_ms(self, tokens: float, hit: float) -> float:
        """A layer whose missing experts are streamed, a chunk at a time."""
        costs, used, pairs = self.costs, self.shape.used(tokens), tokens * self.shape.top_k
        missing = used * (1 - hit)
        device = costs.device.ms(used, pairs, 1 + missing / CHUNK)
        copies = costs.copy * missing
        return costs.base + max(device, copies) + costs.slip * min(device, copies)

    def step_ms(self, tokens: float, hit: float) -> float:
        """A step of `tokens` sequences: each gets one token, so this is its time per token."""
        return self.rest + self.shape.layers * self.layer_ms(tokens, hit)

    def rest_of(self, steps: Sequence[tuple[float, float, float]]) -> float:
        """From measured steps (tokens, hit rate, ms)."""
        return max(0.0, statistics.median(ms - (self.step_ms(t, hit) - self.rest) for t, hit, ms in steps))

    def compare(self, steps: Sequence[tuple[float, float, float]]) -> dict[str, float]:
        """Medians of measured steps (tokens, hit rate, ms) and of the predictions for them."""
        tokens, hits, times = zip(*steps, strict=True)
        predicted = statistics.median(self.step_ms(t, hit) for t, hit, _ in steps)
        measured = statistics.median(times)
        return {
            "hit_rate": float(np.average(hits, weights=tokens)),
            "tokens": statistics.fmean(tokens),
            "predicted_ms": predicted,
            "measured_ms": measured,
            "ratio": predicted / measured,
        }

    def compare_long(self, layers: Sequence[LongLayer]) -> dict[str, float]:
        """Medians of these layers of long steps: measured, and predicted for both ways."""
        return {
            "layers": len(layers),
            "streamed_layers": sum(layer.streamed > 0 for layer in layers),
            "tokens": statistics.median(layer.tokens for layer in layers),
            "streamed_ms": statistics.median(self.stream_ms(layer.tokens, layer.hit_rate) for layer in layers),
            "computed_ms": statistics.median(self.layer_ms(layer.tokens, layer.hit_rate) for layer in layers),
            "measured_ms": statistics.median(layer.ms for layer in layers),
        }

    def table(self, tokens: int) -> list[str]:
        """The reasoning, for people. `tokens`: sequences of a step."""
        shape, costs = self.shape, self.costs
        rate = costs.block_bytes / 1e6 / max(costs.copy, 1e-9)
        size = f"{costs.block_bytes / 1e6:.2f} MB"
        steps = [f"{self.step_ms(tokens, hit):8.3f}" for hit in RATES]
        return [
            f"planner: {shape.layers} layers with shadows, {shape.top_k} of {shape.experts} experts a token, "
            f"{size} each; measured in {costs.seconds:.1f} s",
            f"  device, a layer   {_line(costs.device)}   {_threads(costs.threads[0])}",
            f"  shadow, a layer   {_line(costs.shadow)}   {_threads(costs.threads[1])}",
            f"  both at once      {costs.slip:.0%} of the shorter side is not hidden; "
            f"{costs.base:.3f} ms a layer without either",
            f"  rest of a step    {self.rest:.3f} ms: {self.rest_from}",
            f"  copy of an expert {costs.copy:.3f} ms, {rate:.1f} GB/s; a miss costs {self.miss:.3f} ms: a swap must "
            f"save {self.swap_cost:.2f} misses",
            f"  hit rate          {' '.join(f'{hit:>8.0%}' for hit in RATES)}",
            f"  ms per token      {' '.join(steps)}   {tokens} sequence(s) at once",
        ]


def _line(line: Line) -> str:
    return f"{line.fixed:.3f} ms + {line.expert:.4f} an expert + {line.pair:.4f} a token of it"


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"

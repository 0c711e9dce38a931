"""Predicts the time of a decode step from a few measured costs, and from that how many misses a copy must save.

The time of a layer, if a share `hit` of the experts that its T tokens use is resident:

    layer  = base + max(device, shadow) + slip * min(device, shadow)
    device = fixed * P(a resident expert is used) + expert * resident experts used + pair * their (token, expert) pairs
    shadow = the same for missing experts, with own costs; `fixed` is the hand-over to the shadow pool and the join
    step   = rest + layers * layer

In a layer of a long step, missing experts are divided between both sides, and some are copied to the device, so that
all three end together (prefill_split.py). A device that reads the host's memory in place computes all of them, with the
threads of both pools:

    layer  = base + max(device, shadow, copies) + slip * the other two
    layer  = base + whole

`base` is the time of a layer that uses no expert. `fixed` is waking threads and handing over. `slip` is the share of
the shorter side that the longer does not hide: 0 for two real devices, more where both are threads that share
cores and memory. Routing is assumed to be even: T tokens with k of E experts each use E (1 - (1 - k / E)^T) of them.
All times are milliseconds.

If the device is much faster than the shadow pool, a step with fewer misses is faster. If both are equally fast, a step
is fastest if both have work.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from umbra.cpu_offload.costs import Costs, Line
from umbra.cpu_offload.expert_ring import group_size
from umbra.cpu_offload.history import LongLayer
from umbra.cpu_offload.prefill_split import split

RATES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)  # hit rates of the printed table
LEAST_COST, MOST_COST = 0.02, 16.0  # bounds of a copy's cost in misses: the range that the policy's horizon is made for


@dataclass(frozen=True)
class LayerSample:
    """A measured layer whose experts were all on one side."""

    experts: int  # experts that were used
    pairs: int  # (token, expert) pairs
    ms: float


def fit(samples: Sequence[LayerSample]) -> Line:
    """The line with the least squared relative errors; a coefficient that would be negative is set to 0."""
    rows = np.array([(1.0, sample.experts, sample.pairs) for sample in samples])
    ms = np.array([sample.ms for sample in samples])
    kept, coefficients = [0, 1, 2], np.zeros(3)
    while kept:
        best = np.linalg.lstsq(rows[:, kept] / ms[:, None], np.ones(len(ms)), rcond=None)[0]
        if best.min() >= 0:
            coefficients[kept] = best
            break
        del kept[int(best.argmin())]
    return Line(*coefficients.tolist())


@dataclass(frozen=True)
class ExpertsShape:
    """The numbers of one rank's experts."""

    layers: int  # layers with shadows
    experts: int  # experts of a layer
    top_k: int  # experts that a token uses

    def used(self, tokens: float) -> float:
        """Expected number of a layer's experts that `tokens` tokens use."""
        return self.experts * float(1 - (1 - self.top_k / self.experts) ** tokens)


def slip_of(device: float, shadow: float, both: float) -> float:
    """The share of the shorter side that is not hidden, where the two sides take `device` and `shadow` alone, and
    `both` together."""
    return min(max((both - max(device, shadow)) / max(min(device, shadow), 1e-9), 0.0), 1.0)


@dataclass(frozen=True)
class Planner:
    shape: ExpertsShape
    costs: Costs
    rest: float = 0.0  # milliseconds of a step outside the mixtures of layers with shadows
    rest_from: str = "not counted"  # where `rest` comes from, as text to print

    @property
    def miss(self) -> float:
        """Milliseconds of one expert, including its share of the hand-over, for a token whose experts are all
        missing."""
        return self.costs.shadow.ms(1, 1, 1 / self.shape.top_k)

    @property
    def swap_cost(self) -> float:
        """The cost of a copy in misses: the part of its time that the steps do not hide. This part is assumed
        to be `slip`, as for the shadow pool's work; `max_swaps` keeps copies few enough to hide the rest."""
        return min(max(self.costs.slip * self.costs.copy / max(self.miss, 1e-9), LEAST_COST), MOST_COST)

    def layer_ms(self, tokens: float, hit: float) -> float:
        """Time of a layer whose missing experts are computed by the shadow pool."""
        costs, used, pairs = self.costs, self.shape.used(tokens), tokens * self.shape.top_k
        device = costs.device.ms(used * hit, pairs * hit, 1 - (1 - hit) ** used)
        shadow = costs.shadow.ms(used * (1 - hit), pairs * (1 - hit), 1 - hit**used)
        return costs.layer_ms(device, shadow, 0.0)

    def stream_ms(self, tokens: float, hit: float) -> float:
        """Time of a layer of a long step, whose missing experts are divided: some are copied to the device."""
        costs, used, pairs = self.costs, self.shape.used(tokens), tokens * self.shape.top_k
        if costs.whole:
            return costs.base + costs.whole.ms(used, pairs)
        experts = max(round(used), 1)
        even, here = np.full(experts, pairs / experts), np.arange(experts) < round(experts * hit)
        return split(even, here, costs, group_size(costs.block_bytes, self.shape.experts)).ms

    def step_ms(self, tokens: float, hit: float) -> float:
        """Time of a decode step of `tokens` sequences. Each gets one token, so this is also the time per token."""
        return self.rest + self.shape.layers * self.layer_ms(tokens, hit)

    def rest_of(self, steps: Sequence[tuple[float, float, float]]) -> float:
        """The `rest` that fits measured steps (tokens, hit rate, ms) best: the median of their time that the model does
        not predict."""
        return max(0.0, statistics.median(ms - (self.step_ms(t, hit) - self.rest) for t, hit, ms in steps))

    def compare(self, steps: Sequence[tuple[float, float, float]]) -> dict[str, float]:
        """Medians of measured steps (tokens, hit rate, ms) and of what was predicted for each. `tokens` may be 0 on a
        rank none of whose experts were chosen."""
        tokens, hits, times = zip(*steps, strict=True)
        predicted = statistics.median(self.step_ms(t, hit) for t, hit, _ in steps)
        measured = statistics.median(times)
        return {
            "hit_rate": float(np.average(hits, weights=tokens)) if any(tokens) else 1.0,
            "tokens": statistics.fmean(tokens),
            "predicted_ms": predicted,
            "measured_ms": measured,
            "ratio": predicted / measured,
        }

    def compare_long(self, layers: Sequence[LongLayer]) -> dict[str, float]:
        """Medians over `layers`, layers of long steps, of the time measured, the time predicted if streamed, and the
        time predicted if computed by both device and shadow pool."""
        return {
            "layers": len(layers),
            "streamed_layers": sum(layer.streamed > 0 for layer in layers),
            "tokens": statistics.median(layer.tokens for layer in layers),
            "streamed_ms": statistics.median(self.stream_ms(layer.tokens, layer.hit_rate) for layer in layers),
            "computed_ms": statistics.median(self.layer_ms(layer.tokens, layer.hit_rate) for layer in layers),
            "measured_ms": statistics.median(layer.ms for layer in layers),
        }

    def table(self, tokens: int) -> list[str]:
        """Lines to print: costs, and times of a step of `tokens` sequences at several hit rates."""
        shape, costs = self.shape, self.costs
        rate = costs.block_bytes / 1e6 / max(costs.copy, 1e-9)
        size = f"{costs.block_bytes / 1e6:.2f} MB"
        steps = [f"{self.step_ms(tokens, hit):8.3f}" for hit in RATES]
        return [
            f"planner: {shape.layers} layers with shadows, {shape.top_k} of {shape.experts} experts a token, "
            f"{size} each; measured in {costs.seconds:.1f} s",
            f"  device, a layer   {_line(costs.device)}   {_threads(costs.threads[0])}",
            f"  shadow, a layer   {_line(costs.shadow)}   {_threads(costs.threads[1])}",
            f"  both at once      {1 - costs.slip:.0%} of the shorter side's time is hidden behind the longer; "
            f"{costs.base:.3f} ms a layer without either",
            f"  rest of a step    {self.rest:.3f} ms: {self.rest_from}",
            f"  copy of an expert {costs.copy:.3f} ms, {rate:.1f} GB/s; a miss costs {self.miss:.3f} ms: a copy pays "
            f"for itself after {self.swap_cost:.2f} misses",
            f"  hit rate          {' '.join(f'{hit:>8.0%}' for hit in RATES)}",
            f"  ms per token      {' '.join(steps)}   {tokens} sequence(s) at once",
        ]


def _line(line: Line) -> str:
    return f"{line.fixed:.3f} ms + {line.expert:.4f} an expert + {line.pair:.4f} a token of it"


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"

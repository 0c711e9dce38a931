"""Records hits, misses, copies and times of shadow experts step by step, for the report, the plots and the trace."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class StepRecord:
    """One decode step. L: layers with shadows, E: experts of each. Times are nanoseconds of one clock.

    A hit is a (token, expert) pair whose expert was resident at its layer's turn, a miss is any other pair.
    """

    start: int
    end: int
    hits: Counts  # (L)
    misses: Counts  # (L)
    times: Counts  # (L, 4): the shadow pool began and ended, the device began and ended its wait for it; 0: no miss
    packed: NDArray[np.uint8]  # (L, E / 8): `resident` with one bit for each expert
    experts: int  # E
    kv_frames: int
    expert_frames: int
    free_frames: int

    @property
    def resident(self) -> NDArray[np.bool_]:
        """Says for each expert whether it was resident as the step ended. (L, E)"""
        return np.unpackbits(self.packed, axis=1, count=self.experts).astype(np.bool_)


@dataclass(frozen=True)
class LongLayer:
    """One layer of a step with more tokens than a decode step has, such as a prefill."""

    step: int
    tokens: int
    hits: int
    misses: int
    streamed: int  # bytes copied to the device; 0: the shadow pool computed the misses
    ms: float

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.hits + self.misses, 1)


@dataclass
class History:
    steps: list[StepRecord] = field(default_factory=list)
    routed: Counts = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # (L, E): pairs in all steps
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)  # (start, end, layer, expert) of each
    evicted: list[int] = field(default_factory=list)  # the layer of each evicted expert
    for_cache: int = 0  # number of evictions that made room for the KV cache
    frames: int = 0  # frames of the arena
    long: list[LongLayer] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """The value of the report's key `offload`. `exposed_ms` is the time for which the device had finished its own
        part and waited for the shadow pool; None if the device does not record it."""
        hits = sum((step.hits for step in self.steps), np.int64(0))
        misses = sum((step.misses for step in self.steps), np.int64(0))
        exposed = sum((exposed_ns(step) for step in self.steps), np.int64(0))
        busy = sum((busy_ns(step) for step in self.steps), np.int64(0))
        timed = all((step.times[step.times[:, 0] > 0, 2] > 0).all() for step in self.steps)
        copied, evicted = Counter(layer for *_, layer, _ in self.copies), Counter(self.evicted)
        columns = map(np.atleast_1d, (hits, misses, exposed, busy))
        layers = [
            {
                "hit_rate": _share(h, m),
                "exposed_ms": e / 1e6 if timed else None,
                "shadow_ms": b / 1e6,
                "copies": copied[layer],
                "evictions": evicted[layer],
            }
            for layer, (h, m, e, b) in enumerate(zip(*columns, strict=True))
        ]
        most = max((step.kv_frames for step in self.steps), default=0)
        first = self.steps[0].expert_frames if self.steps else 0
        least = min((step.expert_frames for step in self.steps), default=0)
        return {
            "steps": len(self.steps),
            "hit_rate": _share(np.sum(hits), np.sum(misses)),
            "exposed_ms": float(np.sum(exposed)) / 1e6 if timed else None,
            "shadow_ms": float(np.sum(busy)) / 1e6,
            "copies": len(self.copies),
            "evictions": len(self.evicted),
            "evictions_for_cache": self.for_cache,
            "arena_frames": self.frames,
            "most_kv_frames": most,
            "kv_frames_gained": first - least,
            "streamed": self.streamed(),
            "layers": layers,
        }

    def streamed(self) -> dict[str, int]:
        """Steps and layers whose missing experts were streamed to the device, and the bytes copied."""
        layers = [layer for layer in self.long if layer.streamed]
        steps, size = len({layer.step for layer in layers}), sum(layer.streamed for layer in layers)
        return {"steps": steps, "layers": len(layers), "bytes": size}

    def trace(self) -> dict[str, Any]:
        """A trace for Perfetto with lanes for the device's steps and waits, the shadow pool, and copies into slots."""
        lanes = {"device": 1, "shadow pool": 2, "copies": 3}
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": name}}
            for name, lane in lanes.items()
        ]

        def span(lane: str, name: str, start: int, end: int) -> None:
            if end > start > 0:
                at = {"ts": start / 1e3, "dur": (end - start) / 1e3}  # microseconds
                events.append({"ph": "X", "pid": 1, "tid": lanes[lane], "name": name} | at)

        for number, step in enumerate(self.steps):
            span("device", f"step {number}", step.start, step.end)
            for layer, (began, ended, came, went) in enumerate(step.times.tolist()):
                span("shadow pool", f"layer {layer}", began, ended)
                span("device", f"wait, layer {layer}", came, went)
        for start, end, layer, expert in self.copies:
            span("copies", f"layer {layer}, expert {expert}", start, end)
        return {"traceEvents": events}


def summary(report: dict[str, Any]) -> str:
    """One line about `History.report()`."""
    rate, busy, exposed, streamed = (report[key] for key in ("hit_rate", "shadow_ms", "exposed_ms", "streamed"))
    line = f"shadow experts: hit rate {'-' if rate is None else f'{rate:.3f}'}, {busy:.1f} ms on the CPU, "
    if exposed is not None and exposed <= busy:
        line += f"of which {exposed:.1f} exposed, "
    elif exposed is not None:
        line += f"{exposed:.1f} ms exposed (waiting includes waking the threads and other work on their cores), "
    line += (
        f"{report['copies']} copies, {report['evictions']} evictions ({report['evictions_for_cache']} for the cache)"
    )
    return line + (f", {streamed['bytes'] / 1e6:.1f} MB streamed" if streamed["bytes"] else "")


def exposed_ns(step: StepRecord) -> Counts:
    """The times for which the device waited for the shadow pool. (L)"""
    return np.asarray(step.times[:, 3] - step.times[:, 2])


def busy_ns(step: StepRecord) -> Counts:
    """The times for which the shadow pool computed. (L)"""
    return np.asarray(step.times[:, 1] - step.times[:, 0])


def _share(hits: Any, misses: Any) -> float | None:
    return float(hits / (hits + misses)) if hits + misses else None

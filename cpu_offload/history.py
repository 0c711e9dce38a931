"""What offloading did, step by step: for the report, the plots and the trace."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """One decode step. L layers with shadows, E experts; times in nanoseconds of one clock."""

    start: int
    end: int
    hits: Counts  # (L) pairs of a token and an expert that was resident
    misses: Counts  # (L)
    times: Counts  # (L, 4) when the shadow pool began, ended, when the device came to wait and went on; 0: no miss
    packed: NDArray[np.uint8]  # (L, E / 8) `resident`, a bit each
    experts: int
    kv_frames: int
    expert_frames: int
    free_frames: int

    @property
    def resident(self) -> NDArray[np.bool_]:
        """(L, E) during the step"""
        return np.unpackbits(self.packed, axis=1, count=self.experts).astype(np.bool_)


@dataclass(frozen=True)
class LongLayer:
    """One layer of a step with more tokens than a decode step has, a prefill."""

    step: int
    tokens: int
    hits: int  # pairs of a token and an expert that was resident
    misses: int
    streamed: int  # bytes; 0: computed where the experts were
    ms: float

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.hits + self.misses, 1)


@dataclass
class History:
    steps: list[Step] = field(default_factory=list)
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)  # start, end, layer, expert
    evicted: list[int] = field(default_factory=list)  # the layer of each expert that left
    for_cache: int = 0  # of these, for the KV cache
    frames: int = 0  # of the arena
    long: list[LongLayer] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """For report.json. Exposed: what the device waited for the shadow pool after its own part was done; None: it
        does not tell."""
        hits = sum((step.hits for step in self.steps), np.int64(0))
        misses = sum((step.misses for step in self.steps), np.int64(0))
        exposed = sum((exposed_ns(step) for step in self.steps), np.int64(0))
        busy = sum((busy_ns(step) for step in self.steps), np.int64(0))
        told = all((step.times[step.times[:, 0] > 0, 2] > 0).all() for step in self.steps)
        brought, left = Counter(layer for *_, layer, _ in self.copies), Counter(self.evicted)
        columns = map(np.atleast_1d, (hits, misses, exposed, busy))
        layers = [
            {
                "hit_rate": _share(h, m),
                "exposed_ms": e / 1e6 if told else None,
                "shadow_ms": b / 1e6,
                "copies": brought[layer],
                "evictions": left[layer],
            }
            for layer, (h, m, e, b) in enumerate(zip(*columns, strict=True))
        ]
        most = max((step.kv_frames for step in self.steps), default=0)
        first = self.steps[0].expert_frames if self.steps else 0
        least = min((step.expert_frames for step in self.steps), default=0)
        return {
            "steps": len(self.steps),
            "hit_rate": _share(np.sum(hits), np.sum(misses)),
            "exposed_ms": float(np.sum(exposed)) / 1e6 if told else None,
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
        """Layers of long steps whose missing experts came to the device."""
        layers = [layer for layer in self.long if layer.streamed]
        steps, size = len({layer.step for layer in layers}), sum(layer.streamed for layer in layers)
        return {"steps": steps, "layers": len(layers), "bytes": size}

    def trace(self) -> dict[str, Any]:
        """Lanes for Perfetto: the device's steps and waits, the shadow pool, copies into slots."""
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


def exposed_ns(step: Step) -> Counts:
    """(L)"""
    return np.asarray(step.times[:, 3] - step.times[:, 2])


def busy_ns(step: Step) -> Counts:
    """(L)"""
    return np.asarray(step.times[:, 1] - step.times[:, 0])


def _share(hits: Any, misses: Any) -> float | None:
    return float(hits / (hits + misses)) if hits + misses else None

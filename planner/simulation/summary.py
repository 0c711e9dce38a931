"""Summarises a simulation: figures of all its requests, and of the hours in which they came."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umbra.base.errors import UserError
from umbra.planner.cluster import Targets
from umbra.planner.simulation.replica import MemorySample
from umbra.planner.simulation.run import RequestRecord, SimulationOutcome
from umbra.planner.simulation.traffic import HOUR

PERCENTILES = (50, 90, 99)
BUCKETS = 96  # parts of the time that is simulated
TENANTS = ("sequences", "prefixes", "experts", "free")  # of the memory
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Summary:
    facts: dict[str, float]
    hours: Floats  # the middle of each of BUCKETS
    lines: dict[str, Floats]  # a value for each of BUCKETS, by name; nan: nothing came
    memory: Floats  # shares of TENANTS in the memory for keys, values and experts. (BUCKETS, TENANTS)


def summary_of(outcome: SimulationOutcome, targets: Targets, hour_s: float = HOUR) -> Summary:
    """`hour_s`: seconds of an hour in the lines."""
    ended = [s for s in outcome.served.values() if s.last]
    if not ended:
        raise UserError("simulation: no request ended")
    at = np.array([s.at for s in ended])
    first, per_token = times_of(ended)
    good = (first <= targets.ttft_ms / 1e3) & (per_token <= targets.tpot_ms / 1e3)
    edges = np.linspace(at[0], max(at[-1], at[0] + 1e-9), BUCKETS + 1)
    bucket_of = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, BUCKETS - 1)
    counts = np.bincount(bucket_of, minlength=BUCKETS)
    inside = [bucket_of == b for b in range(BUCKETS)]
    lines = {"requests/s": counts / (edges[1] - edges[0])}
    with np.errstate(invalid="ignore"):
        lines["in time"] = np.bincount(bucket_of, good, BUCKETS) / counts
    for name, values in (("TTFT", first), ("TPOT", per_token)):
        for percent in PERCENTILES:
            some = [np.percentile(values[here], percent) * 1e3 if here.any() else np.nan for here in inside]
            lines[f"{name} p{percent}, ms"] = np.array(some)
    samples = [sample for replica in outcome.replicas for sample in replica.samples]
    facts = facts_of(outcome, ended, float(good.sum())) | {
        f"{name} p{percent}, ms": float(np.percentile(values, percent)) * 1e3
        for name, values in (("TTFT", first), ("TPOT", per_token))
        for percent in PERCENTILES
    }
    return Summary(facts, (edges[:-1] + edges[1:]) / 2 / hour_s, lines, memory_of(samples, edges))


def times_of(served: Sequence[RequestRecord]) -> tuple[Floats, Floats]:
    """(TTFT, TPOT) of requests that ended, in seconds."""
    first = np.array([s.first - s.at for s in served])
    per_token = np.array([(s.last - s.first) / max(s.output - 1, 1) for s in served])
    return first, per_token


def facts_of(outcome: SimulationOutcome, ended: Sequence[RequestRecord], good: float) -> dict[str, float]:
    """Figures of all requests, of which `good` met both targets."""
    replicas = outcome.replicas
    span, prompts = max(outcome.end - ended[0].at, 1e-9), sum(s.prompt for s in ended)
    facts: dict[str, float] = {
        "requests": len(outcome.served),
        "refused": outcome.refused,
        "in time": good / len(outcome.served),
        "goodput, requests/s": good / span,
        "output tokens/s": sum(s.output for s in ended) / span,
        "seconds": span,
        "busy": sum(r.busy for r in replicas) / span / len(replicas),
        "preemptions": sum(r.preemptions for r in replicas),
        "failures": outcome.failures,
        "restarted requests": sum(s.restarts > 0 for s in ended),
        "prompt tokens found": sum(r.cached_tokens for r in replicas) / prompts,
        "steps": sum(r.steps for r in replicas),
    }
    if all(totals := [r.totals for r in replicas]):
        hits, misses = (sum(getattr(t, name) for t in totals) for name in ("hits", "misses"))
        facts["experts hit"] = hits / max(hits + misses, 1)
    return facts


def memory_of(samples: Sequence[MemorySample], edges: Floats) -> Floats:
    """The mean shares in each bucket; where nobody looked, those of the bucket before."""
    shares = np.zeros((len(edges) - 1, len(TENANTS)))
    pages = np.array([(s.held, s.kept, s.experts, s.free) for s in samples], np.float64).reshape(-1, len(TENANTS))
    bucket_of = np.searchsorted(edges, [s.at for s in samples], side="right") - 1
    for bucket in range(len(shares)):
        here = pages[bucket_of == bucket]
        if len(here):
            shares[bucket] = here.sum(axis=0) / here.sum()
        elif bucket:
            shares[bucket] = shares[bucket - 1]
    return shares

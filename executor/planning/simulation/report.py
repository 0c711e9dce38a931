"""`umbra plan --cluster FILE --simulate`: serves the cluster's traffic on its best layout, and reports and draws it."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from errors import UserError
from executor.planning.cluster.plan import make_cluster_plan
from executor.planning.simulation.run import Outcome, Served, Simulator
from files import write_json, write_whole

PERCENTILES = (50, 90, 99)
BUCKETS = 96  # of the time that was simulated, in the plot


def show_simulation(path: Path, json: Path | None, plot: Path | None) -> None:
    plan = make_cluster_plan(path)
    best = plan.cheapest or sorted(plan.found, key=lambda found: found.load.tpot)[:1]
    if not best:
        raise UserError(
            f"{path.name}: no layout keeps up with {plan.cluster.load.rate:g} requests/s: nothing to simulate"
        )
    layout = best[0].layout
    print(f"{plan.cluster.devices} devices of {plan.hardware.name}: {layout.sizes}")
    start = time.perf_counter()
    outcome = Simulator(layout, plan.cluster.simulation).run()
    took = time.perf_counter() - start
    targets = plan.cluster.targets
    facts = facts_of(outcome, targets.ttft_ms / 1e3, targets.tpot_ms / 1e3)
    print("\n".join(f"{name:<28} {value}" for name, value in printed(facts).items()))
    load = best[0].load
    print(f"{'the plan expects':<28} {load.tpot * 1e3:.2f} ms a token, first after {load.ttft * 1e3:.0f} ms")
    print(f"{outcome.end / 3600:.2f} hours of traffic in {took:.1f} s; step times are modelled, nothing was measured")
    if json:
        write_json(json, {"layout": dataclasses.asdict(layout.sizes), **facts})
    if plot:
        draw(outcome, plot)


def times_of(served: Sequence[Served]) -> tuple["np.ndarray[tuple[int], np.dtype[np.float64]]", ...]:
    """(TTFT, TPOT) of requests that ended, in seconds."""
    first = np.array([s.first - s.at for s in served])
    each = np.array([(s.last - s.first) / max(s.output - 1, 1) for s in served])
    return first, each


def facts_of(outcome: Outcome, most_ttft: float, most_tpot: float) -> dict[str, float]:
    ended = [s for s in outcome.served.values() if s.last]
    if not ended:
        raise UserError("simulation: no request ended")
    first, each = times_of(ended)
    good = int(((first <= most_ttft) & (each <= most_tpot)).sum())
    start, replicas = ended[0].at, outcome.replicas
    span = max(outcome.end - start, 1e-9)
    prompts = sum(s.prompt for s in ended)
    facts: dict[str, float] = {
        "requests": len(outcome.served), "refused": outcome.refused, "in time": good / len(outcome.served),
        "goodput, requests/s": good / span, "output tokens/s": sum(s.output for s in ended) / span,
        "seconds": span, "busy": sum(r.busy for r in replicas) / span / len(replicas),
        "preemptions": sum(r.preemptions for r in replicas), "failures": outcome.failures,
        "restarted requests": sum(s.restarts > 0 for s in ended),
        "prompt tokens found": sum(r.found for r in replicas) / prompts, "steps": sum(r.steps for r in replicas),
    }  # fmt: skip
    for name, values in (("TTFT", first), ("TPOT", each)):
        for percent, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True):
            facts[f"{name} p{percent}, ms"] = float(value) * 1e3
    return facts


def printed(facts: dict[str, float]) -> dict[str, str]:
    shares = ("in time", "busy", "prompt tokens found")
    return {
        name: f"{value:.1%}" if name in shares else f"{value:,.2f}" if value % 1 else f"{value:,.0f}"
        for name, value in facts.items()
    }


def draw(outcome: Outcome, path: Path) -> None:
    """Over the simulated time: requests that come, times of first tokens, times of other tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ended = [s for s in outcome.served.values() if s.last]
    at = np.array([s.at for s in ended])
    first, each = times_of(ended)
    edges = np.linspace(at.min(), max(at.max(), at.min() + 1e-9), BUCKETS + 1)
    place = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, BUCKETS - 1)
    hours = (edges[:-1] + edges[1:]) / 7200
    figure, all_axes = pyplot.subplots(3, 1, figsize=(8, 7), sharex=True)
    counts = np.bincount(place, minlength=BUCKETS) / (edges[1] - edges[0])
    all_axes[0].plot(hours, counts)
    all_axes[0].set(ylabel="requests/s")
    for axes, values, label in ((all_axes[1], first, "TTFT, ms"), (all_axes[2], each, "TPOT, ms")):
        for percent in PERCENTILES:
            line = [np.percentile(values[place == b], percent) * 1e3 if counts[b] else np.nan for b in range(BUCKETS)]
            axes.plot(hours, line, label=f"p{percent}")
        axes.set(ylabel=label)
        axes.legend(fontsize=7)
    all_axes[2].set(xlabel="hours")
    for axes in all_axes:
        axes.grid(alpha=0.3)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120, bbox_inches="tight"))

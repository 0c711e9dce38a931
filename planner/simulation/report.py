"""`umbra plan --cluster FILE --simulate`: serves the cluster's traffic on its best layout, and reports and draws it.

With `simulation.memory: all`, the same traffic meets each share of resident experts and memory that moves.
"""

import dataclasses
import gc
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbra.base.errors import UserError
from umbra.base.files import write_json, write_whole
from umbra.planner.cluster import Cluster, SimulationSettings
from umbra.planner.layouts import Sizes, make_layout
from umbra.planner.machine import Hardware
from umbra.planner.plan import ClusterPlan, make_cluster_plan
from umbra.planner.simulation.run import Simulator
from umbra.planner.simulation.summary import TENANTS, Summary, summary_of

COLORS = {"sequences": "C0", "prefixes": "C2", "experts": "C1", "free": "0.85"}
SHARES = ("in time", "busy", "prompt tokens found", "experts hit")  # facts that are printed in percent


@dataclass(frozen=True)
class Variant:
    """One way to serve the traffic."""

    cluster: Cluster
    sizes: Sizes
    hardware: Hardware
    simulation: SimulationSettings

    @property
    def name(self) -> str:
        return "elastic" if self.simulation.memory == "elastic" else f"{self.sizes.resident:.0%}"


@dataclass(frozen=True)
class Simulated:
    variant: Variant
    summary: Summary
    seconds: float  # of the simulation itself, on a core


def show_simulation(path: Path, overrides: Sequence[str], json: Path | None, plot: Path | None) -> None:
    plan = make_cluster_plan(path, overrides)
    best = plan.cheapest or sorted(plan.rated, key=lambda simulated_all: simulated_all.load.tpot)[:1]
    if not best:
        raise UserError(
            f"{path.name}: no layout keeps up with {plan.cluster.load.rate:g} requests/s: nothing to simulate"
        )
    layout, load = best[0].layout, best[0].load
    print(f"{plan.cluster.devices} devices of {plan.hardware.name}: {layout.sizes}")
    variants = variants_of(plan, layout.sizes)
    start = time.perf_counter()
    simulated_all = simulate_all(variants)
    took, used = time.perf_counter() - start, sum(one.seconds for one in simulated_all)
    print("\n".join(table(simulated_all)))
    if len(variants) == 1:
        print(f"{'the plan expects':<28} {load.tpot * 1e3:.2f} ms a token, first after {load.ttft * 1e3:.0f} ms")
    simulated = sum(one.summary.facts["seconds"] for one in simulated_all) / 3600
    print(f"{simulated:.2f} hours of traffic in {took:.1f} s, {used:.1f} s of CPU time")
    print("Step times are modelled, nothing was measured.")
    if json:
        rows = [{"memory": one.variant.name, **one.summary.facts} for one in simulated_all]
        write_json(json, {"layout": dataclasses.asdict(layout.sizes), "rows": rows})
    if plot:
        draw(simulated_all, plot)


def variants_of(plan: ClusterPlan, sizes: Sizes) -> list[Variant]:
    simulation = plan.cluster.simulation
    if simulation.memory != "all":
        return [Variant(plan.cluster, sizes, plan.hardware, simulation)]
    possible = {layout.sizes for layout in (*plan.slow, *(rated.layout for rated in plan.rated))}
    fixed, elastic = (dataclasses.replace(simulation, memory=memory) for memory in ("fixed", "elastic"))
    shares = [dataclasses.replace(sizes, resident=share) for share in sorted(plan.cluster.search.resident)]
    variants = [Variant(plan.cluster, s, plan.hardware, fixed) for s in shares if s in possible]
    return [*variants, Variant(plan.cluster, sizes, plan.hardware, elastic)]


def simulate(variant: Variant) -> Simulated:
    start = time.process_time()
    layout = make_layout(variant.cluster, variant.sizes, variant.hardware)
    gc.disable()  # it would look through all requests again and again, and there are next to no circles
    try:
        outcome = Simulator(layout, variant.simulation).run()
    finally:
        gc.enable()
    summary = summary_of(outcome, variant.cluster.targets, variant.simulation.day.hour_s)
    return Simulated(variant, summary, time.process_time() - start)


def simulate_all(variants: Sequence[Variant]) -> list[Simulated]:
    """In as many processes as there are cores."""
    processes = min(len(variants), len(os.sched_getaffinity(0)))
    if processes == 1:
        return [simulate(variant) for variant in variants]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(simulate, variants))


def table(simulated_all: Sequence[Simulated]) -> list[str]:
    """A line for each fact, with a column for each variant."""
    columns = [printed(one.summary.facts) for one in simulated_all]
    lines = (
        [f"{'resident experts':<28}" + "".join(f"{one.variant.name:>12}" for one in simulated_all)]
        if simulated_all[1:]
        else []
    )
    for name in columns[-1]:
        lines.append(f"{name:<28}" + "".join(f"{column.get(name, '-'):>12}" for column in columns))
    return lines


def printed(facts: dict[str, float]) -> dict[str, str]:
    return {
        name: f"{value:.1%}" if name in SHARES else f"{value:,.2f}" if value % 1 else f"{value:,.0f}"
        for name, value in facts.items()
    }


def draw(simulated_all: Sequence[Simulated], path: Path) -> None:
    """Over the simulated hours: requests that come, what the last variant's memory holds, times of tokens, requests in
    time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    last = simulated_all[-1].summary
    figure, (rate, memory, *panels) = pyplot.subplots(5, 1, figsize=(8, 11), sharex=True)
    rate.plot(last.hours, last.lines["requests/s"], color="black")
    rate.set(ylabel="requests/s")
    colors = [COLORS[tenant] for tenant in TENANTS]
    memory.stackplot(last.hours, 100 * last.memory.T, labels=TENANTS, colors=colors)
    memory.set(ylabel=f"memory, %{': ' + simulated_all[-1].variant.name if simulated_all[1:] else ''}", ylim=(0, 100))
    memory.legend(fontsize=7, loc="lower left")
    for number, one in enumerate(simulated_all):
        style: dict[str, Any] = {"color": "black" if one is simulated_all[-1] else f"C{number}", "linewidth": 1}
        for axes, name in zip(panels[:2], ("TTFT", "TPOT"), strict=True):
            axes.plot(one.summary.hours, one.summary.lines[f"{name} p50, ms"], label=one.variant.name, **style)
            axes.plot(one.summary.hours, one.summary.lines[f"{name} p99, ms"], linestyle=":", **style)
            axes.set(ylabel=f"{name} p50, p99 (dotted), ms", yscale="log")
        panels[2].plot(one.summary.hours, 100 * one.summary.lines["in time"], **style)
    panels[2].set(ylabel="in time, %", xlabel="hours")
    if simulated_all[1:]:
        panels[0].legend(fontsize=7, title="resident experts", title_fontsize=7)
    for axes in (rate, memory, *panels):
        axes.grid(alpha=0.3)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120, bbox_inches="tight"))

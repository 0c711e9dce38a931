"""`umbra plan --cluster FILE`: tries every layout of a model over a cluster, says which are best and why the others are
not, and draws throughput against latency.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbra.base.errors import UserError
from umbra.base.files import write_json, write_whole
from umbra.planner.card_report import show_card_plan
from umbra.planner.cluster import Cluster, read_cluster
from umbra.planner.layouts import Layout, Sizes, make_layout, sizes_of, tokens_by_guesses
from umbra.planner.machine import Hardware, read_hardware
from umbra.planner.rates import Point, points, under_load, within_targets
from umbra.planner.times import PARTS, Times

BEST = 3  # layouts that are shown for each aim
REASONS = 6  # reasons for refused layouts that are printed
ASSUMED = (
    "Assumed: all prompts and answers have their average length, requests come evenly, experts are used evenly, ranks",
    "are equally fast, kernels run one after another, a rank does not share its links. Nothing here was measured.",
)


@dataclass(frozen=True)
class RatedLayout:
    """A layout that keeps up with the load. `most` is the most traffic at which the targets hold, if they ever do."""

    layout: Layout
    load: Point
    most: Point | None


@dataclass(frozen=True)
class ClusterPlan:
    cluster: Cluster
    hardware: Hardware
    rated: list[RatedLayout]
    slow: list[Layout]  # layouts that cannot keep up
    refused: list[tuple[Sizes, str]]

    @property
    def in_time(self) -> list[RatedLayout]:
        """The layouts whose users get their tokens in time at the load."""
        targets = self.cluster.targets
        return [f for f in self.rated if f.load.tpot * 1e3 <= targets.tpot_ms and f.load.ttft * 1e3 <= targets.ttft_ms]

    @property
    def quickest(self) -> list[RatedLayout]:
        return sorted(self.in_time, key=lambda f: (f.load.tpot, f.load.ttft))[:BEST]

    @property
    def cheapest(self) -> list[RatedLayout]:
        return sorted(self.in_time, key=lambda f: -f.most.rate if f.most else 0.0)[:BEST]


def make_cluster_plan(path: Path, overrides: Sequence[str] = ()) -> ClusterPlan:
    cluster = read_cluster(path, overrides)
    if cluster.card.models:
        raise UserError(f"{path.name}: card.models: one device is not simulated: leave --simulate out")
    hardware = read_hardware(cluster.hardware)
    plan = ClusterPlan(cluster, hardware, [], [], [])
    for sizes in sizes_of(cluster):
        try:
            layout = make_layout(cluster, sizes, hardware)
        except UserError as error:
            plan.refused.append((sizes, str(error)))
            continue
        load = under_load(layout)
        if load is None:
            plan.slow.append(layout)
        else:
            plan.rated.append(RatedLayout(layout, load, within_targets(layout)))
    return plan


def show_cluster_plan(path: Path, overrides: Sequence[str], json: Path | None, plot: Path | None) -> None:
    """Prints the plan of the cluster in the file at `path`; raises UserError if no layout is possible."""
    if (cluster := read_cluster(path, overrides)).card.models:
        return show_card_plan(cluster, json, plot)
    plan = make_cluster_plan(path, overrides)
    if not plan.rated and not plan.slow:
        raise UserError(f"{path.name}: no layout is possible; the first: {plan.refused[0][0]}: {plan.refused[0][1]}")
    print("\n".join(lines_of(plan)))
    if json:
        write_json(json, {"rows": [row_of(rated) for rated in plan.rated]})
    if plot:
        draw(plan, plot)


def lines_of(plan: ClusterPlan) -> list[str]:
    cluster, load, targets = plan.cluster, plan.cluster.load, plan.cluster.targets
    lines = [
        f"{cluster.devices} devices of {plan.hardware.name}, case {cluster.case}",
        f"{load.rate:g} requests/s of {load.prompt_tokens} + {load.output_tokens} tokens; first token within "
        f"{targets.ttft_ms:g} ms, others within {targets.tpot_ms:g} ms",
        *guesses_of(cluster),
        *ASSUMED,
    ]
    for aim, best in (("latency", plan.quickest), ("cost", plan.cheapest)):
        lines += ["", f"best for {aim}" if best else f"best for {aim}: no layout meets both targets at this load"]
        for rated in best:
            lines += ["", *lines_of_layout(rated)]
    return [*lines, "", *why_not(plan), "", *winners(plan)]


def guesses_of(cluster: Cluster) -> list[str]:
    accepted = cluster.guesses.accepted
    if not accepted:
        return []
    rates, tokens = ", ".join(f"{rate:g}" for rate in accepted), tokens_by_guesses(accepted)[-1]
    return [f"up to {len(accepted)} guesses a step where they pay, accepted {rates}: {tokens:.2f} tokens a step"]


def winners(plan: ClusterPlan) -> list[str]:
    """The last lines: the best layout for each aim."""
    if not plan.in_time:
        return ["no layout meets both targets at this load: more devices, or slower targets, are needed"]
    quick, cheap = plan.quickest[0], plan.cheapest[0]
    most = f"up to {cheap.most.rate:.2f} requests/s" if cheap.most else "at this load"
    return [
        f"quickest: {quick.layout.sizes}: {quick.load.tpot * 1e3:.2f} ms a token, first after "
        f"{quick.load.ttft * 1e3:.0f} ms",
        f"cheapest: {cheap.layout.sizes}: within the targets {most}",
    ]


def lines_of_layout(rated: RatedLayout) -> list[str]:
    layout, load, most = rated.layout, rated.load, rated.most
    at_most = f"{most.rate:.2f} requests/s, {most.tokens_per_device:.1f} tokens/s a device" if most else "none"
    lines = [
        f"  {layout.sizes}",
        f"    at the load: {load.tpot * 1e3:.2f} ms a token, first after {load.ttft * 1e3:.0f} ms, {load.sequences} "
        f"sequences a group; {layout.most_sequences} fit",
        f"    most within the targets: {at_most}",
    ]
    for name, times in (
        ("a token of one sequence", layout.decode(1)),
        (f"a token of {load.sequences} a group", layout.decode(load.sequences)),
        ("prefill of a prompt", layout.prefill),
    ):
        lines.append(f"    {name:<24} {times.total * 1e3:9.2f} ms: {parts_of(times)}")
    return lines


def parts_of(times: Times) -> str:
    largest = sorted(PARTS, key=lambda part: -times.parts[part])
    return ", ".join(f"{part} {times.parts[part] * 1e3:.2f}" for part in largest if times.parts[part] * 1e5 >= 1)


def why_not(plan: ClusterPlan) -> list[str]:
    """Lines that say why the other layouts are not among the best: refused, too slow, or what takes longer in them."""
    lines = [f"{len(plan.rated)} layouts keep up, {len(plan.slow)} do not, {len(plan.refused)} are refused:"]
    for reason, count in Counter(reason for _, reason in plan.refused).most_common(REASONS):
        lines.append(f"  {count:4} x {reason}")
    for layout in plan.slow:
        lines.append(f"  {layout.sizes}: cannot keep up: {layout.most_sequences} sequences a group fit")
    best = plan.quickest or sorted(plan.rated, key=lambda f: f.load.tpot)[:1]
    if not best:
        return lines
    first = best[0]
    chosen = {id(rated) for rated in (*plan.quickest, *plan.cheapest)}
    in_time = {id(rated) for rated in plan.in_time}
    lines.append(f"others, compared with {first.layout.sizes}:")
    for rated in sorted(plan.rated, key=lambda f: f.load.tpot):
        if id(rated) not in chosen:
            late = "" if id(rated) in in_time else ", too late"
            lines.append(
                f"  {rated.layout.sizes}: {rated.load.tpot * 1e3:.2f} ms a token, first after "
                f"{rated.load.ttft * 1e3:.0f} ms{late}: {slower_in(rated, first)}"
            )
    return lines


def slower_in(rated: RatedLayout, best: RatedLayout) -> str:
    """Returns what takes longest in a step of `rated`, compared with the same of `best`."""
    mine, its = rated.layout.decode(rated.load.sequences), best.layout.decode(best.load.sequences)
    part = max(PARTS, key=lambda part: mine.parts[part] - its.parts[part])
    if mine.parts[part] > its.parts[part]:
        return f"{part} {mine.parts[part] * 1e3:.2f} ms for {its.parts[part] * 1e3:.2f}"
    return f"prefill {rated.layout.prefill.total * 1e3:.0f} ms for {best.layout.prefill.total * 1e3:.0f}"


def row_of(rated: RatedLayout) -> dict[str, object]:
    sizes, times = rated.layout.sizes, rated.layout.decode(rated.load.sequences)
    return {
        "replicas": sizes.replicas,
        "world": sizes.world,
        "attn_tp": sizes.attn_tp,
        "attn_dp": sizes.attn_dp,
        "moe_tp": sizes.moe_tp,
        "moe_ep": sizes.moe_ep,
        "method": sizes.method,
        "resident": sizes.resident,
        "sequences": rated.load.sequences,
        "most_sequences": rated.layout.most_sequences,
        "tpot_ms": rated.load.tpot * 1e3,
        "ttft_ms": rated.load.ttft * 1e3,
        "most_rate": rated.most.rate if rated.most else 0.0,
        "tokens_per_device": rated.most.tokens_per_device if rated.most else 0.0,
        "parts_ms": {part: seconds * 1e3 for part, seconds in times.parts.items()},
    }


def draw(plan: ClusterPlan, path: Path) -> None:
    """Throughput of each layout against the time of a token, and the frontier that no layout passes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    layouts = [rated.layout for rated in plan.rated] + plan.slow
    shown = {id(rated.layout) for rated in (*plan.quickest, *plan.cheapest)}
    curves = [(layout, points(layout)) for layout in layouts]
    for layout, curve in curves:
        best = id(layout) in shown
        style: dict[str, Any] = {"linewidth": 1.8, "label": str(layout.sizes)}
        style = style if best else {"linewidth": 0.5, "color": "0.75"}
        axes.plot([p.tpot * 1e3 for p in curve], [p.tokens_per_device for p in curve], zorder=2 + best, **style)
    edge = frontier([p for _, curve in curves for p in curve])
    axes.plot([p.tpot * 1e3 for p in edge], [p.tokens_per_device for p in edge], "k--", linewidth=1, label="frontier")
    axes.axvline(plan.cluster.targets.tpot_ms, color="black", linestyle=":")
    axes.set(xlabel="ms a token", ylabel="output tokens/s a device", xscale="log")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120, bbox_inches="tight"))


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other one passes in both time and throughput, in order of time."""
    edge: list[Point] = []
    for p in sorted(points, key=lambda p: (p.tpot, -p.tokens_per_device)):
        if not edge or p.tokens_per_device > edge[-1].tokens_per_device:
            edge.append(p)
    return edge

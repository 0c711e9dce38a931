"""Prints the results of serving.py: goals, plots, and tables for docs/serving.md.

.venv/bin/umbra bench serving_report FILE  # the tables, from the JSON file of serving.py
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from umbra.base.errors import run_main
from umbra.base.files import write_whole
from umbra.tools.benchmarks.output import Row

OURS, THEIRS, LOOP, ELASTIC = "umbra", "llama-server", "engine's loop", "elastic"
LONG = ("itl_p50", "itl_p99", "itl_longest", "calm_itl_p50", "long_ttft_p50", "gaps", "failed")
COLUMNS = {
    "streams": ("tokens_per_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tpot_p50", "goodput", "failed"),
    "long": LONG,
    "pause": LONG,
    "prefix": ("ttft_new", "ttft_again", "ratio", "found"),
    "http": ("seconds",),
    "rates": ("rate", "tokens_per_s", "ttft_p50", "ttft_p99", "tpot_p50", "itl_p99", "goodput", "in_time", "failed"),
    "wave": ("phase", "sent_per_s", "goodput", "in_time", "tokens_per_s", "ttft_p50", "ttft_p99", "tpot_p50", "failed"),
}
TENANTS = {"sequences": "#4c78a8", "prefixes": "#72b7b2", "experts": "#f0a35e", "free": "#d9d9d9"}


def rows_of(rows: list[Row], scenario: str, server: str) -> list[Row]:
    return [row for row in rows if (row["scenario"], row["server"]) == (scenario, server)]


def goals(rows: list[Row], pause_ms: float) -> list[Row]:
    """Returns the goals with their results, as medians over the rounds. `pause_ms` is the configured pause of a
    prefill."""

    def median(server: str, scenario: str, key: str) -> float | None:
        values = [row[key] for row in rows_of(rows, scenario, server)]
        return statistics.median(values) if values else None

    judged: list[Row] = []

    def goal(name: str, wanted: str, value: float | None, other: float | None = 1.0) -> None:
        """`value` / `other` should be `wanted`, such as ">= 1.8"."""
        if value is not None and other:
            sign, limit = wanted.split()
            ratio = value / other
            met = ratio >= float(limit) if sign == ">=" else ratio <= float(limit)
            judged.append({"goal": name, "wanted": wanted, "found": ratio, "met": met})

    for name, wanted, scenario, key in (
        ("output tokens/s, 8 streams", ">= 1.8", "streams", "tokens_per_s"),
        ("TTFT p50, 8 streams", "<= 0.4", "streams", "ttft_p50"),
        ("ITL p99 while a long prompt arrives", "<= 0.5", "long", "itl_p99"),
    ):
        goal(f"{name}: of llama-server's", wanted, median(OURS, scenario, key), median(THEIRS, scenario, key))
    goal("HTTP: of the engine's own loop", "<= 1.05", median(OURS, "http", "seconds"), median(LOOP, "http", "seconds"))
    goal("ITL p99 while 2,000 tokens arrive: of prefill_pause_ms", "<= 2", median(OURS, "pause", "itl_p99"), pause_ms)
    goal("prefix of 1,000 tokens: TTFT cut by", ">= 10", median(OURS, "prefix", "ratio"))
    found_by_split = goodput_of(rows)
    for phase, elastic in found_by_split.pop(ELASTIC, {}).items():
        if found_by_split:
            best = max(goodput[phase] for goodput in found_by_split.values())
            goal(f"goodput of elastic, {phase}: of the best split's", ">= 1", elastic, best)
    return judged


def goodput_of(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Goodput over the wave by server and phase, medians over the rounds."""
    values: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["scenario"] == "wave":
            values.setdefault(row["server"], {}).setdefault(row["phase"], []).append(row["goodput"])
    return {
        server: {phase: statistics.median(of_phase) for phase, of_phase in phases.items()}
        for server, phases in values.items()
    }


def draw_rates(path: Path, rows: list[Row]) -> None:
    """Throughput against latency over the rates of arrivals."""
    figure, panels = subplots(1, 2, figsize=(11, 4))
    for server in (OURS, THEIRS):
        own = rows_of(rows, "rates", server)
        for axes, key in zip(panels, ("ttft_p50", "tpot_p50"), strict=True):
            axes.plot([row["tokens_per_s"] for row in own], [row[key] for row in own], "o-", label=server)
            for row in own:
                axes.annotate(f"{row['rate']:g}/s", (row["tokens_per_s"], row[key]), fontsize=7)
    for axes, label in zip(panels, ("time to first token", "time per output token"), strict=True):
        axes.set(xlabel="output tokens/s", ylabel=f"{label}, median, ms", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=150, bbox_inches="tight"))


def draw_wave(path: Path, rows: list[Row]) -> None:
    """Who had the memory over the elastic server's wave, and the goodput of each split in each phase."""
    figure, (memory, goodput) = subplots(1, 2, figsize=(11, 4), width_ratios=(2, 1))
    samples = rows_of(rows, "memory", ELASTIC)
    frames = [[row[tenant] for row in samples] for tenant in TENANTS]
    memory.stackplot([row["seconds"] for row in samples], frames, labels=TENANTS, colors=TENANTS.values())
    memory.set(xlabel="seconds", ylabel="frames of the arena", title=f"{ELASTIC}: memory", xlim=(0, None))
    memory.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(TENANTS), frameon=False)
    servers = goodput_of(rows)
    for index, (server, phases) in enumerate(servers.items()):
        places = [phase + index / (len(servers) + 1) for phase in range(len(phases))]
        goodput.bar(places, list(phases.values()), 1 / (len(servers) + 1), label=server)
        goodput.set_xticks(range(len(phases)), list(phases))
    goodput.set(ylabel="requests/s in time", title="goodput")
    goodput.legend(fontsize=7)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=150, bbox_inches="tight"))


def subplots(*shape: int, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*shape, layout="constrained", **options)


def markdown(report: dict[str, Any]) -> Iterator[str]:
    """The lines of the tables in docs/serving.md: the goals, then each scenario's medians over the rounds."""
    yield from table(
        ("goal", "wanted", "found"), [[r["goal"], r["wanted"], f"{r['found']:.2f}"] for r in report["goals"]]
    )
    for scenario, columns in COLUMNS.items():
        rows: dict[tuple[str, ...], list[Row]] = {}
        for row in report["rows"]:
            if row["scenario"] == scenario:
                keys = (row["server"], *(str(row[key]) for key in ("rate", "phase") if key in row))
                rows.setdefault(keys, []).append(row)
        if rows:
            yield ""
            shown = [column for column in columns if column not in ("rate", "phase")]
            heads = [scenario, *(key for key in ("rate", "phase") if key in columns), *shown]
            medians = ([cell([row[key] for row in own]) for key in shown] for own in rows.values())
            yield from table(heads, [[*keys, *cells] for keys, cells in zip(rows, medians, strict=True)])


def cell(values: list[float]) -> str:
    """The median, with three digits or more."""
    median = statistics.median(values)
    return f"{median:.3g}" if median < 100 else f"{median:,.0f}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(cells)} |"


def main(argv: list[str]) -> None:
    print("\n".join(markdown(json.loads(Path(argv[0]).read_text()))))


if __name__ == "__main__":
    run_main(main)

"""Hit rates and copies of Umbra's residency policy, compared with other policies and the offline optimum.

    .venv/bin/python -m tools.benchmarks.offload_policy [--steps N] [--trace FILE | --record FILE]
        [--json FILE] [--plot FILE]

Traces (routing_traces.py): the demo model on its held-out text, one sequence and four at once; synthetic, 32
layers x 128 experts, top 8. Slots, one pool for all layers, are a percentage of all experts and empty at the start. A
use is an expert of a layer in a step; the first tenth of a trace, from which `static` learns, is not counted.

Columns of the tables, keys of `rows` in the JSON file, `hits_`, `copies_` and `saved_` before each:
  ours      where copies run during the step and cost it nothing (swap_cost 0.02), up to 32 between two steps
  few       the same, up to 4 between two steps
  priced    where a copy costs 0.7 misses, as the planner measured for the demo on the CPU platform
  lru       least recently used, one pool
  lru_layer the same, an equal share of the slots for each layer
  lfu       least often used since the start
  static    those most used in the learning part
  best      Belady's optimum, which knows the future
LRU, LFU and the optimum copy at any miss, within a step and at no cost; ours copies only between two steps.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from cpu_offload.policy.residency import Residency, ResidencySettings
from tools.benchmarks.cache_policies import Policy, lfu, lru, lru_by_layer, optimum, residency, static
from tools.benchmarks.output import Row, flags, plot, printed, write_rows
from tools.benchmarks.routing_traces import KINDS, Trace, load_trace, made_up, record_demo, save_trace
from umbra.errors import run_main

BUDGETS = (12.5, 25, 50, 75)  # percent of all experts
POLICIES: dict[str, Policy] = {
    "ours": residency(ResidencySettings()),
    "few": residency(ResidencySettings(max_swaps=4)),
    "priced": residency(ResidencySettings(swap_cost=0.7)),
    "lru": lru,
    "lru_layer": lru_by_layer,
    "lfu": lfu,
    "static": static,
    "best": optimum,
}
FIGURES = {"hits": ".3f", "copies": ".0f", "saved": ".2f"}
TITLES = {
    "hits": "hit rate",
    "copies": "copies in 1000 steps",
    "saved": "misses a step saved, a copy counted as a miss",
}


def measure(traces: Iterator[Trace]) -> Iterator[Row]:
    for trace in traces:
        for budget in BUDGETS:
            row: Row = {"trace": trace.name, "budget": budget, "steps": len(trace.ids)}
            for name, policy in POLICIES.items():
                hits, copies, saved = policy(trace, int(trace.size * budget / 100)).measured()
                row |= {f"hits_{name}": hits, f"copies_{name}": 1000 * copies, f"saved_{name}": saved}
            yield row


def columns(figure: str) -> list[tuple[str, str, int, str]]:
    first = [("trace", "trace", 19, ""), ("budget", "slots %", 9, "")]
    return first + [(f"{figure}_{name}", name, 11, FIGURES[figure]) for name in POLICIES]


def demo_trace(trace: Path | None, record: Path | None, steps: int | None) -> Trace:
    if trace:
        return load_trace(trace)
    with TemporaryDirectory(prefix="umbra-policy-") as folder:
        recorded = record_demo(Path(folder), steps)
    if record:
        save_trace(record, recorded)
    return recorded


def decision_ms() -> float:
    """Median time to observe a step and to decide on swaps, a quarter of 48 layers x 128 experts resident."""
    trace, policy = made_up("Zipf", 200, layers=48), Residency(48, 128, ResidencySettings())
    resident = np.random.default_rng(0).random((48, 128)) < 0.25
    times = []
    for keys in trace.places():
        counts = np.bincount(keys, minlength=trace.size).reshape(48, 128)
        start = time.perf_counter()
        policy.observe(counts)
        policy.swaps(resident, 0)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument(
        "--steps", type=int, help="of the demo trace, the whole text without; synthetic ones: at most 4000"
    )
    parser.add_argument("--trace", type=Path, help="a trace file instead of running the demo model")
    parser.add_argument("--record", type=Path, help="keep the demo model's trace here")
    parser.add_argument("--demo-only", action="store_true", help="no synthetic traces")
    args = parser.parse_args(argv)
    demo = demo_trace(args.trace, args.record, args.steps)

    def traces() -> Iterator[Trace]:
        yield demo
        yield demo.together(4)
        for kind in () if args.demo_only else KINDS:
            yield made_up(kind, min(args.steps or 4000, 4000))

    print(TITLES["hits"])
    rows = printed(measure(traces()), columns("hits"))
    for figure in ("copies", "saved"):
        print(f"\n{TITLES[figure]}")
        printed(rows, columns(figure))
    milliseconds = decision_ms()
    print(f"\none decision for 48 layers x 128 experts: {milliseconds:.2f} ms")
    write_rows(args.json, rows, decision_ms=milliseconds)
    names = [name for name in dict.fromkeys(row["trace"] for row in rows) if name in (demo.name, "Zipf, drifting")]
    panels = {
        f"{trace}: % of experts resident": {
            name: (BUDGETS, [row[f"hits_{name}"] / row["hits_best"] for row in rows if row["trace"] == trace])
            for name in POLICIES
            if name != "best"
        }
        for trace in names
    }
    plot(args.plot, panels, "hits, of the optimum's")


if __name__ == "__main__":
    run_main(main)

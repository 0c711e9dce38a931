"""Hit rates and copies of Umbra's residency policy, compared with other policies and the offline optimum.

    .venv/bin/umbra bench offload_policy [--steps N] [--trace FILE | --record FILE]
        [--only demo|requests|made-up|published] [--json FILE] [--plot FILE]

Traces (routing_traces.py, published_traces.py): the demo model on its held-out text, one sequence and four at once; the
same as requests with prompts of 512 tokens; synthetic, 32 layers x 128 experts, top 8; and requests with the published
statistics of real models. Slots, one pool for all layers, are a percentage of all experts and empty at the start. A use
is an expert of a layer in a step; the first tenth of a trace, from which `static` learns, is not counted.

Columns of the tables, keys of `rows` in the JSON file, `hits_`, `copies_` and `saved_` before each:
  runs      as in a run: copies, at most 32 under way, at a cost of 0.02, are made one after another from the end of a
            step on, and a copy counts from its layer's next turn on. In the time of a step fit 50 copies of the demo
            (measured: 0.44 ms and .008 ms) and of V4-Flash, in 43 layers, 80 (13.4 MB, 27 GB/s and 40 ms), all of which
            may be under way; of the others as many as a token has experts, which is assumed
  ours      the same, but copies take no time
  cold      the same as runs, without learning from prompts
  priced    runs, where a copy costs 0.7 misses, as the planner measured for the demo on the CPU platform
  lru       least recently used, one pool
  lfu       least often used since the start
  static    those most used in the learning part
  prompt    cann-recipes-infer: those that the last long prompt used most, the same number in each layer
  tail      the same, by the prompt's last 64 tokens
  known     knows every expert's probability, but not what is drawn: made-up traces only
  best      Belady's optimum, which knows the future
LRU, LFU and the optimum copy at any miss, within a step and at no cost; ours decides only between two steps.

Decode speed of V4-Flash at one request is that of cann-recipes-infer's formula, with 4-bit experts at 28 % of slots.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from umbra.base.errors import run_main
from umbra.cpu_offload.policy.residency import ResidencySettings
from umbra.tools.benchmarks.cache_policies import (
    Policy,
    by_prompt,
    by_tail,
    known,
    lfu,
    lru,
    optimum,
    residency,
    static,
)
from umbra.tools.benchmarks.output import Row, flags, plot, printed, write_rows
from umbra.tools.benchmarks.published_traces import MODELS, statistics_of, trace_of
from umbra.tools.benchmarks.routing_traces import KINDS, Trace, load_trace, made_up, record_demo, save_trace

BUDGETS = (12.5, 25, 50, 75)  # percent of all experts
OF_PUBLISHED = (12.5, 28, 50)
LINK = 80 / 43  # copies of V4-Flash's 4-bit experts a layer in a step of 40 ms at 27 GB/s
DEMO_LINK = 50  # copies of the demo's experts in a step
KINDS_OF_TRACE = ("demo", "requests", "made-up", "published")


def policies(most: int, link: float) -> dict[str, Policy]:
    chosen = ResidencySettings(most)
    return {
        "runs": residency(chosen, link),
        "ours": residency(chosen),
        "cold": residency(chosen, link, warm=False),
        "priced": residency(replace(chosen, swap_cost=0.7), link),
        "lru": lru,
        "lfu": lfu,
        "static": static,
        "prompt": by_prompt,
        "tail": by_tail,
        "known": known,
        "best": optimum,
    }


NAMES = tuple(policies(1, 1))
FIGURES = {"hits": ".3f", "copies": ".0f", "saved": ".2f"}
TITLES = {
    "hits": "hit rate",
    "copies": "copies in 1000 steps",
    "saved": "misses a step saved, a copy counted as a miss",
}


def measure(traces: Iterator[tuple[Trace, int, float, tuple[float, ...]]]) -> Iterator[Row]:
    for trace, most, link, budgets in traces:
        for budget in budgets:
            row: Row = {"trace": trace.name, "budget": budget, "steps": len(trace.ids)}
            for name, policy in policies(most, link).items():
                hits, copies, saved = policy(trace, int(trace.size * budget / 100)).measured()
                row |= {f"hits_{name}": hits, f"copies_{name}": 1000 * copies, f"saved_{name}": saved}
            yield row


def columns(figure: str) -> list[tuple[str, str, int, str]]:
    first = [("trace", "trace", 26, ""), ("budget", "slots %", 8, "")]
    return first + [(f"{figure}_{name}", name, 8, FIGURES[figure]) for name in NAMES]


def speed(hit_rate: float) -> float:
    """Tokens a second of V4-Flash by the formula of cann-recipes-infer: the NPU's path, and what of the experts on the
    CPU it does not hide, in ms."""
    return 1000 / (36.4 + max(0.0, 24.8 * (1 - hit_rate) - 4.8))


def demo_trace(trace: Path | None, record: Path | None, steps: int | None) -> Trace:
    if trace:
        return load_trace(trace)
    with TemporaryDirectory(prefix="umbra-policy-") as folder:
        recorded = record_demo(Path(folder), steps)
    if record:
        save_trace(record, recorded)
    return recorded


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument(
        "--steps", type=int, help="of the demo trace, the whole text without; synthetic ones: at most 4000"
    )
    parser.add_argument("--trace", type=Path, help="a trace file instead of running the demo model")
    parser.add_argument("--record", type=Path, help="keep the demo model's trace here")
    parser.add_argument("--only", choices=KINDS_OF_TRACE, help="one kind of traces")
    args = parser.parse_args(argv)
    wanted = [args.only] if args.only else KINDS_OF_TRACE

    def traces() -> Iterator[tuple[Trace, int, float, tuple[float, ...]]]:
        if "demo" in wanted or "requests" in wanted:
            demo = demo_trace(args.trace, args.record, args.steps)
        for sequences in (1, 4):
            if "demo" in wanted:
                yield demo.together(sequences) if sequences > 1 else demo, 32, DEMO_LINK, BUDGETS
            if "requests" in wanted:
                yield demo.requests(sequences), 32, DEMO_LINK, BUDGETS
        for kind in KINDS if "made-up" in wanted else ():
            yield made_up(kind, min(args.steps or 4000, 4000)), 32, 32, BUDGETS
        for model in MODELS if "published" in wanted else ():
            trace = trace_of(model)
            for policy, percent, value, here in statistics_of(model, trace):
                print(f"{model.name}, {policy} at {percent} %: published {value:.3f}, here {here:.3f}")
            per_layer = LINK if model is MODELS[0] else model.k  # only that model's experts have a published size
            most = round(per_layer * trace.layers)
            yield trace, most, most, OF_PUBLISHED

    print(TITLES["hits"])
    rows = printed(measure(traces()), columns("hits"))
    for figure in ("copies", "saved"):
        print(f"\n{TITLES[figure]}")
        printed(rows, columns(figure))
    write_rows(args.json, rows)
    for row in rows:
        if row["trace"] == MODELS[0].name:
            speeds = ", ".join(f"{name} {speed(row[f'hits_{name}']):.1f}" for name in NAMES)
            print(f"{row['trace']}, {row['budget']} %, tok/s: {speeds}; published at 12.5 %: 19.2-22.6")
    panels = {
        f"{trace}: % of experts resident": {
            name: (BUDGETS, [row[f"hits_{name}"] / row["hits_best"] for row in rows if row["trace"] == trace])
            for name in NAMES
            if name not in ("best", "known")
        }
        for trace in dict.fromkeys(row["trace"] for row in rows if row["trace"] in ("demo", "Zipf, drifting"))
    }
    if panels:
        plot(args.plot, panels, "hits, of the optimum's")


if __name__ == "__main__":
    run_main(main)

"""Models what it gains to place experts over ranks by their use, with copies of those that get the most tokens: decode
steps of Qwen3-235B in bfloat16 on an Atlas A3, with expert parallelism of 16 to 384.

    .venv/bin/umbra bench expert_placement [--skew S] [--rows N] [--json FILE]

Placements are the engine's own (ops/parallel/placement.py), and step times those of the cluster model, with the
experts and rows of the busiest rank in each layer in place of the average. The routing is synthetic: the logarithms of
how often a layer's experts are used have the standard deviation S, and each step draws its tokens from that. S is
chosen so that experts in order are as uneven as DeepSeek-R1's were published to be; the first lines compare what
placements then give with what is published for them. Each placement follows from the tokens of 100 steps; others are
timed.

A row, of the table and of `rows` in the JSON file:
  ranks      expert parallelism; each rank decodes `rows` sequences of 2,048 tokens
  experts    of a layer on a rank; copies: those beyond the 128 of the model, on all ranks
  placed     in order, or by their use
  imbalance  tokens of the busiest rank / of a rank on average, the mean over layers and steps
  ms         of a step; gain: of a step with experts in order and no more copies than needed / of this one
  GB         of a rank's memory that the copies take
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from umbra.executor.config.case import Case
from umbra.executor.config.load import load_case
from umbra.executor.config.units import GB
from umbra.ops.counted import Collective, Done
from umbra.ops.parallel.placement import Placement, next_placement, physical_for
from umbra.planner.layouts import spans_of
from umbra.planner.machine import Hardware, read_hardware
from umbra.planner.simulation.experts import uses_of
from umbra.planner.times import Placing, step_times
from umbra.planner.work import CountedRank, RankWork
from umbra.tools.benchmarks.output import Columns, Row, flags, printed, write_rows

CASE, HARDWARE, CACHED = "qwen3_235b_a22b_bf16_tp16", "atlas_a3", 2048
RANKS = (16, 32, 64, 128, 256, 384)
SKEW = 1.1
SEEN, LAYERS, STEPS = 100, 24, 4  # steps that a placement follows from; layers and steps that stand for all
LEAST_EXPERTS = 2  # which npu_grouped_matmul takes; a single one is modelled all the same
# DeepSeek-R1, 58 layers of 256 experts: (maximum - mean) / mean over ranks, in the mean of layers and steps.
# NVIDIA/TensorRT-LLM, examples/wide_ep/ep_load_balancer/README.md, 2a595f8157
PUBLISHED = (("32 ranks of 8, in order", 32, False, 1.564), ("36 ranks of 8, placed", 36, True, 0.115))
PUBLISHED_EXPERTS, PUBLISHED_ROWS, PUBLISHED_OWN = 256, 1024, 8  # rows: that a rank gets on average
COLUMNS: Columns = (
    ("ranks", "ranks", 6, ""),
    ("experts", "experts", 9, ""),
    ("copies", "copies", 8, ""),
    ("placed", "placed", 10, ""),
    ("imbalance", "imbalance", 11, ".2f"),
    ("ms", "ms", 8, ".1f"),
    ("gain", "gain", 7, ".2f"),
    ("gb", "GB", 7, ".1f"),
)
PairCounts = NDArray[np.int64]  # (layers, steps, physical experts): rows that come to each of them in a step


def in_order(experts: int, ranks: int, own: int) -> Placement:
    """Experts one after another; where there is room for more, all of them again."""
    return np.arange(ranks * own) % experts


def drawn(
    uses: NDArray[np.float64], held: list[Placement], ranks: int, pairs: float, steps: int, seed: int
) -> PairCounts:
    """The rows of `steps` steps with `pairs` pairs of a token and an expert; uses[l] and held[l] are of layer l."""
    choose, pair_counts = np.random.default_rng([seed, 7]), []
    for use, here in zip(uses, held, strict=True):
        senders = np.bincount(
            np.concatenate([physical_for(rank, ranks, here) for rank in range(ranks)]), minlength=len(here)
        )
        pair_counts.append(choose.poisson(pairs * use[here] * senders / ranks, (steps, len(here))))
    return np.array(pair_counts)


def placed(uses: NDArray[np.float64], ranks: int, own: int, pairs: float) -> list[Placement]:
    """The placement of each layer by the tokens of SEEN steps, from experts in order."""
    counts = np.random.default_rng(8).poisson(SEEN * pairs * uses)
    return [next_placement(one, ranks, in_order(len(one), ranks, own)) for one in counts]


def unevenness(rows: PairCounts, ranks: int) -> float:
    """Tokens of the busiest rank / of a rank on average, in the mean of layers and steps."""
    loads = rows.reshape(*rows.shape[:2], ranks, -1).sum(3)
    return float((loads.max(2) / loads.mean(2)).mean())


def published(skew: float) -> Iterator[str]:
    for what, ranks, by_use, wanted in PUBLISHED:
        uses, pairs = uses_of(np.random.default_rng(0), skew, 58, PUBLISHED_EXPERTS), float(PUBLISHED_ROWS * ranks)
        held = [in_order(PUBLISHED_EXPERTS, ranks, PUBLISHED_OWN)] * len(uses)
        held = placed(uses, ranks, PUBLISHED_OWN, pairs) if by_use else held
        imbalance = unevenness(drawn(uses, held, ranks, pairs, STEPS, 1), ranks)
        yield f"256 experts, {what}: imbalance {imbalance:.2f}, published {1 + wanted:.2f}"


@dataclass(frozen=True)
class PlacedStep:
    """A decode step of `rows` rows on each rank, with experts used evenly, and what it takes to make them uneven."""

    case: Case
    work: RankWork
    placing: Placing
    hardware: Hardware
    own: int  # experts of a rank in `work`
    expert_bytes: float

    def seconds(self, rows: NDArray[np.int64], pairs: float) -> float:
        """The step's time if each layer is like this one, with rows (ranks, own). All ranks wait for the last."""
        loads, used = rows.sum(1), (rows > 0).sum(1)
        share = loads.max() * len(rows) / pairs
        busiest = {int(np.argmax(loads)), int(np.argmax(used * self.expert_bytes + loads))}
        return max(self._seconds(float(loads[r]) * len(rows) / pairs, int(used[r]), share) for r in busiest)

    def _seconds(self, load: float, used: int, most: float) -> float:
        """`load`: rows of a rank in shares of the mean; `used`: experts; `most`: the load of the busiest rank."""

        def mixture(done: Done) -> Done:
            if not done.mixture:
                return done
            return dataclasses.replace(
                done, weights=used * self.expert_bytes, macs=load * done.macs, rows=load * done.rows
            )

        def message(one: Collective) -> Collective:
            exchanged = one.kind in ("dispatch", "combine")
            return dataclasses.replace(one, nbytes=round(most * one.nbytes)) if exchanged else one

        work = RankWork(tuple(map(mixture, self.work.done)), tuple(map(message, self.work.messages)))
        return step_times(work, self.placing, self.hardware).total


@cache
def model_of(ranks: int, rows: int) -> PlacedStep:
    """Experts are counted for the fewest experts that a product takes, and even numbers of rows for each."""
    settings: dict[str, object] = {
        "world_size": ranks,
        "attn_tp_size": 1,
        "moe_tp_size": 1,
        "embed_tp_size": 0,
        "lmhead_tp_size": 0,
        "hccl_config.aiv_group": "none",
        "batch_size": ranks,
        "expert_slots": max(LEAST_EXPERTS, -(-128 // ranks)),
    }
    case = load_case(CASE, settings=settings)
    case = dataclasses.replace(case, data_config=dataclasses.replace(case.data_config, batch_size=ranks * rows))
    counted = CountedRank(case)
    own = case.parallel_config.expert_slots
    expert_bytes = counted.memory.experts / counted.expert_layers / own
    placing = Placing(spans_of(ranks, 1))
    return PlacedStep(case, counted.decode(rows, CACHED), placing, read_hardware(HARDWARE), own, expert_bytes)


def rows_of(ranks: int, rows: int, skew: float, layers: int) -> Iterator[Row]:
    model, experts, top_k = model_of(ranks, rows), 128, 8
    pairs, least = float(ranks * rows * top_k), -(-experts // ranks)
    uses, first = uses_of(np.random.default_rng(0), skew, LAYERS, experts), 0.0
    for by_use, more in ((False, 0), (True, 0), (True, 1), (True, 2)):
        own = least + more
        held = placed(uses, ranks, own, pairs) if by_use else [in_order(experts, ranks, own)] * LAYERS
        pair_counts = drawn(uses, held, ranks, pairs, STEPS, 1)
        steps = pair_counts.reshape(-1, ranks, own)
        seconds = float(np.mean([model.seconds(step, pairs) for step in steps]))
        first = first or seconds
        yield {
            "ranks": ranks,
            "experts": own,
            "copies": ranks * own - experts,
            "placed": "by use" if by_use else "in order",
            "imbalance": unevenness(pair_counts, ranks),
            "ms": seconds * 1e3,
            "gain": first / seconds,
            "gb": more * model.expert_bytes * layers / GB,
        }


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--skew", type=float, default=SKEW)
    parser.add_argument("--rows", type=int, default=32, help="sequences that each rank decodes")
    args = parser.parse_args()
    print("\n".join(published(args.skew)))
    rows = (row for ranks in RANKS for row in rows_of(ranks, args.rows, args.skew, 94))
    write_rows(args.json, printed(rows, COLUMNS), skew=args.skew, sequences=args.rows)


if __name__ == "__main__":
    main()

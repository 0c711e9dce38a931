"""One arena, too small for all experts and the most KV pages at once: fixed splits of it against the elastic one.

    .venv/bin/umbra bench elastic [--rounds 5] [--json FILE] [--plot FILE]

The demo model, q8, runs 32 sequences of different lengths in waves; a wave arrives when all but two of the one before
have ended, so the KV cache's demand swings. All placements are in one process and take turns, each with one thread as
the device and one as the shadow pool (`--threads`: of each). Tokens are sampled, without top_p, whose sorting would
take as long as the model; they must be those of the unconstrained run.

`--plot` draws the elastic run of the last round. A row, of the table and of `rows` in the JSON file:
  placement   unconstrained: all experts resident and room for the longest sequences; 25 % ...: of the arena for a
              fixed number of experts; elastic
  seconds     from the first arrival to the last end, median of the rounds
  ratio       to the best fixed split: the median over the rounds of both times of one round
  cpu_seconds of all threads, median; on a busy machine steadier than `seconds`, but without time spent waiting
  tokens_per_s, steps (of decode), most_running (sequences at once)
  hit_rate, idle (frames free in a step, on average), most_kv_frames, copies, evictions, for_cache (evictions for the KV
              cache's sake), turns (how often frames changed direction between experts and cache)   of the last round
  ended       number of sequences that ended, or why the placement was refused
"""

import random
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.cpu_offload.history import History
from umbra.executor.config.case import Case
from umbra.executor.config.env import rank_env
from umbra.executor.config.load import load_case, model_folder
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.timings import Timings
from umbra.executor.model_runner import ModelRunner, make_runner
from umbra.executor.run.plots import plot
from umbra.models.tokenizers import tokenizer_in
from umbra.tools.benchmarks.output import Row, flags, printed, write_rows

WAVES = (16, 4, 12)
LEFT = 2  # sequences that still run when the next wave arrives
PROMPT, NEW = (16, 64), (32, 192)  # tokens, from .. to
SPLITS = (25, 50, 75, 100)
ARENA_MB = 8
SWAP_COST, MAX_SWAPS = 0.7, 4  # cost of a copy in misses, measured for the demo; most copies at one decision
MEASURE_S = 0.1  # seconds of the planner's measurements: few, since nothing is left to choose
COLUMNS = (
    ("placement", "placement", 14, ""),
    ("seconds", "seconds", 9, ".2f"),
    ("ratio", "ratio", 7, ".2f"),
    ("cpu_seconds", "CPU s", 7, ".2f"),
    ("tokens_per_s", "tokens/s", 10, ".0f"),
    ("steps", "steps", 7, ""),
    ("most_running", "at once", 9, ""),
    ("hit_rate", "hit rate", 10, ".3f"),
    ("idle", "idle", 7, ".1f"),
    ("most_kv_frames", "KV frames", 11, ""),
    ("copies", "copies", 8, ""),
    ("evictions", "evictions", 11, ""),
    ("for_cache", "for cache", 11, ""),
    ("turns", "turns", 7, ""),
    ("ended", "ended", 7, ""),
)


@dataclass(frozen=True)
class WaveRequest:
    ids: list[int]
    new_tokens: int


def serve(
    runner: ModelRunner, waves: ListOf[ListOf[WaveRequest]], after_step: Callable[[], object] = lambda: None
) -> list[Sequence]:
    """Runs all requests to their ends, one wave after the other, and calls `after_step` after every step."""
    coming, sequences = list(waves), list[Sequence]()
    runner.loop.timings = Timings()
    scheduler = runner.loop.scheduler
    while True:
        left = len(scheduler.waiting) + len(scheduler.running)
        if coming and left <= LEFT:
            for request in coming.pop(0):
                index = len(sequences)
                wanted = runner.request(index, request.ids, request.new_tokens)
                sequences.append(runner.loop.submit(wanted, index))
        elif not left:
            return sequences
        runner.loop.step()
        after_step()


def swings(history: History) -> list[int]:
    """The numbers of frames by which the cache changed between the times at which the experts' memory turned from
    shrinking to growing or back. They are few and large if memory follows demand, many and small if it oscillates."""
    experts = [step.expert_frames for step in history.steps]
    cache = [step.kv_frames for step in history.steps]
    moves = [(step, now - last) for step, (last, now) in enumerate(pairwise(experts), 1) if now != last]
    turns = [(a, b, grew) for (a, grew), (b, grows) in pairwise(moves) if (grew > 0) != (grows > 0)]
    # Experts return at the end of a step, which the next step records, and are evicted while pages are taken.
    return [cache[b] - cache[a - 1] if grew > 0 else cache[a] - cache[b - 1] for a, b, grew in turns]


def settings(threads: int, instruction_set: str, **offload: object) -> Case:
    return load_case(
        "demo_offload",
        [
            *(f"offload_config.{key}={value}" for key, value in offload.items()),
            f"threads={threads}",
            f"shadow_threads={threads}",
            f"instruction_set={instruction_set}",
            f"max_swaps={MAX_SWAPS}",
            "stream_tokens=-1",
            f"measure_s={MEASURE_S}",
            f"batch_size={max(WAVES)}",
            f"input_max_len={PROMPT[1]}",
            f"max_new_tokens={NEW[1]}",
            "ignore_eos=true",
            "top_p=1",
        ],
    )


def requests(case: Case) -> list[list[WaveRequest]]:
    """Requests with different pieces of the held-out text."""
    folder, choose = model_folder(case), random.Random(0)
    ids = tokenizer_in(folder).encode((folder / "held_out.txt").read_text(encoding="utf-8"), chat=False)
    starts = [choose.randrange(len(ids) - PROMPT[1]) for _ in range(sum(WAVES))]
    all_of_them = iter([WaveRequest(ids[s : s + choose.randint(*PROMPT)], choose.randint(*NEW)) for s in starts])
    return [[next(all_of_them) for _ in range(size)] for size in WAVES]


class Placement:
    """One way to divide the arena, and the measurements of its rounds."""

    def __init__(self, case: Case):
        self.runner = make_runner(case, ROOT / "results", rank_env())
        self.runner.setup()
        if self.runner.engine.shadows:
            self.runner.engine.shadows.value_copies(SWAP_COST, MAX_SWAPS)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.most_running = 0

    @property
    def history(self) -> History:
        if not self.runner.engine.shadows:
            raise ValueError("a case without shadows")
        return self.runner.engine.shadows.history

    def round(self, waves: list[list[WaveRequest]]) -> list[list[int]]:
        """Runs all waves once. -> the tokens of each sequence"""
        if self.runner.engine.shadows:
            self.runner.engine.shadows.forget()
        start, worked = time.perf_counter(), time.process_time()
        sequences = serve(self.runner, waves, self._look)
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - worked)
        return [s.generated for s in sequences if s.finish_reason]

    def _look(self) -> None:
        self.most_running = max(self.most_running, len(self.runner.loop.scheduler.running))

    def row(self, name: str, tokens: list[list[int]], best: list[float]) -> Row:
        report, seconds = self.history.report(), statistics.median(self.seconds)
        return {
            "placement": name,
            "seconds": seconds,
            "ratio": statistics.median(a / b for a, b in zip(self.seconds, best, strict=True)),
            "cpu_seconds": statistics.median(self.cpu_seconds),
            "tokens_per_s": sum(map(len, tokens)) / seconds,
            "most_running": self.most_running,
            "idle": statistics.mean(step.free_frames for step in self.history.steps),
            "for_cache": report["evictions_for_cache"],
            "turns": len(swings(self.history)),
            "ended": len(tokens),
        } | {key: report[key] for key in ("steps", "hit_rate", "most_kv_frames", "copies", "evictions")}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    threads, instructions = args.threads, args.instruction_set
    placements = {"unconstrained": Placement(settings(threads, instructions, mode="resident", arena_mb=0))}
    if not (shadows := placements["unconstrained"].runner.engine.shadows):
        raise ValueError("demo_offload has shadows")
    arena, refused = shadows.arena, dict[str, str]()
    extents = (ARENA_MB << 20) // arena.frame_bytes // arena.extent_frames
    for share in SPLITS:
        slots = extents * share // 100 * arena.extent_slots
        try:
            case = settings(threads, instructions, mode="fixed", slots=slots, arena_mb=ARENA_MB)
            placements[f"{share} %"] = Placement(case)
        except UserError as error:
            refused[f"{share} %"] = str(error)
    placements["elastic"] = Placement(settings(threads, instructions, mode="elastic", arena_mb=ARENA_MB))
    waves = requests(placements["elastic"].runner.case)
    expected = placements["unconstrained"].round(waves)
    for number in range(args.rounds + 1):  # the first captures graphs and learns; it is not counted
        for name, placement in placements.items():
            if placement.round(waves) != expected:
                raise SystemExit(f"{name}, round {number}: other tokens than the unconstrained run")
    for placement in placements.values():
        placement.seconds, placement.cpu_seconds = (
            times[-args.rounds :] for times in (placement.seconds, placement.cpu_seconds)
        )
    fixed = [p.seconds for name, p in placements.items() if name.endswith("%")]
    best = min(fixed, key=statistics.median)
    rows = printed((p.row(name, expected, best) for name, p in placements.items()), COLUMNS)
    for name, why in refused.items():
        print(f"{name:>14}  refused: {why}")
        rows.append({"placement": name, "ended": why})
    write_rows(args.json, rows, arena_mb=ARENA_MB, threads=threads, rounds=args.rounds, waves=WAVES)
    if args.plot:
        plot(placements["elastic"].history, Path(args.plot))


if __name__ == "__main__":
    main()
